"""Messages between a request's lifecycle and its driver: events in, effects out."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec

from pigou.control.messages import (
    FirstToken,
    PrefillDone,
    Queue,
    ReadFailed,
    Recall,
    RemoteKVFetch,
    Route,
    Shed,
)
from pigou.lifecycle.suspicion import WorkerEnd
from pigou.request import SECOND, FinishReason

#: Least nanoseconds to wait for a remote KV fetch: workers answer between steps.
MIN_FETCH_WAIT_NS = SECOND // 20
#: Reports to the control plane.
Fact: TypeAlias = PrefillDone | ReadFailed | FirstToken

# --- events: what happened. `leg` is the number that the effect which began it had. ---------------


class KVFetched(msgspec.Struct, frozen=True):
    """Another worker holds the prompt's prefix for the worker that computes the rest."""

    leg: int


class KVFetchFailed(msgspec.Struct, frozen=True):
    """The remote KV fetch was refused, late, or empty."""

    leg: int


class Prefilled(msgspec.Struct, frozen=True):
    """The prefill leg computed the prompt; `leg` is the decode leg's if that runs beside it."""

    leg: int


class PrefillStays(msgspec.Struct, frozen=True):
    """The prompt is not sent to a prefill worker: the decode worker computes it."""

    leg: int


class PrefillBegan(msgspec.Struct, frozen=True):
    """The prefill leg runs, and the decode leg must run beside it: it waits for the KV."""

    leg: int


class StreamBegan(msgspec.Struct, frozen=True):
    """This leg began the client's stream; `token` if with the first token."""

    leg: int
    token: bool = True


class TokensReceived(msgspec.Struct, frozen=True):
    """`count` more output tokens of a leg, the first one included."""

    leg: int
    count: int


class TokensDropped(msgspec.Struct, frozen=True):
    """The last `count` output tokens were not shown: the next leg generates them again."""

    count: int


class StreamFinished(msgspec.Struct, frozen=True):
    """The reply is complete."""

    leg: int


class LegFailed(msgspec.Struct, frozen=True):
    """A worker failed the request; another may serve it."""

    leg: int  # the failed leg, or `RequestLifecycle.leg` before any
    workers: frozenset[str]  # ids to avoid
    reason: str
    end: WorkerEnd | None = None  # how they ended; None if unknown
    # last token and finish reason had come; only the stream's end is missing
    complete: bool = False


class RequestRefused(msgspec.Struct, frozen=True):
    """The request itself is unservable; every worker would refuse it."""

    leg: int
    reason: str = ""


class ClientLeft(msgspec.Struct, frozen=True):
    """The client disconnected."""


class ClientTimedOut(msgspec.Struct, frozen=True):
    """The client's timeout expired."""


#: Events of a leg or a fetch.
LegEvent: TypeAlias = (
    KVFetched
    | KVFetchFailed
    | Prefilled
    | PrefillStays
    | PrefillBegan
    | StreamBegan
    | TokensReceived
    | StreamFinished
    | LegFailed
    | RequestRefused
)
LifecycleEvent: TypeAlias = (
    LegEvent | Route | Queue | Shed | Recall | TokensDropped | ClientLeft | ClientTimedOut
)


# --- effects: what the driver is to do, in their order -------------------------------------------


class SubmitRequest(msgspec.Struct, frozen=True):
    """Submit the request to the control plane; answer with its decision."""

    leg: int  # number of the attempt until it has a leg
    tokens: int  # output tokens so far: they join the prompt
    exclude: frozenset[str] = frozenset()  # worker ids to avoid
    cause: str = ""  # why it moves, in a word; empty at first


class FetchKV(msgspec.Struct, frozen=True):
    """Ask a worker to hold its cached prefix; answer `KVFetched` or `KVFetchFailed`."""

    leg: int
    read: RemoteKVFetch

    @property
    def wait_ns(self) -> int:
        """Timeout: until computing would have been as quick."""
        return max(MIN_FETCH_WAIT_NS, round((self.read.seconds + self.read.saves) * SECOND))


class StartPrefill(msgspec.Struct, frozen=True):
    """Have a prefill worker compute the prompt, using fetched KV."""

    leg: int
    worker: str


class StartDecode(msgspec.Struct, frozen=True):
    """Have a worker stream the reply, using prefilled or fetched KV."""

    leg: int
    worker: str


class StopLeg(msgspec.Struct, frozen=True):
    """Cancel a leg or a fetch."""

    leg: int


class CompleteStream(msgspec.Struct, frozen=True):
    """Write the missing end of the stream; answer `StreamFinished`."""

    leg: int


class ReportDeaths(msgspec.Struct, frozen=True):
    """Report to the operator that workers died with this request in flight."""

    deaths: tuple[str, ...]
    suspect: bool


class RequestOutcome(Enum):
    """How a request ended."""

    DONE = "done"
    SHED = "shed"
    REFUSED = "refused"
    GAVE_UP = "gave up"
    SUSPECT = "suspect"
    CLIENT_LEFT = "client left"
    CLIENT_TIMED_OUT = "client timed out"


_DONE = RequestOutcome.DONE  # members of an Enum are slow to find


class EndRequest(msgspec.Struct, frozen=True):
    """The request is over: tell the control plane (`Ended`), then the client."""

    outcome: RequestOutcome
    reason: str = ""
    shed: Shed | None = None  # the control plane's refusal

    @property
    def finish(self) -> FinishReason:
        """The finish reason for the control plane."""
        if self.outcome is _DONE:
            return FinishReason.STOP
        left = self.outcome in (RequestOutcome.CLIENT_LEFT, RequestOutcome.CLIENT_TIMED_OUT)
        return FinishReason.ABORT if left else FinishReason.ERROR


#: Step that the driver begins, unless the lifecycle has moved to another leg: a reported fact may
#: bring decisions about the same request.
Step: TypeAlias = SubmitRequest | FetchKV | StartPrefill | StartDecode | CompleteStream
LifecycleEffect: TypeAlias = Fact | Step | StopLeg | ReportDeaths | EndRequest
