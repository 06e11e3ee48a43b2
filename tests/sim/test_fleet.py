"""What the control plane is told late or never, links that are shared, leases that end."""

from __future__ import annotations

import pytest
from setups import run

from pigou.request import Role
from pigou.sim.fleet_config import FleetConfig, LinkConfig, Outage, Signals, Slow, WorkerGroup
from pigou.sim.request_run import RunOutcome
from pigou.sim.result import SimulationResult
from pigou.sim.workload import OpenLoop, RequestLengths, renewal

BOTH = (WorkerGroup(count=3),)
SPLIT = (WorkerGroup(role=Role.PREFILL, count=2), WorkerGroup(role=Role.DECODE))


def prompts(rate: float, count: int, templates: int = 0, output: int = 8) -> OpenLoop:
    """Prompts of 320 tokens."""
    lengths = RequestLengths(input=(320, 320), output=(output, output), templates=templates)
    return renewal(lengths, rate, 1.0, count, 0.0, 3)


def by_prefix(signals: Signals, workers: tuple[WorkerGroup, ...] = BOTH) -> SimulationResult:
    """Many prompts of few templates, sent to where their blocks are, as far as that is known."""
    return run(
        prompts(12.0, 150, templates=30), FleetConfig(workers=workers, signals=signals),
        control={"policy": "dynamo"}, setup={"blocks": 260},
    )  # fmt: skip


def hits(result: SimulationResult) -> float:
    """Return the share of prompt tokens that needed no computing."""
    return float(result.document()["prefix_hit_ratio"])


def test_a_router_that_hears_nothing_of_caches_hits_less() -> None:
    fresh = hits(by_prefix(Signals()))
    deaf = hits(by_prefix(Signals(event_loss=1.0)))
    late = hits(by_prefix(Signals(event_delay_ms=4_000.0)))
    assert fresh > deaf + 0.05
    assert fresh > late


def test_lost_events_that_are_sent_again_are_late_but_not_lost() -> None:
    again = hits(by_prefix(Signals(event_loss=0.3, replay=True)))
    forgotten = hits(by_prefix(Signals(event_loss=0.3, replay=False)))
    assert again > forgotten


def test_where_no_events_are_published_caches_are_predicted() -> None:
    silent = by_prefix(Signals(), (WorkerGroup(count=3, events=False),))
    assert hits(silent) > hits(by_prefix(Signals(event_loss=1.0)))


def by_reports(signals: Signals) -> list[str]:
    """Return where each prompt went by what workers, one of them slow, say of their load."""
    workers = (WorkerGroup(count=2), WorkerGroup(slow=(Slow(factor=8.0),)))
    fleet = FleetConfig(workers=workers, signals=signals)
    result = run(prompts(30.0, 120, output=40), fleet, control={"policy": "llm-d-blend"})
    return [request.decode_worker for request in result.runs]


def test_reports_that_are_lost_are_as_if_they_were_never_sent() -> None:
    silent = by_reports(Signals(report_every_ms=0.0))
    heard = by_reports(Signals(report_every_ms=50.0))
    assert by_reports(Signals(report_every_ms=50.0, report_loss=1.0)) == silent != heard
    assert by_reports(Signals(report_every_ms=50.0, report_loss=0.5)) not in (silent, heard)


def split(link: LinkConfig) -> SimulationResult:
    """Prompts that are computed on two workers, for one that streams."""
    return run(
        prompts(20.0, 40), FleetConfig(workers=SPLIT, link=link),
        setup={"model": "llama-3.1-8b", "blocks": 2000}, control={"policy": "round-robin"},
    )  # fmt: skip


@pytest.mark.parametrize("sharing", ["fair", "fifo"])
def test_a_narrow_link_that_is_shared_delays_first_tokens(sharing: str) -> None:
    def first(gbps: float) -> tuple[float, tuple[int, int]]:
        link = LinkConfig(gbps=gbps, sharing=sharing)  # type: ignore[arg-type]
        found = split(link)
        return float(found.document()["ttft_s"]["mean"]), found.transfers

    wide, moved = first(400.0)
    narrow, moved_too = first(5.0)
    each = moved[1] / moved[0]
    assert moved == moved_too
    # Alone a transfer would take this much longer; at 20 a second they meet on the way.
    assert narrow - wide > each * 8 / 5e9 * moved[0] / 40


def test_a_link_of_no_width_limit_takes_its_latency_alone() -> None:
    free = split(LinkConfig(gbps=0.0, latency_us=0.0))
    wide = split(LinkConfig(gbps=400.0, latency_us=0.0))
    assert 0.0 < wide.ttft().mean() - free.ttft().mean() < 5e6  # 42 MB at 50 GB a second


def test_until_a_death_is_noticed_what_is_sent_there_fails_and_moves() -> None:
    def moves(detect_ms: float) -> int:
        workers = (WorkerGroup(fails=(Outage(start=1.0),)), WorkerGroup())
        fleet = FleetConfig(workers=workers, detect_ms=detect_ms)
        result = run(prompts(20.0, 60), fleet, control={"policy": "round-robin"})
        assert all(request.outcome is RunOutcome.DONE for request in result.runs)
        late = [request for request in result.runs if request.sent_ns > 2_000_000_000]
        return sum(request.moves for request in late)

    assert moves(0.0) == 0
    assert moves(1_000.0) >= 5


def test_a_prompt_whose_lease_ended_is_computed_again() -> None:
    # The decode worker has room for one request at a time: the others' leases end meanwhile.
    def run_with(lease: float) -> SimulationResult:
        fleet = FleetConfig(workers=SPLIT, lease_s=lease)
        return run(
            prompts(200.0, 12, output=40), fleet, control={"policy": "round-robin"},
            setup={"model": "llama-3.1-8b", "max_seqs": 1},
        )  # fmt: skip

    kept, ended = run_with(30.0), run_with(0.05)
    assert len(kept.done) == len(ended.done) == 12
    assert kept.transfers[1] > ended.transfers[1] > 0
    assert kept.seconds < ended.seconds
