"""Laws of the life of a request, over every sequence of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.control.messages import (
    Choice,
    FirstToken,
    PrefillDone,
    Queue,
    ReadFailed,
    Recall,
    RemoteKVFetch,
    Route,
    Shed,
)
from pigou.lifecycle.messages import (
    ClientLeft,
    ClientTimedOut,
    CompleteStream,
    EndRequest,
    FetchKV,
    KVFetched,
    KVFetchFailed,
    LegFailed,
    LifecycleEffect,
    LifecycleEvent,
    PrefillBegan,
    Prefilled,
    PrefillStays,
    ReportDeaths,
    RequestOutcome,
    RequestRefused,
    StartDecode,
    StartPrefill,
    StopLeg,
    StreamBegan,
    StreamFinished,
    SubmitRequest,
    TokensDropped,
    TokensReceived,
)
from pigou.lifecycle.request import MAX_FAILURES, MAX_MOVES, RequestLifecycle, RequestState
from pigou.lifecycle.suspicion import MAX_DEATHS, WorkerEnd

WORKERS = tuple("abcdef")
LEG_STARTS = (FetchKV, StartPrefill, StartDecode)
LEG_ENDS = (
    KVFetched, KVFetchFailed, PrefillBegan, Prefilled, StreamFinished, LegFailed, RequestRefused,
)  # fmt: skip
KINDS = (KVFetched, KVFetchFailed, PrefillBegan, Prefilled, StreamFinished)
SHED = Shed("r", "it is full", 10)
AGGREGATED = Choice("a")

legs = st.integers(0, 12)
workers = st.sampled_from(WORKERS)
reads = st.builds(RemoteKVFetch, workers, st.just(8), st.just(8), st.just(0.1), st.just(0.1))
choices = st.builds(Choice, workers, st.none() | workers).flatmap(
    lambda choice: (
        st.just(choice)
        | st.builds(lambda read: Choice(choice.decode, choice.prefill, source=read), reads)
    )
)
ends = st.none() | st.sampled_from(WorkerEnd)


def events(leg: st.SearchStrategy[int]) -> st.SearchStrategy[LifecycleEvent]:
    """Any event, of the legs given."""
    failed = st.frozensets(workers, min_size=1, max_size=2)
    reasons = st.sampled_from(("broke", "down", "refused"))
    return st.one_of(
        st.builds(Route, st.just("r"), choices),
        st.just(Queue("r", 3)),
        st.just(SHED),
        st.builds(Recall, st.just("r"), workers),
        *(st.builds(kind, leg) for kind in KINDS),
        st.builds(StreamBegan, leg, st.booleans()),
        st.builds(TokensReceived, leg, st.integers(0, 3)),
        st.builds(TokensDropped, st.integers(0, 2)),
        st.builds(LegFailed, leg, failed, reasons, ends, st.booleans()),
        st.builds(RequestRefused, leg),
        st.just(ClientLeft()),
        st.just(ClientTimedOut()),
    )


@dataclass
class Recorder:
    """Takes events to a lifecycle; keeps what came of them."""

    life: RequestLifecycle = field(default_factory=lambda: RequestLifecycle("r"))
    effects: list[LifecycleEffect] = field(default_factory=list)
    now_ns: int = 0

    def begin(self) -> None:
        self.effects += self.life.begin()

    def take(self, event: LifecycleEvent) -> tuple[LifecycleEffect, ...]:
        self.now_ns += 1_000_000
        effects = self.life.take(event, self.now_ns)
        self.effects += effects
        return effects

    def of(self, *kinds: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kinds)]


@dataclass(frozen=True)
class Current:
    """Makes an event of the leg that is under way, whichever that is."""

    make: Callable[[int], LifecycleEvent]


def current() -> st.SearchStrategy[Current]:
    """Events of the leg that is under way: sequences of them go far."""
    failed = st.frozensets(workers, min_size=1, max_size=2)
    return st.one_of(
        st.sampled_from(KINDS).map(Current),
        st.integers(1, 3).map(lambda count: Current(lambda leg: TokensReceived(leg, count))),
        st.tuples(failed, ends, st.booleans()).map(
            lambda drawn: Current(lambda leg: LegFailed(leg, drawn[0], "broke", *drawn[1:]))
        ),
    )


def played(script: list[LifecycleEvent | Current]) -> Recorder:
    """Take a script to a new lifecycle, and the client's leaving at its end."""
    recorder = Recorder()
    recorder.begin()
    for entry in script:
        recorder.take(entry.make(recorder.life.leg) if isinstance(entry, Current) else entry)
    recorder.take(ClientLeft())
    return recorder


