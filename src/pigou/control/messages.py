"""Messages between a ControlPlane and its driver: decisions, observations, actions."""

from __future__ import annotations

import re
from typing import TypeAlias

import msgspec

from pigou.control.peers.bookings import PredictedPrompt, TenantService, WorkerBookings
from pigou.control.prefix_index.index import KeyedEvent
from pigou.control.price_of_anarchy import PoAEstimate, PoASnapshot
from pigou.events import KVEvent
from pigou.request import FinishReason, Request, Worker
from pigou.wire.kv_event_decoding import WireEvent


def _kind(name: str) -> str:
    return re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=_kind):
    """A message between a ControlPlane and its driver; a journal's lines are made of these."""


class RemoteKVFetch(msgspec.Struct, frozen=True):
    """The beginning of a prompt is read from another worker's cache, not computed."""

    worker: str  # id of the one that has it
    depth: int  # leading tokens of the prompt that are not computed then
    tokens: int  # those of them that come over the link
    seconds: float
    saves: float  # seconds that it saves, its own taken off, over the best without it


class Choice(msgspec.Struct, frozen=True):  # as `Route`, made for each request
    """Who serves a request."""

    decode: str  # id of the worker that streams the tokens
    prefill: str | None = None  # id of the worker that computes the prompt; None when `decode` does
    cost: float = 0.0  # of this choice, in the policy's own unit
    # tokens of the prompt that the worker which computes it holds, as far as is known.
    cached: int = 0
    # where it reads the beginning of the prompt first; unset where it does not, as in older
    # journals.
    source: RemoteKVFetch | msgspec.UnsetType = msgspec.UNSET

    @property
    def read(self) -> RemoteKVFetch | None:
        """Where the beginning of the prompt is read; None where it is not."""
        return None if self.source is msgspec.UNSET else self.source

    @property
    def computed(self) -> int:
        """Leading tokens of the prompt that are not to be computed."""
        return self.cached if self.source is msgspec.UNSET else self.source.depth


class Route(Message, frozen=True):
    """Send the request to these workers now, with this priority; None: as its client asked."""

    request: str
    choice: Choice
    priority: int | None = None


class Queue(Message, frozen=True):
    """The request waits; a later call returns its `Route` or `Shed`.

    `ahead` others wait that may go before it. Where the order is not first come, first served, not
    all of them need to, and newer ones may.
    """

    request: str
    ahead: int


class Shed(Message, frozen=True):
    """The request is refused, for the given reason.

    Trying again makes sense after `retry_after` nanoseconds. The request waits in the queue, or
    inside a worker that has not begun it. Then the driver takes it from the worker, unless it has
    seen a token. `tenant`: its tenant's own share of the queue is full (429), not the fleet (503).
    """

    request: str
    reason: str
    retry_after: int
    tenant: bool = False


class Recall(Message, frozen=True):
    """Take a routed request that has no token from its worker, and submit it again without that.

    Another worker came up that has room. A driver that has seen a token leaves it where it is.
    """

    request: str
    worker: str


Decision: TypeAlias = Route | Queue | Shed | Recall


class WorkerUp(Message, frozen=True):
    """A worker is ready (or came back, or changed its role)."""

    worker: Worker


class WorkerDraining(Message, frozen=True):
    """A worker is to go, or to change its role: nothing new is sent to it, what it has stays.

    It is drained once nothing weighs on it (`FleetState.is_drained`). `WorkerUp` ends the drain;
    a `WorkerDown` after it means that the worker is not expected back.
    """

    worker: str


class WorkerDown(Message, frozen=True):
    """A worker is gone: nothing more is sent to it, its load and cache are forgotten."""

    worker: str


class PrefillDone(Message, frozen=True):
    """The prefill leg of a request ended: its prefill worker is free of it.

    `well` says whether the prompt was computed there.
    """

    request: str
    well: bool = True


class PrefillClaimed(Message, frozen=True):
    """A worker pulled a routed prompt from the prefill queue: its prompt weighs there.

    It is the decode worker itself where the prompt is computed locally after all. `cached`: tokens
    of the prompt that it holds, as far as is known.
    """

    request: str
    worker: str
    cached: int = 0


class ReadFailed(Message, frozen=True):
    """The remote KV fetch of a request failed: its whole prompt is computed."""

    request: str


class FirstToken(Message, frozen=True):
    """The first token of a request reached the driver."""

    request: str


class Ended(Message, frozen=True):
    """A request left the fleet, or the queue (cancelled, failed, done)."""

    request: str
    reason: FinishReason


class GroupEnded(Message, frozen=True):
    """No further sequence of a group is submitted: all were, or its client left."""

    group: str


class CacheChanged(Message, frozen=True):
    """KV events of a worker, in order: off the wire, or straight from a simulated core."""

    worker: str
    events: tuple[KVEvent | WireEvent, ...]


class CacheKeyed(Message, frozen=True):
    """The same, without the tokens in the blocks (`PrefixIndex.keyed`): as journals have it."""

    worker: str
    events: tuple[KeyedEvent, ...]


class CacheLost(Message, frozen=True):
    """KV events of a worker were missed for good: its cached blocks are unknown."""

    worker: str


class LoadReport(Message, frozen=True):
    """What a worker reports: requests that run and wait, and `kv_usage`, a share, 0 to 1."""

    worker: str
    running: int
    waiting: int
    kv_usage: float


class PeerReport(Message, frozen=True):
    """What another gateway has on the workers, did for tenants, and expects in caches, if new.

    `lag_ns`: how old that is, and what others know of this gateway.
    """

    gateway: str
    workers: tuple[WorkerBookings, ...] = ()
    tenants: tuple[TenantService, ...] = ()
    prompts: tuple[PredictedPrompt, ...] = ()
    lag_ns: int = 0


class PeerGone(Message, frozen=True):
    """Another gateway is gone: nothing of it weighs on the workers any more."""

    gateway: str


class Assess(Message, frozen=True):
    """Compute `ControlPlane.assess(snapshot)`, on any thread, and observe the result."""

    snapshot: PoASnapshot


class Assessed(Message, frozen=True):
    """The Price of Anarchy of a snapshot; None where it had nothing to compare."""

    poa: PoAEstimate | None = msgspec.field(name="assessment")


#: What comes again and again, from workers and other gateways.
Report: TypeAlias = LoadReport | PeerReport | PeerGone
#: What a journal can hold: KV events without tokens.
KeyedObservation: TypeAlias = (
    WorkerUp | WorkerDraining | WorkerDown | PrefillDone | PrefillClaimed | ReadFailed | FirstToken
    | Ended | GroupEnded | CacheKeyed | CacheLost | LoadReport | PeerReport | PeerGone | Assessed
)  # fmt: skip
Observation: TypeAlias = KeyedObservation | CacheChanged


class Submit(Message, frozen=True):
    """`ControlPlane.submit`."""

    request: Request
    exclude: tuple[str, ...] = ()


class Tokens(Message, frozen=True):
    """`ControlPlane.on_tokens`: requests, and the number of output tokens of each."""

    counts: tuple[tuple[str, int], ...]


class Tick(Message, frozen=True):
    """`ControlPlane.tick`."""


#: What `tick` may ask for. Parameters, role changes and scaling join the queue's decisions here.
Action: TypeAlias = Route | Shed | Recall | Assess
