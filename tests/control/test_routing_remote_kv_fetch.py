"""Reading from another worker's cache: where it is cheaper than all else, and only there."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ControlConfig
from pigou.control.journal import (
    JournalEntry,
    JournalHead,
    JournalRecorder,
    decode,
    encode,
    replay_call,
)
from pigou.control.latency_model.affine_fit import FetchFit
from pigou.control.latency_model.estimates import PRIOR_FETCH, Estimates
from pigou.control.messages import (
    CacheChanged,
    Ended,
    FirstToken,
    ReadFailed,
    Route,
    WorkerDown,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.control.routing.remote_kv_fetch import fetch_of, price_fetches
from pigou.control.routing.view import FleetView
from pigou.request import SECOND, BlockStored, FinishReason, Request, Worker

RESTORE = (0.1, 0.5)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[FleetView, int, np.ndarray]:
    count = draw(st.integers(1, 6))

    def column(most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

    prompt = draw(st.integers(1, 2000))
    device, host, storage = column(100), column(20), column(20)
    estimates = Estimates.prior(count)
    for name, most in (("prefill_base", 0.02), ("prefill_token", 1e-3), ("prefill_pair", 1e-6),
                       ("fetch_base", 0.05), ("fetch_token", 1e-3)):  # fmt: skip
        getattr(estimates, name)[:] = [draw(st.floats(0, most)) for _ in range(count)]
    blocks = -(-prompt // 16)
    device = [min(each, blocks) for each in device]
    host = [min(each, blocks - d) for each, d in zip(host, device, strict=True)]
    storage = [min(e, blocks - d - h) for e, d, h in zip(storage, device, host, strict=True)]
    overlap = [d + h + s for d, h, s in zip(device, host, storage, strict=True)]
    fleet = FleetView.of(
        count, overlap=overlap, device=device, host=host, storage=storage, estimates=estimates,
        layout=column(2), prefill_tokens=column(3),
    )  # fmt: skip
    return fleet, prompt, np.array(column(3), dtype=bool)


@given(fleets())
@settings(max_examples=examples(300))
def test_a_prefix_is_read_exactly_where_no_other_way_is_cheaper(
    drawn: tuple[FleetView, int, np.ndarray],
) -> None:
    fleet, prompt, open_ = drawn
    known = fleet.estimates
    fleet.fetches = price_fetches(fleet, prompt, open_, RESTORE)

    def compute(row: int, cached: float) -> float:
        left = np.array([prompt - cached])
        return float(known.service(np.array([row]), left, float(prompt))[0])

    for row in range(len(fleet.ids)):
        below = RESTORE[0] * fleet.host[row] + RESTORE[1] * fleet.storage[row]
        own = compute(row, int(fleet.cached(prompt)[row]))
        own += float(known.prefill_token[row] * 16 * below)
        ways = []
        for other in np.flatnonzero(open_ & (fleet.layout == fleet.layout[row])).tolist():
            depth = min(int(fleet.device[other]), (prompt - 1) // 16) * 16
            come = depth - int(fleet.device[row]) * 16
            if fleet.layout[row] and other != row and come > 0:
                link = float(known.fetch_base[row] + known.fetch_token[row] * come)
                ways.append((depth, other, come, link, own - compute(row, depth) - link))
        read = fetch_of(fleet, row)
        deepest = max((way[0] for way in ways), default=0)
        best = [way for way in ways if way[0] == deepest]
        if read is None:
            assert all(saves <= 1e-12 for *_, saves in best)
            continue
        found = [way for way in best if fleet.ids[way[1]] == read.worker]
        assert found, "it reads from somebody who has less, or may not"
        _, other, come, link, saves = found[0]
        assert saves > 0
        assert (read.depth, read.tokens) == (deepest, come)
        assert read.seconds == pytest.approx(link)
        assert read.saves == pytest.approx(saves)


def keys(blocks: int) -> dict[int, np.ndarray]:
    return {16: np.arange(1, blocks + 1, dtype=np.uint64)}


def plane(config: ControlConfig | None = None, layouts: tuple[str, ...] = ("x", "x")) -> Any:
    made = ControlPlane(config or ControlConfig(policy="toll"))
    for row, layout in enumerate(layouts):
        made.observe(WorkerUp(Worker(f"w{row}", "", blocks=1000, layout=layout)), 0)
    return made


def stored(blocks: int) -> tuple[Any, ...]:
    names = np.zeros((blocks, 2), dtype=np.uint64)
    names[:, 1] = keys(blocks)[16]
    return (BlockStored("", 0, names, names[:0]),)


def asked(name: str, blocks: int, tokens: int = 8) -> Request:
    hashes = np.zeros((blocks, 2), dtype=np.uint64)
    hashes[:, 1] = keys(blocks)[16]
    return Request(name, 16 * blocks + tokens, 8, hashes)


def busy(made: ControlPlane, worker: str, others: list[str]) -> None:
    """Let a worker have a long prompt to compute."""
    decision = made.submit(Request("long", 50_000, 8), 0, frozenset(others))
    assert isinstance(decision, Route)
    assert decision.choice.decode == worker


def test_an_idle_worker_reads_what_a_busy_one_has() -> None:
    made = plane()
    made.observe(CacheChanged("w0", stored(100)), 0)
    busy(made, "w0", ["w1"])
    route = made.submit(asked("r", 100), 1)
    assert isinstance(route, Route)
    assert route.choice.decode == "w1"
    read = route.choice.read
    assert read is not None
    assert (read.worker, read.depth, read.tokens) == ("w0", 1600, 1600)
    assert (route.choice.cached, route.choice.computed) == (0, 1600)
    assert made.state.requests["r"].uncached == 8
    why = made.decision("r")
    assert why.reads is not None
    assert why.read[why.chosen] == 1600
    assert why.prices["transfer"][why.chosen] == pytest.approx(read.seconds)


@pytest.mark.parametrize(
    ("config", "layouts"),
    [
        (ControlConfig(policy="toll", peer_reads=False), ("x", "x")),
        (ControlConfig(policy="toll"), ("x", "y")),
        (ControlConfig(policy="toll"), ("", "")),
    ],
)
def test_nothing_is_read_where_it_is_off_or_cannot_be(
    config: ControlConfig, layouts: tuple[str, ...]
) -> None:
    made = plane(config, layouts)
    made.observe(CacheChanged("w0", stored(100)), 0)
    busy(made, "w0", ["w1"])
    route = made.submit(asked("r", 100), 1)
    assert route.choice.read is None
    assert b"source" not in msgspec.json.encode(route)


def test_a_worker_that_failed_a_request_is_not_read_for_it() -> None:
    made = plane()
    made.observe(CacheChanged("w0", stored(100)), 0)
    route = made.submit(asked("r", 100), 1, frozenset({"w0"}))
    assert (route.choice.decode, route.choice.read) == ("w1", None)


def test_what_could_not_be_read_is_charged_and_everything_is_discharged() -> None:
    made = plane()
    made.observe(CacheChanged("w0", stored(100)), 0)
    busy(made, "w0", ["w1"])
    made.submit(asked("r", 100), 1)
    columns = made.state.columns
    assert columns.prefill_tokens.tolist() == [50_000, 8]
    made.observe(ReadFailed("r"), 2)
    assert columns.prefill_tokens.tolist() == [50_000, 1608]
    made.observe(ReadFailed("r"), 3)
    made.observe(ReadFailed("nobody"), 3)
    assert columns.prefill_tokens.tolist() == [50_000, 1608]
    made.observe(FirstToken("r"), 4)
    made.observe(ReadFailed("r"), 5)
    made.observe(Ended("r", FinishReason.STOP), 6)
    made.observe(Ended("long", FinishReason.ABORT), 7)
    for name in ("prefill_requests", "prefill_tokens", "prefill_pairs", "decode_tokens"):
        assert getattr(columns, name).tolist() == [0, 0]


def test_reading_is_given_up_where_it_turns_out_slow_and_taken_up_where_quick() -> None:
    """The law of the link is learned from the requests that read."""

    def reads(link: float) -> list[bool]:
        made = plane()
        now, found = SECOND, []
        for number in range(12):
            name = f"r{number}"
            made.observe(CacheChanged("w0", stored(100)), now)
            made.observe(CacheChanged("w1", ()), now)
            busy(made, "w0", ["w1"])
            route = made.submit(asked(name, 100), now)
            if route.choice.decode == "w1":
                read = route.choice.read
                found.append(read is not None)
                uncached = 1608 - route.choice.computed
                took = 0.005 + 1e-4 * uncached + (link if read else 0.0)
                made.observe(FirstToken(name), now + round(took * SECOND))
            made.observe(Ended(name, FinishReason.STOP), now + SECOND)
            made.observe(Ended("long", FinishReason.STOP), now + SECOND)
            made.tick(now + SECOND)
            now += 2 * SECOND
        return found

    quick, slow = reads(0.002), reads(1.5)
    assert all(quick)
    assert slow[0]
    assert not any(slow[-4:])


def test_a_recorded_plane_reads_again_as_it_did() -> None:
    entries: list[JournalEntry] = []
    config = ControlConfig(policy="toll")
    recorder = JournalRecorder(ControlPlane(config), entries.append)
    for row in range(3):
        recorder.observe(WorkerUp(Worker(f"w{row}", "", blocks=1000, layout="x")), 0)
    recorder.observe(CacheChanged("w0", stored(100)), 1)
    reads = 0
    for number in range(40):
        now = 2 + number * SECOND // 50
        route = recorder.submit(asked(f"r{number}", 60 + number), now)
        assert isinstance(route, Route)
        reads += route.choice.read is not None
        if number % 7 == 3:
            recorder.observe(ReadFailed(f"r{number}"), now + 1)
        if number % 3:
            recorder.observe(FirstToken(f"r{number}"), now + 2)
            recorder.observe(Ended(f"r{number}", FinishReason.STOP), now + 3)
        if number == 30:
            recorder.observe(WorkerDown("w0"), now + 4)
        recorder.tick(now + 5)
    assert reads > 3
    fresh = ControlPlane(config)
    for entry in entries:
        again = decode(encode(entry))
        assert not isinstance(again, JournalHead)
        assert replay_call(fresh, again) == (again.out, again.error)


def test_a_slow_first_read_does_not_end_reading_and_a_slow_link_is_tried_again_later() -> None:
    fetch = FetchFit()
    assert fetch.law == PRIOR_FETCH
    fetch.observe(128.0, 0.5, 0)  # the first of a process
    base, token = fetch.law
    assert base + 2000 * token < 0.03
    for number in range(20):
        fetch.observe(128.0 + 90 * number, 0.004 + 2e-6 * (128 + 90 * number), number)
    base, token = fetch.law
    assert base + 2000 * token == pytest.approx(0.008, rel=0.5)
    for number in range(12):
        fetch.observe(2000.0, 1.5, 20 + number)
    slow = fetch.law[0] + 2000 * fetch.law[1]
    assert slow > 0.5
    for minute in range(1, 30):
        fetch.tick(minute * 61 * SECOND)
    assert fetch.law[0] + 2000 * fetch.law[1] < slow / 4


def test_one_short_read_says_little_of_long_ones() -> None:
    fetch = FetchFit()
    fetch.observe(128.0, 0.02, 0)
    base, token = fetch.law
    assert base + 4096 * token < 0.04