routes = st.builds(Route, st.just("r"), choices)
scripts = st.lists(st.one_of(events(legs), current(), current(), routes), max_size=80)


@given(scripts)
def test_every_sequence_of_events_ends_in_exactly_one_end(
    script: list[LifecycleEvent | Current],
) -> None:
    recorder = played(script)
    assert len(recorder.of(EndRequest)) == 1
    assert isinstance(recorder.effects[-1], EndRequest)
    assert recorder.life.ended


@given(scripts)
def test_every_leg_that_is_started_ends_or_is_stopped_once(
    script: list[LifecycleEvent | Current],
) -> None:
    recorder = Recorder()
    recorder.begin()
    under_way: set[int] = set()
    for entry in [*script, ClientLeft()]:
        event = entry.make(recorder.life.leg) if isinstance(entry, Current) else entry
        before = recorder.life.leg
        effects = recorder.take(event)
        stopped = [effect.leg for effect in effects if isinstance(effect, StopLeg)]
        started = [effect.leg for effect in effects if isinstance(effect, LEG_STARTS)]
        assert len(stopped) <= 1
        assert set(stopped) <= under_way
        # A prefill leg beside the decode leg is a part of it.
        moved = recorder.life.leg != before
        ended_by_itself = isinstance(event, LEG_ENDS) and moved and event.leg == before
        if ended_by_itself or stopped:
            under_way.discard(before)
        assert not under_way or not started, "a leg is started while another is under way"
        under_way |= set(started)
    assert not under_way


@given(scripts)
def test_attempts_are_bounded(script: list[LifecycleEvent | Current]) -> None:
    recorder = played(script)
    assert len(recorder.of(SubmitRequest)) + len(recorder.of(CompleteStream)) <= MAX_MOVES
    assert recorder.life.failures <= MAX_FAILURES
    assert len(recorder.life.suspicion.deaths) <= 2 * MAX_DEATHS


@given(scripts)
def test_the_control_plane_is_told_each_fact_once(
    script: list[LifecycleEvent | Current],
) -> None:
    recorder = played(script)
    assert len(recorder.of(FirstToken)) <= 1
    assert (len(recorder.of(FirstToken)) == 1) >= (recorder.life.generated > 0)
    assert len(recorder.of(ReadFailed)) <= len(recorder.of(FetchKV))
    prefills, told = len(recorder.of(StartPrefill)), len(recorder.of(PrefillDone))
    assert told in (prefills, prefills - 1)  # the end of the request tells of its last leg


@given(scripts)
def test_after_the_end_nothing_follows(script: list[LifecycleEvent | Current]) -> None:
    recorder = played([])
    leg = recorder.life.leg
    for entry in script:
        event = entry.make(leg) if isinstance(entry, Current) else entry
        assert recorder.take(event) == ()


@given(scripts)
def test_legs_start_at_the_workers_of_the_last_route_alone(
    script: list[LifecycleEvent | Current],
) -> None:
    recorder = Recorder()
    recorder.begin()
    for entry in script:
        event = entry.make(recorder.life.leg) if isinstance(entry, Current) else entry
        for effect in recorder.take(event):
            choice = recorder.life.choice
            if isinstance(effect, StartPrefill):
                assert choice is not None
                assert effect.worker == choice.prefill
            if isinstance(effect, StartDecode):
                assert choice is not None
                assert effect.worker == choice.decode


