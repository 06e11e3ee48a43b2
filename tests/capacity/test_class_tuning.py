"""Tuning by class: candidates that a fleet can start with, and figures on requests kept aside."""

from __future__ import annotations

import pytest

from pigou.capacity.class_tuning import ClassSearch, halves, tune_classes
from pigou.capacity.frontier import excess
from pigou.cli.config_options import read_struct
from pigou.cli.frontier import class_text
from pigou.config import ConfigError, LaneConfig
from pigou.control.planner.config import RequestClassConfig
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import unlimited
from pigou.sim.workload import ClosedLoop, OpenLoop, RequestLengths, merged, renewal

LAW = "law:itl_a=0.008,itl_b=0.0003,prefill=0.004,prefill_token=0.00005"
CLASSES = (
    RequestClassConfig(name="chat", ttft="300ms", itl="40ms", max_prompt_tokens=999),
    RequestClassConfig(name="file", ttft=8.0, min_prompt_tokens=1000, lane="long"),
)


def load(seed: int) -> OpenLoop:
    short, long = (
        RequestLengths(input=(20, 600), output=(8, 30)),
        RequestLengths(input=(9000, 9000)),
    )
    parts = [renewal(short, 8.0, 1.0, 50, 0.0, seed), renewal(long, 0.8, 1.0, 5, 0.0, seed)]
    return merged(parts)


def search(**changes: object) -> ClassSearch:
    own = {
        "workloads": [load(seed) for seed in (0, 1)], "classes": CLASSES,
        "fleet": read_fleet("1xboth"), "control": unlimited(), "client": ClientConfig(),
        "setup": Setup(timing=LAW, blocks=4000, max_seqs=32, max_batched_tokens=1024),
        "requests": 32, "candidates": 2,
    }  # fmt: skip
    return ClassSearch(**(own | changes))  # type: ignore[arg-type]


def test_candidates_begin_as_configured_and_reserve_a_lane_for_long_classes_alone() -> None:
    entrants = search(candidates=12).entrants()
    assert entrants[0] == search().configured()
    lanes = {LaneConfig.parse(one.long_lane) for one in entrants}
    assert {lane.min_prompt for lane in lanes if lane is not None} == {1000}
    assert len({one.chunk for one in entrants}) == 4
    chat = CLASSES[:1]
    assert not any(one.long_lane for one in search(classes=chat, candidates=12).entrants())


def test_a_search_chooses_for_the_worst_class_and_reports_on_requests_kept_aside() -> None:
    found = tune_classes(search())
    assert found == tune_classes(search())
    slos = search().slos
    worst = [max(excess(f, slo)[0] for f, slo in zip(one.figures, slos, strict=True))
             for one in (found.chosen, found.configured)]  # fmt: skip
    assert worst[0] <= max(1.0, worst[1])
    for at, slo in enumerate(slos):
        best, chosen = found.best[at].figures[at], found.chosen.figures[at]
        assert excess(best, slo)[0] <= excess(chosen, slo)[0]
    configured, chosen = found.reported
    assert configured.settings == found.configured.settings
    assert chosen.settings == found.chosen.settings
    assert configured.figures != found.configured.figures


def test_one_set_of_requests_is_halved_and_both_begin_at_0() -> None:
    loop = load(3)
    first, second = halves(loop)
    assert isinstance(first, OpenLoop)
    assert isinstance(second, OpenLoop)
    whole = [one.requests for one in loop.sessions]
    assert [one.requests for one in (*first.sessions, *second.sessions)] == whole
    assert second.sessions[0].start_ns == 0
    with pytest.raises(ConfigError, match="cannot be halved"):
        halves(ClosedLoop(lengths=RequestLengths(input=(9, 9)), phases=((8, 5.0),)))


def test_a_class_without_requests_is_refused() -> None:
    other = RequestClassConfig(name="other", ttft=1.0, key="nobody")
    with pytest.raises(ConfigError, match="class other: no request of the workload belongs"):
        tune_classes(search(classes=(*CLASSES, other)))


def test_a_class_is_written_as_its_option_reads_it() -> None:
    for one in CLASSES:
        assert read_struct("--slo-class", class_text(one), RequestClassConfig) == one
