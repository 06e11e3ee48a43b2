"""Laws of a diagnosis: causes before what follows, and silence where nobody says."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pigou.diagnosis.diagnose import DETECTORS, diagnose
from pigou.diagnosis.metric_pages import MetricPage
from pigou.diagnosis.modes import MODES
from pigou.gateway.auth.keys import KeyLimits
from pigou.windows.observations import FleetObservation, TenantObservation, WorkerObservation
from pigou.windows.scrape import FleetScrape, scraped_window

HEALTHY_WORKER = WorkerObservation(
    worker="a", running=20.0, knee=60.0, busy=0.9, kv_tokens=100_000, kv_usage=0.4,
    wasted_tokens=150.0, idle_tokens=0.0, queried_tokens=1000, hit_tokens=800,
    prefill_tokens=2000, prefill_steps=20, prefill_s=0.2, output_tokens=10_000,
    decode_stall_s=0.01, slow_restores=0, preemptions=0, adapter_loads=0,
)  # fmt: skip
HEALTHY = FleetObservation(
    start_s=0.0, seconds=10.0, arrived=100, completed=100, repeated=0, ttft_p50_s=0.1,
    itl_p50_s=0.01, itl_p99_s=0.02, client_stalls=0, wait_p50_s=0.01, short_wait_p50_s=0.01,
    short_wait_p95_s=0.02, longest_prompt_tokens=900, answer_hits=0, workers=(HEALTHY_WORKER,),
    tenants=(TenantObservation(tenant="anna", tokens=50.0),
             TenantObservation(tenant="bert", tokens=50.0)),
)  # fmt: skip


def series(count: int = 12, **changes: object) -> list[FleetObservation]:
    """Windows of a healthy fleet, with changes; a function is called with the window's number."""
    windows = []
    for number in range(count):
        now = {key: value(number) if callable(value) else value for key, value in changes.items()}
        fleet = {
            key: now.pop(key) for key in list(now) if key in FleetObservation.__struct_fields__
        }
        worker = msgspec.structs.replace(HEALTHY_WORKER, **now)
        windows.append(msgspec.structs.replace(
            HEALTHY, start_s=10.0 * number, **{"workers": (worker,), **fleet}))  # fmt: skip
    return windows


def test_each_of_the_19_modes_has_a_definition_and_a_detector() -> None:
    assert list(MODES) == list(DETECTORS) == list(range(1, 20))
    assert len({mode.name for mode in MODES.values()}) == 19
    for mode in MODES.values():
        assert "{" not in mode.text(mode.signal)
        assert mode.look


def test_a_healthy_fleet_has_no_findings_and_every_mode_is_judged() -> None:
    diagnosis = diagnose(series())
    assert diagnosis.healthy
    assert diagnosis.findings == ()
    assert diagnosis.not_judged == {}


def test_what_nobody_says_is_not_judged_and_no_finding() -> None:
    diagnosis = diagnose([FleetObservation(start_s=0.0, seconds=10.0)])
    assert diagnosis.findings == ()
    assert {"KV exhaustion", "stream stall", "under-use"} <= set(diagnosis.not_judged)


def test_what_no_page_of_a_live_fleet_says_is_not_judged_and_never_healthy() -> None:
    page = MetricPage.read("pigou_requests_inflight 3\npigou_requests_queued 0\n")
    worker = MetricPage.read('vllm:num_requests_running{engine="0"} 3\n')
    scrapes = [FleetScrape(10.0 * n, page, {"w": worker}) for n in range(13)]
    windows = [scraped_window(a, b, a.at_s) for a, b in pairwise(scrapes)]
    names = {MODES[number].name for number in (5, 8, 9, 15, 16)}
    assert names <= set(diagnose(windows).not_judged)


def test_a_playbook_names_no_option_and_no_limit_that_does_not_exist() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    for mode in MODES.values():
        text = " ".join((mode.smallest_fix, mode.remedy, *mode.look))
        for option in re.findall(r"(?<!-)--[a-z][a-z-]+", text):
            assert f"`{option}`" in reference or f"`{option} /" in reference, (mode.name, option)
        for limit in re.findall(r"`(\w+)` of its key", text):
            assert limit in KeyLimits.__struct_fields__, (mode.name, limit)
        orders = entry_points(group="pigou.admission").names
        for order in re.findall(r"--admission ([\w-]+)", text):
            assert order in orders, (mode.name, order)


