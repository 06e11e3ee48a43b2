"""The life of one request, from its arrival to its one end."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from pigou.control.messages import (
    Choice,
    FirstToken,
    PrefillDone,
    Queue,
    ReadFailed,
    Recall,
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
from pigou.lifecycle.suspicion import Suspicion

#: Failures in a row, none with a token between them, after which a request is given up: it may be
#: the request that breaks the workers.
MAX_FAILURES = 4
#: Times that one request leaves its workers, failures and recalls together.
MAX_MOVES = 16
#: Cause of a move without a failure.
RECALLED = "recalled"

Effects: TypeAlias = tuple[LifecycleEffect, ...]
_DONE = EndRequest(RequestOutcome.DONE)


class RequestState(Enum):
    """The state of a request, by what it waits for."""

    NEW = "new"
    ADMISSION = "admission"
    KV_FETCH = "kv fetch"
    PREFILL = "prefill"
    DECODE = "decode"
    COMPLETION = "completion"
    ENDED = "ended"


# Looked up once: members of an Enum are slow to find.
_ADMISSION, _KV_FETCH = RequestState.ADMISSION, RequestState.KV_FETCH
_PREFILL, _DECODE = RequestState.PREFILL, RequestState.DECODE
_COMPLETION, _ENDED = RequestState.COMPLETION, RequestState.ENDED
_LEGS = (_KV_FETCH, _PREFILL, _DECODE)


class RequestLifecycle(msgspec.Struct, eq=False):
    """State machine of a request: attempts, legs, retries, migration, the end.

    Events return effects in order. Events that do not fit the state (a past leg, after the end) are
    ignored.

    Example:
        life = RequestLifecycle("r1")
        (submit,) = life.begin()
        (start,) = life.take(Route("r1", Choice("worker-0")), now_ns=0)
        life.take(TokensReceived(start.leg, 5), now_ns=1)
        (end,) = life.take(StreamFinished(start.leg), now_ns=2)
        assert end.outcome is RequestOutcome.DONE
    """

    id: str
    state: RequestState = RequestState.NEW
    leg: int = 0  # number of what is under way; each step has its own
    choice: Choice | None = None  # the workers that the control plane chose last; None before
    tokens: int = 0  # output tokens that count: they join the prompt of the next attempt
    generated: int = 0  # output tokens that came in all, dropped ones included
    received: int = 0  # output tokens of the present attempt
    begun: bool = False  # whether the client's stream has begun
    first_token_reported: bool = False  # whether the control plane knows of the first token
    overlapped: bool = False  # the prefill leg runs beside the decode leg, and has not ended
    # ids of the workers that failed it since its last token, or that it was taken from.
    excluded: frozenset[str] = frozenset()
    failures: int = 0  # in a row, without a token between them
    moves: int = 0  # times that it left its workers
    suspicion: Suspicion = msgspec.field(default_factory=Suspicion)  # deaths of workers under it

    @property
    def ended(self) -> bool:
        """True if it is over."""
        return self.state is _ENDED

    def begin(self) -> Effects:
        """The request arrived."""
        return self._submit("")

    def take(self, event: LifecycleEvent, now_ns: int) -> Effects:
        """Record an event at `now_ns`; return its effects."""
        if self.state is _ENDED:
            return ()
        return _HANDLERS[type(event)](self, event, now_ns)

    # --- the way there --------------------------------------------------------------------------

    def _submit(self, cause: str) -> Effects:
        self.received = 0
        return (SubmitRequest(self._enter(_ADMISSION), self.tokens, self.excluded, cause),)

    def _routed(self, route: Route, _: int) -> Effects:
        if self.state is not _ADMISSION:
            return ()
        choice = self.choice = route.choice
        read = choice.read
        if read is None:
            return self._compute(choice)
        return (FetchKV(self._enter(_KV_FETCH), read),)

    def _fetch_over(self, event: KVFetched | KVFetchFailed, _: int) -> Effects:
        if event.leg != self.leg or self.state is not _KV_FETCH or self.choice is None:
            return ()
        start = self._compute(self.choice)
        return start if type(event) is KVFetched else (ReadFailed(self.id), *start)

    def _compute(self, choice: Choice) -> Effects:
        if choice.prefill is None:
            return (StartDecode(self._enter(_DECODE), choice.decode),)
        return (StartPrefill(self._enter(_PREFILL), choice.prefill),)

    def _prefilled(self, event: Prefilled, _: int) -> Effects:
        if event.leg == self.leg and self.overlapped:
            return self._prefill_over()
        if event.leg != self.leg or self.state is not _PREFILL or self.choice is None:
            return ()
        start = StartDecode(self._enter(_DECODE), self.choice.decode)
        return (PrefillDone(self.id), start)

    def _prefill_began(self, event: PrefillBegan, _: int) -> Effects:
        if event.leg != self.leg or self.state is not _PREFILL or self.choice is None:
            return ()
        self.overlapped = True
        return (StartDecode(self._enter(_DECODE), self.choice.decode),)

    def _prefill_over(self, computed: bool = True) -> Effects:
        """Report the end of a prefill leg beside the decode leg, once."""
        overlapped, self.overlapped = self.overlapped, False
        return (PrefillDone(self.id, computed),) if overlapped else ()

    def _prefill_stays(self, event: PrefillStays, _: int) -> Effects:
        if event.leg != self.leg or self.state is not _PREFILL or self.choice is None:
            return ()
        self.choice = msgspec.structs.replace(self.choice, prefill=None)
        return self._compute(self.choice)

    def _stream_began(self, event: StreamBegan, _: int) -> Effects:
        if event.leg != self.leg or self.state is not _DECODE:
            return ()
        self.begun = True
        return self._first_token() if event.token else ()

    def _first_token(self) -> Effects:
        over = self._prefill_over()
        if self.first_token_reported:
            return over
        self.first_token_reported = True
        return (*over, FirstToken(self.id))

    def _tokens_received(self, event: TokensReceived, _: int) -> Effects:
        count = event.count
        if event.leg != self.leg or self.state is not _DECODE or count <= 0:
            return ()
        self.tokens += count
        self.generated += count
        self.received += count
        self.begun = True
        return self._first_token()

    def _tokens_dropped(self, event: TokensDropped, _: int) -> Effects:
        self.tokens = max(0, self.tokens - event.count)
        return ()

    def _stream_finished(self, event: StreamFinished, _: int) -> Effects:
        if event.leg != self.leg or self.state in (_KV_FETCH, _PREFILL):
            return ()
        self._enter(_ENDED)
        return (_DONE,)

    # --- when it goes wrong ---------------------------------------------------------------------

    def _leg_failed(self, failure: LegFailed, now_ns: int) -> Effects:
        if failure.leg != self.leg:
            return ()
        leave = self._leave()
        progressed = self.received > 0
        self.moves += 1
        self.failures = 1 if progressed else self.failures + 1
        self.excluded = failure.workers | (frozenset() if progressed else self.excluded)
        suspicion = self.suspicion
        if failure.end is not None and suspicion.count(
            failure.workers, failure.end, progressed=progressed, now_ns=now_ns
        ):
            leave = (*leave, ReportDeaths(suspicion.deaths, suspicion.suspect))
            if suspicion.suspect:
                return self._end(leave, RequestOutcome.SUSPECT, failure.reason)
        if self.failures == MAX_FAILURES or self.moves == MAX_MOVES:
            return self._end(leave, RequestOutcome.GAVE_UP, failure.reason)
        if failure.complete:
            return (*leave, CompleteStream(self._enter(_COMPLETION)))
        return (*leave, *self._submit(failure.reason))

    def _recalled(self, recall: Recall, _: int) -> Effects:
        """Another worker has room for it, which it takes unless its reply has begun."""
        if self.state not in _LEGS or self.begun:
            return ()
        leave = self._leave()
        self.moves += 1
        self.excluded = frozenset({recall.worker})
        if self.moves == MAX_MOVES:
            return self._end(leave, RequestOutcome.GAVE_UP, RECALLED)
        return (*leave, *self._submit(RECALLED))

    def _shed(self, shed: Shed, _: int) -> Effects:
        """It waited too long, in the admission queue or inside a worker."""
        if self.state is not _ADMISSION and (self.begun or self.state not in _LEGS):
            return ()
        return self._end(self._stop(), RequestOutcome.SHED, shed.reason, shed)

    def _request_refused(self, event: RequestRefused, _: int) -> Effects:
        if event.leg != self.leg:
            return ()
        return self._end(self._leave(), RequestOutcome.REFUSED, event.reason)

    def _client_gone(self, event: ClientLeft | ClientTimedOut, _: int) -> Effects:
        left = type(event) is ClientLeft
        outcome = RequestOutcome.CLIENT_LEFT if left else RequestOutcome.CLIENT_TIMED_OUT
        return self._end(self._stop(), outcome)

    def _leave(self) -> Effects:
        """Take it from its workers; report a prompt that was not computed to the control plane."""
        if self.state is _PREFILL:
            return (PrefillDone(self.id, False), StopLeg(self.leg))
        return (*self._prefill_over(computed=False), *self._stop())

    def _stop(self) -> Effects:
        return (StopLeg(self.leg),) if self.state in _LEGS else ()

    def _end(
        self, before: Effects, outcome: RequestOutcome, reason: str = "", shed: Shed | None = None
    ) -> Effects:
        self._enter(_ENDED)
        return (*before, EndRequest(outcome, reason, shed))

    def _enter(self, state: RequestState) -> int:
        self.state = state
        self.leg += 1
        return self.leg


#: The method for each event: quicker to find than by a match.
_HANDLERS: dict[type, Callable[[RequestLifecycle, Any, int], Effects]] = {
    Route: RequestLifecycle._routed,
    Queue: lambda *_: (),
    Shed: RequestLifecycle._shed,
    Recall: RequestLifecycle._recalled,
    KVFetched: RequestLifecycle._fetch_over,
    KVFetchFailed: RequestLifecycle._fetch_over,
    Prefilled: RequestLifecycle._prefilled,
    PrefillStays: RequestLifecycle._prefill_stays,
    PrefillBegan: RequestLifecycle._prefill_began,
    StreamBegan: RequestLifecycle._stream_began,
    TokensReceived: RequestLifecycle._tokens_received,
    TokensDropped: RequestLifecycle._tokens_dropped,
    StreamFinished: RequestLifecycle._stream_finished,
    LegFailed: RequestLifecycle._leg_failed,
    RequestRefused: RequestLifecycle._request_refused,
    ClientLeft: RequestLifecycle._client_gone,
    ClientTimedOut: RequestLifecycle._client_gone,
}
