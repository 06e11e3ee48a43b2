"""Messages between a ControlPlane and its driver: decisions, observations, actions."""

from __future__ import annotations

import re
from typing import TypeAlias

import msgspec

from pigou.control.peers.bookings import ClassLoad, PredictedPrompt, TenantService, WorkerBookings
from pigou.control.prefix_index.index import KeyedEvent
from pigou.control.price_of_anarchy import PoAEstimate, PoASnapshot
from pigou.request import EngineLimits, FinishReason, KVEvent, Request, Worker
from pigou.wire.kv_event_decoding import WireEvent


def _kind(name: str) -> str:
    return re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=_kind):
    """A message between a ControlPlane and its driver, as in journals."""


class RemoteKVFetch(msgspec.Struct, frozen=True):
    """Read of a prompt's beginning from another worker's cache."""

    worker: str  # id of the source
    depth: int  # leading tokens without prefill after the fetch
    tokens: int  # transferred tokens of these
    seconds: float
    saves: float  # net seconds saved over the best choice without it


class Choice(msgspec.Struct, frozen=True):  # as `Route`, made for each request
    """Workers chosen for a request."""

    decode: str  # id of the decode worker
    prefill: str | None = None  # id of the prefill worker; None for local prefill
    cost: float = 0.0  # in the policy's unit
    # tokens of the prompt that the worker which computes it holds, as far as is known.
    cached: int = 0
    # where it reads the beginning of the prompt first; unset where it does not, as in older
    # journals.
    source: RemoteKVFetch | msgspec.UnsetType = msgspec.UNSET

    @property
    def read(self) -> RemoteKVFetch | None:
        """The remote KV fetch; None for none."""
        return None if self.source is msgspec.UNSET else self.source

    @property
    def computed(self) -> int:
        """Leading tokens of the prompt that need no prefill."""
        return self.cached if self.source is msgspec.UNSET else self.source.depth


class Route(Message, frozen=True):
    """Send the request to these workers now; priority None keeps the client's."""

    request: str
    choice: Choice
    priority: int | None = None


class Queue(Message, frozen=True):
    """The request waits behind up to `ahead` others; a later call returns `Route` or `Shed`."""

    request: str
    ahead: int


class Shed(Message, frozen=True):
    """Refuse the request; retrying makes sense after `retry_after` nanoseconds.

    If it waits inside a worker, the driver aborts it unless it has a token. `tenant`: the tenant's
    share of the queue is full (429), not the fleet (503).
    """

    request: str
    reason: str
    retry_after: int
    tenant: bool = False


class Recall(Message, frozen=True):
    """Abort a routed request without a token, and submit it again: another worker has room."""

    request: str
    worker: str


Decision: TypeAlias = Route | Queue | Shed | Recall


class WorkerUp(Message, frozen=True):
    """A worker is ready, came back, or changed its role."""

    worker: Worker


class WorkerDraining(Message, frozen=True):
    """Route nothing new to a worker; what it has stays.

    It is drained once nothing weighs on it (`FleetState.is_drained`). `WorkerUp` ends the drain; a
    `WorkerDown` after it means that the worker will not come back.
    """

    worker: str


class WorkerDown(Message, frozen=True):
    """A worker is gone: forget its load and cache."""

    worker: str


class PrefillDone(Message, frozen=True):
    """The prefill leg of a request ended; `well` if the prompt was computed."""

    request: str
    well: bool = True


class PrefillClaimed(Message, frozen=True):
    """A worker pulled a routed prompt from the prefill queue, with `cached` tokens of it.

    It is the decode worker itself if prefill became local.
    """

    request: str
    worker: str
    cached: int = 0


class ReadFailed(Message, frozen=True):
    """A remote KV fetch failed: the whole prompt is computed."""

    request: str


class FirstToken(Message, frozen=True):
    """The first token of a request reached the driver."""

    request: str


class Ended(Message, frozen=True):
    """A request left the fleet or the queue (done, failed, cancelled)."""

    request: str
    reason: FinishReason


class GroupEnded(Message, frozen=True):
    """No further sequence of a group will be submitted."""

    group: str


class CacheChanged(Message, frozen=True):
    """KV events of a worker, in order: from the wire, or from a simulated core."""

    worker: str
    events: tuple[KVEvent | WireEvent, ...]


class CacheKeyed(Message, frozen=True):
    """KV events with keys in place of tokens (`PrefixIndex.keyed`), as in journals."""

    worker: str
    events: tuple[KeyedEvent, ...]


class CacheLost(Message, frozen=True):
    """KV events of a worker were lost: its cached blocks are unknown."""

    worker: str


class LoadReport(Message, frozen=True):
    """A worker's load: requests running and waiting, and `kv_usage`, 0 to 1."""

    worker: str
    running: int
    waiting: int
    kv_usage: float
    # so far; unset where it is not told, as in older journals.
    preemptions: int | msgspec.UnsetType = msgspec.UNSET


class AdapterReport(Message, frozen=True):
    """The LoRA adapters on a worker's device."""

    worker: str
    slots: int
    loaded: tuple[str, ...]
    load_s: float  # mean seconds of a load; 0 before the first


class PeerReport(Message, frozen=True):
    """Another gateway's load, tenant service and predictions; `lag_ns` is their age."""

    gateway: str
    workers: tuple[WorkerBookings, ...] = ()
    tenants: tuple[TenantService, ...] = ()
    prompts: tuple[PredictedPrompt, ...] = ()
    lag_ns: int = 0
    classes: tuple[ClassLoad, ...] | None = None  # None if as before


class PeerGone(Message, frozen=True):
    """Another gateway is gone: remove its load from the workers."""

    gateway: str


class Assess(Message, frozen=True):
    """Compute `ControlPlane.assess(snapshot)` on any thread, and observe the result."""

    snapshot: PoASnapshot


class SetEngineLimits(Message, frozen=True):
    """Set limits of the engines of all workers that decode."""

    limits: EngineLimits


class Assessed(Message, frozen=True):
    """Price of Anarchy of a snapshot; None if there was nothing to compare."""

    poa: PoAEstimate | None = msgspec.field(name="assessment")


#: Periodic reports of workers and other gateways.
Report: TypeAlias = LoadReport | AdapterReport | PeerReport | PeerGone
#: Observations of a journal: KV events come without tokens.
KeyedObservation: TypeAlias = (
    WorkerUp | WorkerDraining | WorkerDown | PrefillDone | PrefillClaimed | ReadFailed | FirstToken
    | Ended | GroupEnded | CacheKeyed | CacheLost | LoadReport | AdapterReport | PeerReport
    | PeerGone | Assessed
)  # fmt: skip
Observation: TypeAlias = KeyedObservation | CacheChanged


class Submit(Message, frozen=True):
    """A call of `ControlPlane.submit`."""

    request: Request
    exclude: tuple[str, ...] = ()


class Tokens(Message, frozen=True):
    """A call of `ControlPlane.on_tokens`: requests, and output tokens of each."""

    counts: tuple[tuple[str, int], ...]


class Tick(Message, frozen=True):
    """A call of `ControlPlane.tick`."""


#: Decisions of `tick`.
Action: TypeAlias = Route | Shed | Recall | Assess | SetEngineLimits
