"""Rows over seeds with Student's intervals, windows about a switch, prefix hits by tier."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.streams import ITLHistogram
from pigou.sim.virtual_clock import EPOCH, Phase
from pigou.sim.workload import ClosedLoop, RequestSpec
from pigou_lab.experiments import tiers
from pigou_lab.experiments.page import page
from pigou_lab.experiments.results import make_row, over_seeds, run_simulation, t_interval
from pigou_lab.experiments.window import Switch, WindowFigures, clock_ns, columns, split


def test_three_runs_of_the_paper_have_its_interval() -> None:
    """Georgiou (2026), section 8.5: 2.6, 13.8 and 8.2 s span -5.7 to 22.1 s at 95%."""
    assert t_interval([2.6, 13.8, 8.2]) == pytest.approx((-5.7, 22.1), abs=0.05)
    assert t_interval([1.0, 3.0]) == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)
    assert t_interval([4.0] * 5) == (4, 4)
    assert t_interval([4.0]) is None


def test_the_interval_covers_the_mean_19_times_of_20() -> None:
    draws = np.random.default_rng(0).normal(7.0, 3.0, (2000, 4))
    ends = [t_interval(row) for row in draws.tolist()]
    assert 0.94 < np.mean([low <= 7.0 <= high for low, high in ends]) < 0.96  # type: ignore[misc]


def test_a_figure_is_over_the_seeds_that_have_it() -> None:
    row = over_seeds({"a": [1.0, None, 3.0], "b": [None, None], "c": [float("nan"), 2.0]})
    assert (row["a"], row["b"], row["c"]) == (2, None, 2)
    assert row["ci95"] == {"a": pytest.approx([2 - 12.706, 2 + 12.706], abs=1e-3)}


def figures(value: float) -> WindowFigures:
    return WindowFigures(*[value] * 10, 1, 0)


def test_rows_and_their_page_carry_the_interval() -> None:
    rows = [
        make_row("table4", users, [figures(1.0 * users), figures(3.0 * users)], (1, 2),
                 per_seed={"switch_s": [5.0, 7.0]})
        for users in (1, 2)
    ]  # fmt: skip
    assert rows[0]["ttft_p99_s"] == 2
    assert rows[0]["switch_s"] == 6
    assert {"ttft_p99_s", "rps", "switch_s"} <= rows[0]["ci95"].keys()
    table = page(rows, title="x").sections[1].items[0]
    assert table.columns[1:3] == ("ttft_p99_s", "± 95%")
    assert table.rows[1][2].value == pytest.approx(2 * 12.706, abs=1e-2)


def request(number: int, intended_s: float, ttft_s: float, tokens: int = 2) -> RequestRun:
    run = RequestRun(number, RequestSpec(8, tokens), EPOCH + round(intended_s * SECOND), print)
    run.sent_ns, run.outcome = run.intended_ns, RunOutcome.DONE
    run.first_token_ns = run.intended_ns + round(ttft_s * SECOND)
    run.last_token_ns = run.first_token_ns + SECOND // 10
    return run


def test_the_window_after_a_switch_is_apart_from_the_whole() -> None:
    slow = [request(n, 10 + n, 5.0) for n in range(5)]  # meant before the switch at 20 s
    quick = [request(9 + n, 20 + n, 0.2) for n in range(4)]
    none = ITLHistogram()
    parts = split([*slow, *quick], Switch(20.0, none), (10.0, 30.0), (none, none), 2)
    assert parts.before is not None
    assert parts.after is not None
    assert parts.before.ttft_p99_s == pytest.approx(5.0)
    assert parts.after.ttft_p99_s == pytest.approx(0.2)
    assert parts.after.requests == 4
    assert columns([parts])["after_ttft_p99_s"] == [pytest.approx(0.2)]
    nowhere = split([*slow, *quick], None, (10.0, 30.0), (none, none), 2)
    assert columns([nowhere, parts])["before_rps"] == [None, parts.before.rps]


def test_prefix_hits_by_tier_add_up_to_what_requests_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "HOLD_S", 15.0)
    results = []
    monkeypatch.setattr(
        tiers,
        "run_simulation",
        lambda *a, **k: results.append(run_simulation(*a, **k)) or results[-1],
    )
    one, many = (next(tiers.tiers(None, "fair", (1,), (users,))) for users in (1, 8))  # type: ignore[arg-type]
    for row, result in zip((one, many), results, strict=True):
        assert sum(row[f"{tier}_share"] for tier in tiers.TIERS) == pytest.approx(1)
        found = sum(hits["tokens"] for hits in result.tier_hits.values())
        assert found == sum(run.cached_tokens for run in result.runs)
        assert result.tier_hits["G2"]["bytes"] == result.tier_hits["G2"]["tokens"] * 131072
    assert (
        many["G4_share"] > one["G4_share"]
    )  # more prompts are read, and the nearer tiers are full
    assert many["G1_share"] < 1


def test_prefix_hits_count_all_lives_of_a_worker(tmp_path: Path) -> None:
    """A worker that dies at 8 s for a second keeps what its first life restored."""
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("workers: [{role: both, fails: [{start: 8.0, end: 9.0}]}]")
    lengths = msgspec.structs.replace(tiers.LENGTHS, templates=60)
    loop = ClosedLoop(lengths=lengths, phases=((8, 8.5),))
    simulation = Simulation(
        loop, read_fleet(str(fleet)), tiers.SETUP, unlimited(), ClientConfig(retries=3), seed=1
    )
    first: list[int] = []
    (worker,) = simulation.fleet.workers
    simulation.clock.at(clock_ns(7.9), Phase.TICK, -90, lambda _: first.extend(worker.restored))
    hits = simulation.run().tier_hits
    assert worker.restored >= tuple(first)
    assert sum(first) > 0
    assert hits["G2"]["tokens"] >= 16 * first[0] > 0
