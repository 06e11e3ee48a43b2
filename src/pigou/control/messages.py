"""What passes between a ControlPlane and whoever drives it: decisions, observations, actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pigou.events import KVEvent
from pigou.request import FinishReason, Worker
from pigou.wire.kv_events import WireEvent


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves a request.

    Attributes:
        decode: id of the worker that streams the tokens.
        prefill: id of the worker that computes the prompt; None when `decode` does.
        cost: of this choice, in the policy's own unit.
    """

    decode: str
    prefill: str | None = None
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Route:
    """Send the request to these workers now."""

    request: str
    choice: Choice


@dataclass(frozen=True, slots=True)
class Queue:
    """The request waits; a later call returns its `Route` or `Shed`. `ahead` wait before it."""

    request: str
    ahead: int


@dataclass(frozen=True, slots=True)
class Shed:
    """The request is refused, for the given reason; trying again makes sense after `retry_after`
    nanoseconds.
    """

    request: str
    reason: str
    retry_after: int


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
    """The prefill leg of a request ended (well or not): its prefill worker is free of it."""

    request: str


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
    events: tuple[KVEvent | WireEvent, ...]


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
)

#: What `tick` may ask for. Parameters, role changes and scaling join the queue's decisions here.
Action: TypeAlias = Route | Shed