@dataclass
class Fleet:
    """A model driver: a control plane that honours exclusions, and workers that count.

    The reply of a request is 0, 1, 2...; a worker that goes on after n tokens says n next. What
    the client saw is kept: with nothing lost or doubled it is a range.
    """

    draw: st.DrawFn
    length: int
    recorder: Recorder = field(default_factory=Recorder)
    seen: list[int] = field(default_factory=list)
    said: int = 0
    excluded: frozenset[str] = frozenset()

    def run(self) -> None:
        self.recorder.begin()
        for _ in range(400):
            if self.recorder.life.ended:
                return
            self.step()
        raise AssertionError("the request does not end")

    def step(self) -> None:
        life = self.recorder.life
        step = self.recorder.effects[-1]
        if self.draw(st.integers(0, 9)) == 0:
            recalled = self.recorder.take(Recall("r", self.worker()))
            if recalled:
                return
        if isinstance(step, SubmitRequest):
            assert step.tokens == len(self.seen), "the next attempt goes on elsewhere"
            self.said, self.excluded = step.tokens, step.exclude
            self.submit()
        elif isinstance(step, FetchKV):
            kinds = st.sampled_from((KVFetched, KVFetchFailed))
            self.recorder.take(self.draw(kinds)(step.leg))
        elif isinstance(step, StartPrefill):
            assert step.worker not in self.excluded
            kinds = st.sampled_from((Prefilled, PrefillBegan))
            self.answer(step.worker, self.draw(kinds)(step.leg))
        elif isinstance(step, StartDecode):
            assert step.worker not in self.excluded
            self.decode(step)
        elif isinstance(step, CompleteStream):
            self.recorder.take(StreamFinished(step.leg))
        else:
            assert isinstance(step, FirstToken | PrefillDone), step
            self.decode(StartDecode(life.leg, life.choice.decode if life.choice else ""))

    def submit(self) -> None:
        left = [worker for worker in WORKERS if worker not in self.excluded]
        if not left:
            self.recorder.take(SHED)
            return
        decode, prefill = self.draw(st.sampled_from(left)), self.draw(st.sampled_from(left))
        read = RemoteKVFetch("f", 8, 8, 0.1, 0.1) if self.draw(st.booleans()) else None
        choice = Choice(decode, prefill if prefill != decode else None)
        if read is not None:
            choice = Choice(choice.decode, choice.prefill, source=read)
        self.recorder.take(Route("r", choice))

    def answer(self, worker: str, event: LifecycleEvent) -> None:
        if self.draw(st.integers(0, 3)) == 0:
            self.fail(worker)
        else:
            self.recorder.take(event)

    def decode(self, step: StartDecode) -> None:
        count = self.draw(st.integers(0, self.length - self.said))
        self.seen += range(self.said, self.said + count)
        self.said += count
        self.recorder.take(TokensReceived(step.leg, count))
        if self.said == self.length and self.draw(st.booleans()):
            self.recorder.take(StreamFinished(step.leg))
        elif self.draw(st.booleans()):
            self.fail(step.worker, complete=self.said == self.length)

    def fail(self, worker: str, complete: bool = False) -> None:
        life = self.recorder.life
        failed = LegFailed(life.leg, frozenset({worker}), "broke", self.draw(ends), complete)
        self.recorder.take(failed)

    def worker(self) -> str:
        return self.draw(st.sampled_from(WORKERS))


@settings(max_examples=examples(300))
@given(st.data(), st.integers(1, 12))
def test_tokens_are_neither_lost_nor_doubled_and_no_leg_is_at_an_excluded_worker(
    data: st.DataObject, length: int
) -> None:
    fleet = Fleet(data.draw, length)
    fleet.run()
    assert fleet.seen == list(range(len(fleet.seen)))
    assert fleet.recorder.life.tokens == len(fleet.seen)
    (end,) = fleet.recorder.of(EndRequest)
    if end.outcome is RequestOutcome.DONE:
        assert len(fleet.seen) == length


# --- the single rules -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["reply", "token"])
def test_a_prompt_computed_beside_the_decode_leg_is_reported_once(first: str) -> None:
    recorder = Recorder()
    recorder.begin()
    recorder.take(Route("r", Choice("b", "a")))
    (start,) = recorder.take(PrefillBegan(recorder.life.leg))
    assert start == StartDecode(recorder.life.leg, "b")
    ends = [Prefilled(start.leg), TokensReceived(start.leg, 1)]
    for event in ends if first == "reply" else reversed(ends):
        recorder.take(event)
    assert recorder.effects[-2:] == [PrefillDone("r"), FirstToken("r")]
    assert recorder.take(StreamFinished(start.leg))[-1].outcome is RequestOutcome.DONE


