"""Messages between a request's lifecycle and its driver: events in, effects out.

Decisions of the control plane (`Route`, `Queue`, `Shed`, `Recall`) are events as they are, and
what it is to be told (`PrefillDone`, `ReadFailed`, `FirstToken`) are effects as they are.
"""

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

#: Nanoseconds that the answer of a remote KV fetch is waited for at least: a worker answers between
#: two of its steps.
MIN_FETCH_WAIT_NS = SECOND // 20

# --- events: what happened. `leg` is the number that the effect which began it had. ---------------


class KVFetched(msgspec.Struct, frozen=True):
    """Another worker holds the beginning of the prompt for the worker that computes the rest."""

    leg: int


class KVFetchFailed(msgspec.Struct, frozen=True):
    """Nothing came of the remote KV fetch: it was refused, late, or found nothing."""

    leg: int


class Prefilled(msgspec.Struct, frozen=True):
    """The prefill leg computed the prompt."""

    leg: int


class PrefillStays(msgspec.Struct, frozen=True):
    """The prompt was not sent to a prefill worker: the worker that decodes computes it."""

    leg: int


class StreamBegan(msgspec.Struct, frozen=True):
    """This leg began the client's stream; `token`: with the first token."""

    leg: int
    token: bool = True


class TokensReceived(msgspec.Struct, frozen=True):
    """`count` more output tokens came of a leg, the first one included."""

    leg: int
    count: int


class TokensDropped(msgspec.Struct, frozen=True):
    """The last `count` output tokens were not shown: the next leg is to generate them again."""

    count: int


class StreamFinished(msgspec.Struct, frozen=True):
    """The reply is complete."""

    leg: int


class LegFailed(msgspec.Struct, frozen=True):
    """A worker failed the request; another may serve it."""

    leg: int  # the failed leg, or `RequestLifecycle.leg` where none had begun
    workers: frozenset[str]  # ids of those that are not to be asked again
    reason: str
    end: WorkerEnd | None = None  # how they ended, if they did; None where nobody can tell
    # the last token and the finish reason had come; the stream's end alone is missing.
    complete: bool = False


class RequestRefused(msgspec.Struct, frozen=True):
    """The request cannot be served for what it asks for; every worker would refuse it."""

    leg: int
    reason: str = ""


class ClientLeft(msgspec.Struct, frozen=True):
    """The client is gone."""


class ClientTimedOut(msgspec.Struct, frozen=True):
    """The client waits no longer."""


#: What a leg, or a fetch, tells.
LegEvent: TypeAlias = (
    KVFetched
    | KVFetchFailed
    | Prefilled
    | PrefillStays
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

    leg: int  # number of the attempt, until it has a leg
    tokens: int  # output tokens that came so far: they join the prompt
    exclude: frozenset[str] = frozenset()  # ids of workers that are not to be chosen
    cause: str = ""  # why it goes elsewhere, in a word; empty the first time


class FetchKV(msgspec.Struct, frozen=True):
    """Ask a worker to hold what it has cached of the prompt; answer `KVFetched` or `KVFetchFailed`.

    Whatever goes wrong costs time alone: the prompt is computed.
    """

    leg: int
    read: RemoteKVFetch

    @property
    def wait_ns(self) -> int:
        """How long the answer is waited for: until computing would have been as quick."""
        return max(MIN_FETCH_WAIT_NS, round((self.read.seconds + self.read.saves) * SECOND))


class StartPrefill(msgspec.Struct, frozen=True):
    """Have a prefill worker compute the prompt, with what was fetched."""

    leg: int
    worker: str


class StartDecode(msgspec.Struct, frozen=True):
    """Have a worker stream the reply, with what was prefilled or fetched."""

    leg: int
    worker: str


class StopLeg(msgspec.Struct, frozen=True):
    """Let go of a leg or a fetch: nobody wants any more of it."""

    leg: int


class CompleteStream(msgspec.Struct, frozen=True):
    """Write what is missing of the stream's end; answer `StreamFinished`."""

    leg: int


class ReportDeaths(msgspec.Struct, frozen=True):
    """Report to the fleet's operator that workers died with this request under way."""

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
        """Return the finish reason for the control plane."""
        if self.outcome is _DONE:
            return FinishReason.STOP
        left = self.outcome in (RequestOutcome.CLIENT_LEFT, RequestOutcome.CLIENT_TIMED_OUT)
        return FinishReason.ABORT if left else FinishReason.ERROR


#: What the control plane is to be told.
Fact: TypeAlias = PrefillDone | ReadFailed | FirstToken
#: What the driver is to begin, unless the lifecycle is at another leg by then: to tell a fact may
#: bring decisions of the control plane about the same request.
Step: TypeAlias = SubmitRequest | FetchKV | StartPrefill | StartDecode | CompleteStream
LifecycleEffect: TypeAlias = Fact | Step | StopLeg | ReportDeaths | EndRequest