#: What a fleet shows under each fault, beside what is healthy.
FAULTS: dict[int, dict[str, object]] = {
    1: {"out_of_memory": lambda n: int(n == 5)},
    2: {"kv_usage": 0.97, "preemptions": 4},
    3: {"wasted_tokens": 9000.0},
    4: {"hit_tokens": lambda n: 800 if n < 6 else 100,
        "prefill_tokens": lambda n: 2000 if n < 6 else 9000},
    5: {"answer_hits": 30, "stale_answer_hits": 5},
    6: {"queued": lambda n: 20.0 * n, "arrived": 120},
    7: {"itl_p99_s": 0.2, "prefill_s": 4.0},
    8: {"short_wait_p95_s": lambda n: 3.0 if n % 3 == 0 else 0.02,
        "longest_prompt_tokens": lambda n: 60_000 if n % 3 == 0 else 900},
    9: {"long_wait_max_s": lambda n: 5.0 * n},
    10: {"running": 4.0, "queued": 30.0},
    11: {"tenants": (TenantObservation(tenant="anna", tokens=95.0),
                     TenantObservation(tenant="bert", tokens=5.0, waiting=4.0))},
    12: {"repeated": lambda n: 3 * n, "queued": lambda n: float(n)},
    13: {"decode_stall_s": lambda n: 2.0 if n == 7 else 0.01},
    14: {"idle_tokens": 40_000.0},
    15: {"adapter_loads": 5, "adapter_load_s": 2.0},
    16: {"restores": 20, "slow_restores": 10},
    18: {"running": 60.0, "queued": 40.0},
    19: {"failed": 3, "queued": lambda n: 30.0 * n, "arrived": 120},
}  # fmt: skip


@pytest.mark.parametrize("number", FAULTS)
def test_a_fault_is_reported_as_the_only_cause(number: int) -> None:
    causes = [one for one in diagnose(series(**FAULTS[number])).findings if not one.follows_from]
    assert [one.number for one in causes] == [number]
    assert causes[0].evidence
    assert causes[0].confidence in ("low", "medium", "high")


def test_a_lane_starves_by_its_own_gauge_where_no_prompt_is_long() -> None:
    unknown = {"short_wait_p95_s": None, "long_wait_max_s": None, "wait_p50_s": None}
    (starves,) = diagnose(series(starving_lanes=2, **unknown)).findings
    assert starves.number == 9
    assert [(row.name, row.value) for row in starves.evidence] == [("lanes that starve", 2.0)]
    assert diagnose(series(starving_lanes=lambda n: int(n == 4), **unknown)).healthy


def test_under_use_takes_ten_minutes() -> None:
    idle = {"running": 0.2, "busy": 0.1}
    assert diagnose(series(59, **idle)).healthy
    assert [one.number for one in diagnose(series(60, **idle)).findings] == [17]


def test_a_signal_that_is_shorter_than_it_must_be_is_no_finding() -> None:
    assert diagnose(series(wasted_tokens=lambda n: 9000.0 if n in (3, 4, 7) else 0.0)).healthy


def test_a_queue_that_a_retry_storm_makes_follows_from_it() -> None:
    findings = diagnose(series(repeated=lambda n: 5 * n, queued=lambda n: 20.0 * n, arrived=130))
    assert [(one.number, one.follows_from) for one in findings.findings] == [(12, 0), (6, 12)]


def test_refusals_are_back_pressure() -> None:
    fault = {**FAULTS[19], "refused": 5}
    assert 19 not in [one.number for one in diagnose(series(**fault)).findings]


def test_slow_readers_are_told_from_stalls_of_the_engine() -> None:
    (slow,) = diagnose(series(client_stalls=lambda n: int(n == 3))).findings
    (stall,) = diagnose(series(**FAULTS[13])).findings
    assert any(row.name == "slow readers" for row in slow.evidence)
    assert not any(row.name == "slow readers" for row in stall.evidence)