def test_a_failed_leg_beside_another_ends_both_and_both_are_tried_again() -> None:
    recorder = Recorder()
    recorder.begin()
    recorder.take(Route("r", Choice("b", "a")))
    recorder.take(PrefillBegan(recorder.life.leg))
    leg = recorder.life.leg
    told, stop, submit = recorder.take(LegFailed(leg, frozenset({"a"}), "broke"))
    assert (told, stop) == (PrefillDone("r", False), StopLeg(leg))
    assert submit.exclude == {"a"}
    recorder.take(Route("r", Choice("b")))
    assert not recorder.life.overlapped


def streaming(choice: Choice = AGGREGATED) -> Recorder:
    """A request whose decode leg is under way."""
    recorder = Recorder()
    recorder.begin()
    recorder.take(Route("r", choice))
    if choice.prefill is not None:
        recorder.take(Prefilled(recorder.life.leg))
    assert recorder.life.state is RequestState.DECODE
    return recorder


def failed(recorder: Recorder, *names: str, end: WorkerEnd | None = None) -> tuple[Any, ...]:
    return recorder.take(LegFailed(recorder.life.leg, frozenset(names), "broke", end))


def test_a_request_goes_by_prefill_to_decode_and_ends() -> None:
    recorder = Recorder()
    recorder.begin()
    (prefill,) = recorder.take(Route("r", Choice("d", "p")))
    done, decode = recorder.take(Prefilled(recorder.life.leg))
    assert (prefill.worker, decode.worker, done) == ("p", "d", PrefillDone("r"))
    assert recorder.take(TokensReceived(decode.leg, 2)) == (FirstToken("r"),)
    assert recorder.take(TokensReceived(decode.leg, 2)) == ()
    (end,) = recorder.take(StreamFinished(decode.leg))
    assert (end.outcome, end.finish.value) == (RequestOutcome.DONE, "stop")


def test_a_prompt_that_no_prefill_worker_gets_is_computed_where_it_is_decoded() -> None:
    recorder = Recorder()
    recorder.begin()
    (prefill,) = recorder.take(Route("r", Choice("d", "p")))
    (decode,) = recorder.take(PrefillStays(prefill.leg))
    assert (type(decode), decode.worker, recorder.life.choice) == (StartDecode, "d", Choice("d"))
    assert recorder.take(PrefillStays(prefill.leg)) == ()


def test_a_failed_fetch_is_told_and_the_prompt_is_computed() -> None:
    recorder = Recorder()
    recorder.begin()
    read = RemoteKVFetch("b", 8, 8, 0.02, 0.01)
    (fetch,) = recorder.take(Route("r", Choice("d", "p", source=read)))
    assert fetch.wait_ns == 50_000_000, "a worker answers between two steps"
    failed_fetch, prefill = recorder.take(KVFetchFailed(fetch.leg))
    assert failed_fetch == ReadFailed("r")
    assert isinstance(prefill, StartPrefill)


def test_four_failures_without_a_token_between_them_give_a_request_up() -> None:
    recorder = streaming()
    for name in "abc":
        *_, submit = failed(recorder, name)
        assert isinstance(submit, SubmitRequest)
        recorder.take(Route("r", Choice("x")))
    assert recorder.life.excluded == frozenset("abc")
    *_, end = failed(recorder, "d")
    assert (end.outcome, end.reason) == (RequestOutcome.GAVE_UP, "broke")


def test_a_token_between_failures_forgets_those_before() -> None:
    recorder = streaming()
    for name in "abc":
        failed(recorder, name)
        recorder.take(Route("r", Choice("x")))
    recorder.take(TokensReceived(recorder.life.leg, 1))
    *_, submit = failed(recorder, "d")
    assert submit == SubmitRequest(recorder.life.leg, 1, frozenset("d"), "broke")
    assert recorder.life.failures == 1


