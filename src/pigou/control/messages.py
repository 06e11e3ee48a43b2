"""What passes between a ControlPlane and whoever drives it: decisions, observations, actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from pigou.control.assessment import Assessment, Snapshot
from pigou.control.index.keyed import Keyed
from pigou.events import KVEvent
from pigou.request import FinishReason, Worker
from pigou.wire.kv_events import WireEvent


class Choice(msgspec.Struct, frozen=True):  # as `Route`, made for each request
    """Who serves a request.

    Attributes:
        decode: id of the worker that streams the tokens.
        prefill: id of the worker that computes the prompt; None when `decode` does.
        cost: of this choice, in the policy's own unit.
        cached: tokens of the prompt that whoever computes it holds, as far as is known.
    """

    decode: str
    prefill: str | None = None
    cost: float = 0.0
    cached: int = 0


class Route(msgspec.Struct, frozen=True):
    """Send the request to these workers now, with this priority; None: as its client asked."""

    request: str
    choice: Choice
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Queue:
    """The request waits; a later call returns its `Route` or `Shed`.

    `ahead` others wait that may go before it; with another order than first come, first served
    not all of them need to, and some that come later may.
    """

    request: str
    ahead: int


@dataclass(frozen=True, slots=True)
class Shed:
    """The request is refused, for the given reason; trying again makes sense after `retry_after`
    nanoseconds. `tenant`: its tenant's own share of the queue is full (429), not the fleet (503).
    """

    request: str
    reason: str
    retry_after: int
    tenant: bool = False


Decision: TypeAlias = Route | Queue | Shed


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker is ready (or came back, or changed its role)."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker is gone: nothing more is sent to it, its load and cache are forgotten."""

    worker: str


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prefill leg of a request ended: its prefill worker is free of it.

    `well` says whether the prompt was computed there.
    """

    request: str
    well: bool = True


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of a request reached the driver."""

    request: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """`count` more tokens of a request reached the driver."""

    request: str
    count: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request left the fleet, or the queue (cancelled, failed, done)."""

    request: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """KV events of a worker, in order: off the wire, or straight from a simulated core."""

    worker: str
    events: tuple[KVEvent | WireEvent | Keyed, ...]


@dataclass(frozen=True, slots=True)
class CacheLost:
    """KV events of a worker were missed for good: what it holds is unknown."""

    worker: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker says of itself. `kv_usage` is a share, 0 to 1."""

    worker: str
    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Assess:
    """The driver is asked to compute `ControlPlane.assess(snapshot)`, on any thread, and to observe
    the result.
    """

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Assessed:
    """What an assessment found; None where it had nothing to compare."""

    assessment: Assessment | None


Observation: TypeAlias = (
    WorkerUp
    | WorkerDown
    | PrefillDone
    | FirstToken
    | Tokens
    | Ended
    | CacheChanged
    | CacheLost
    | LoadReport
    | Assessed
)

#: What `tick` may ask for. Parameters, role changes and scaling join the queue's decisions here.
Action: TypeAlias = Route | Shed | Assess
