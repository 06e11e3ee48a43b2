"""Frontier: what is dominated, what an objective picks, and that a search finds a known trade."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pigou.capacity.frontier import (
    EvaluatedPoint,
    Frontier,
    FrontierSearch,
    LoadFrontier,
    PointFigures,
    PointTrial,
    dominated,
    find_frontier,
    shortened,
)
from pigou.cli import build
from pigou.config import ConfigError, ControlConfig
from pigou.control.routing_controller import OperatingPoint
from pigou.objectives import Slo
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import unlimited
from pigou.sim.workload import ClosedLoop, OpenLoop, RequestLengths, renewal

LAW = "law:itl_a=0.008,itl_b=0.0003,prefill=0.004,prefill_token=0.00005"
LENGTHS = RequestLengths(input=(20, 2000), output=(8, 60))
LOSSES = st.lists(st.tuples(*[st.sampled_from((1.0, 2.0, 3.0))] * 3), min_size=1, max_size=12)


def search(**changes: object) -> FrontierSearch:
    own = {
        "workloads": [renewal(LENGTHS, 12.0, 1.0, 240, 0.0, seed) for seed in (0, 1)],
        "fleet": read_fleet("2xboth"), "control": unlimited(), "client": ClientConfig(),
        "setup": Setup(timing=LAW, blocks=4000, max_seqs=32, max_batched_tokens=1024),
        "requests": 120, "candidates": 6,
    }  # fmt: skip
    return FrontierSearch(**(own | changes))  # type: ignore[arg-type]


def entry(ttft_s: float, itl_s: float, tok_s: float, seqs: int) -> EvaluatedPoint:
    figures = PointFigures(ttft_s=ttft_s, itl_s=itl_s, output_tok_s=tok_s)
    return EvaluatedPoint(
        point=OperatingPoint(max_seqs=seqs),
        figures=figures,
        requests=1,
        final=True,
        dominated=False,
    )


def frontier(*points: EvaluatedPoint) -> Frontier:
    loads = {name: LoadFrontier(load=1.0, in_regime=1.0, points=points)
             for name in ("light", "heavy")}  # fmt: skip
    return Frontier(percentile=99.0, regimes=loads)


@given(LOSSES)
def test_a_point_is_dominated_by_one_that_is_nowhere_worse_and_once_better(
    rows: list[tuple[float, ...]],
) -> None:
    expected = [
        any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows)
        for row in rows
    ]
    found = dominated(np.array(rows))
    assert found.tolist() == expected
    assert not found.all()


FAST, SMOOTH, FULL = entry(0.1, 0.05, 900, 1), entry(0.6, 0.01, 800, 2), entry(0.5, 0.04, 1000, 3)


@pytest.mark.parametrize(
    ("slo", "chosen", "reason"),
    [
        ("ttft=2s,itl=90ms", 3, "most tokens/s of 3 that are"),
        ("ttft=0.2,itl=90ms", 1, "most tokens/s of 1 that are"),
        ("ttft=1s,itl=20ms", 2, "most tokens/s of 1 that are"),
        ("ttft=0.5,itl=8ms", 2, "nearest: TTFT p99 is 0.6 s for 0.5, ITL p99 is 0.01 s for 0.008"),
        ("ttft=0.2,itl=40ms", 1, "nearest: ITL p99 is 0.05 s for 0.04"),
    ],
)
def test_an_objective_picks_the_most_tokens_inside_it_or_the_nearest(
    slo: str, chosen: int, reason: str
) -> None:
    found = frontier(FAST, SMOOTH, FULL).choose(Slo.parse(f"{slo},percentile=99"))
    assert found.operating_points["heavy"] == OperatingPoint(max_seqs=chosen)
    assert found.regimes["heavy"].reason.endswith(reason)
    assert [e.chosen for e in found.regimes["light"].points].count(True) == 1


def test_figures_at_another_percentile_answer_no_objective() -> None:
    with pytest.raises(ConfigError, match="slo has percentile 95, and the frontier's figures"):
        frontier(FAST).choose(Slo.parse("ttft=1,itl=1"))


def test_a_load_shortens_and_speeds_the_same_requests() -> None:
    loop = renewal(LENGTHS, 10.0, 1.0, 100, 0.0, 3)
    half, twice = shortened(loop, 0.5, 40), shortened(loop, 2.0, 40)
    assert isinstance(half, OpenLoop)
    assert isinstance(twice, OpenLoop)
    assert [s.requests for s in half.sessions] == [s.requests for s in loop.sessions[:40]]
    assert half.sessions[-1].start_ns == pytest.approx(4 * twice.sessions[-1].start_ns, rel=1e-6)
    users = ClosedLoop(lengths=LENGTHS, phases=((8, 5.0),))
    assert shortened(users, 0.25, 40) == ClosedLoop(
        lengths=LENGTHS, phases=((2, 5.0),), requests=40
    )


@pytest.mark.slow
def test_a_search_marks_a_front_with_the_configured_point_and_a_smaller_chunk_has_a_lower_itl() -> (
    None
):
    found = find_frontier(search())
    assert found == find_frontier(search())  # the same requests and draws
    light, heavy = found.regimes["light"], found.regimes["heavy"]
    assert light.load <= 1.0
    assert light.load < heavy.load
    for load in (light, heavy):
        assert load.points[0].point == OperatingPoint()
        final = [each for each in load.points if each.final]
        beaten = dominated(np.array([each.figures.objectives for each in final]))
        assert [each.dominated for each in final] == beaten.tolist()
        assert all(each.requests < final[0].requests for each in load.points if not each.final)
    whole, small = (
        search().run(PointTrial(OperatingPoint(max_batched_tokens=chunk), 1.0, 120, 0))[0]
        for chunk in (1024, 128)
    )
    assert small.itl_s < whole.itl_s
    assert small.ttft_s > whole.ttft_s
    read = msgspec.json.decode(msgspec.json.encode(found), type=Frontier)
    assert read == found


def test_points_that_a_search_found_are_what_a_simulation_reads(tmp_path: Path) -> None:
    file, app = tmp_path / "points.json", build(["simulate", "frontier"])
    file.write_bytes(msgspec.json.encode(frontier(FAST, SMOOTH).choose(None)))
    base = ["simulate", "--workload", "poisson:rate=5,in=64,out=8,n=20", "--timing", LAW,
            "--blocks", "100"]  # fmt: skip
    run = CliRunner().invoke(app, [*base, "--operating-points", str(file)])
    assert run.exit_code == 0, run.output
    file.write_text('{"operating_points": {"heavy": {"params": {"urge": 1}}}}')
    refused = CliRunner().invoke(app, [*base, "--operating-points", str(file)])
    assert refused.exit_code == 2
    assert "urge is no parameter of the routing policy; it has:" in refused.output
    for bad in ("[]", '{"operating_points": 3}', "nonsense"):
        file.write_text(bad)
        refused = CliRunner().invoke(app, [*base, "--operating-points", str(file)])
        assert refused.exit_code == 2
        assert f"--operating-points is {str(file)!r}" in refused.output
    refused = CliRunner().invoke(app, ["frontier", "--from", str(file), "--slo", "ttft=1,itl=1"])
    assert refused.exit_code == 2
    assert "cannot be read as a file of --json" in refused.output
    assert CliRunner().invoke(app, ["frontier"]).exit_code == 2


def test_a_workload_that_no_setting_serves_is_refused() -> None:
    tiny = Setup(timing=LAW, blocks=2, max_seqs=32, max_batched_tokens=1024)
    loop = renewal(RequestLengths(input=(500, 500), output=(8, 8)), 12.0, 1.0, 40, 0.0, 0)
    with pytest.raises(ConfigError, match="no request is served under any settings"):
        find_frontier(search(workloads=[loop], setup=tiny))


def test_an_unknown_policy_setting_is_not_searched() -> None:
    plain = search(control=ControlConfig(policy="least-loaded")).entrants()
    assert plain[0] == OperatingPoint()
    assert all(not point.params for point in plain)
    toll = search().entrants()
    assert {name for point in toll for name in point.params} == {"toll", "urgency"}
    assert all((point.max_seqs or 32) <= 32 for point in toll)