def test_a_request_moves_sixteen_times_at_most() -> None:
    recorder = streaming()
    moves = 0
    while not recorder.life.ended:
        recorder.take(TokensReceived(recorder.life.leg, 1))
        failed(recorder, "a")
        recorder.take(Route("r", Choice("x")))
        moves += 1
    assert moves == MAX_MOVES == 16


def test_a_failed_prefill_is_told_before_the_request_is_submitted_again() -> None:
    recorder = Recorder()
    recorder.begin()
    recorder.take(Route("r", Choice("d", "p")))
    leg = recorder.life.leg
    assert failed(recorder, "p") == (
        PrefillDone("r", False), StopLeg(leg), SubmitRequest(leg + 1, 0, frozenset("p"), "broke"),
    )  # fmt: skip


def test_a_request_that_has_begun_is_not_recalled_and_not_shed() -> None:
    recorder = streaming()
    assert recorder.take(StreamBegan(recorder.life.leg, token=False)) == ()
    assert recorder.take(Recall("r", "a")) == ()
    assert recorder.take(SHED) == ()
    assert recorder.life.state is RequestState.DECODE


def test_a_recalled_request_goes_to_another_worker() -> None:
    recorder = streaming()
    leg = recorder.life.leg
    assert recorder.take(Recall("r", "a")) == (
        StopLeg(leg), SubmitRequest(leg + 1, 0, frozenset("a"), "recalled"),
    )  # fmt: skip


def test_a_stream_whose_end_alone_is_missing_is_completed_and_not_sent_again() -> None:
    recorder = streaming()
    recorder.take(TokensReceived(recorder.life.leg, 3))
    event = LegFailed(recorder.life.leg, frozenset("a"), "broke", complete=True)
    *_, complete = recorder.take(event)
    assert isinstance(complete, CompleteStream)
    (end,) = recorder.take(StreamFinished(complete.leg))
    assert end.outcome is RequestOutcome.DONE


def test_dropped_tokens_are_not_part_of_the_next_prompt() -> None:
    recorder = streaming()
    recorder.take(TokensReceived(recorder.life.leg, 5))
    failed(recorder, "a")
    recorder.take(TokensDropped(2))
    recorder.take(Route("r", Choice("b")))
    *_, submit = failed(recorder, "b")
    assert (submit.tokens, recorder.life.generated) == (3, 5)


def test_two_crashes_with_the_same_request_make_it_suspect() -> None:
    recorder = streaming()
    _, report, submit = failed(recorder, "a", end=WorkerEnd.CRASHED)
    assert report == ReportDeaths(("a",), False)
    assert isinstance(submit, SubmitRequest)
    recorder.take(Route("r", Choice("b")))
    _, report, end = failed(recorder, "b", end=WorkerEnd.LOST)
    assert report == ReportDeaths(("a", "b"), True)
    assert end.outcome is RequestOutcome.SUSPECT


@pytest.mark.parametrize(
    ("event", "outcome", "finish"),
    [
        (ClientLeft(), RequestOutcome.CLIENT_LEFT, "abort"),
        (ClientTimedOut(), RequestOutcome.CLIENT_TIMED_OUT, "abort"),
        (SHED, RequestOutcome.SHED, "error"),
    ],
)
def test_a_request_that_is_ended_from_outside_stops_its_leg(
    event: LifecycleEvent, outcome: RequestOutcome, finish: str
) -> None:
    recorder = streaming()
    leg = recorder.life.leg
    stop, end = recorder.take(event)
    assert (stop, end.outcome, end.finish.value) == (StopLeg(leg), outcome, finish)


def test_every_effect_is_counted_at_most_once_per_leg() -> None:
    recorder = streaming(Choice("d", "p"))
    recorder.take(TokensReceived(recorder.life.leg, 1))
    recorder.take(StreamFinished(recorder.life.leg))
    assert Counter(type(effect).__name__ for effect in recorder.effects) == Counter(
        SubmitRequest=1, StartPrefill=1, PrefillDone=1, StartDecode=1, FirstToken=1, EndRequest=1
    )
