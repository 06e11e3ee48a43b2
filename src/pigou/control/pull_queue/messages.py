"""What goes in and out of a prefill queue: prompts, claims, and what the driver is to answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.control.pull_queue.claim_price import Seconds
from pigou.request import NEVER


class PrefillItem(msgspec.Struct, frozen=True):
    """A prompt that waits for a prefill worker.

    Attributes:
        request: its id.
        tokens: of the prompt.
        arrival_ns: when the request arrived; waits and the order are counted from it.
        incarnation: rises when the same request is queued again; an older one has no effect.
        deadline_ns: when it is answered with an error if nobody has claimed it.
        priority: a lower one goes first.
    """

    request: str
    tokens: int
    arrival_ns: int
    incarnation: int = 0
    deadline_ns: int = NEVER
    priority: int = 0


class PrefillClaim(msgspec.Struct, frozen=True):
    """A prompt that a worker has pulled, until it is acked or its lease ends.

    Attributes:
        item: the prompt.
        worker: who computes it.
        delivery: 1 for the first time.
        lease_end_ns: when it is delivered again, unless it is extended before.
    """

    item: PrefillItem
    worker: str
    delivery: int
    lease_end_ns: int


class PrefillExpired(msgspec.Struct, frozen=True):
    """Nobody claimed a prompt by its deadline: the driver answers it with an error."""

    item: PrefillItem


class PrefillDeadLetter(msgspec.Struct, frozen=True):
    """A prompt was delivered too often without an ack: the driver answers it with an error."""

    item: PrefillItem
    deliveries: int


QueueEffect: TypeAlias = PrefillExpired | PrefillDeadLetter


class ServiceTable(NamedTuple):
    """What prompts take on the workers of a queue, in their order.

    Attributes:
        seconds: (prompts, workers).
        tokens: of the prompts that are to be computed there, (prompts, workers).
    """

    seconds: Seconds
    tokens: NDArray[np.int64]


ServiceLaw: TypeAlias = Callable[[Sequence[PrefillItem]], ServiceTable]


class QueueCounts(msgspec.Struct):
    """What became of the prompts of a queue.

    Attributes:
        queued, claimed, acked: prompts; redelivered ones are claimed several times.
        redelivered: claims that ended without an ack.
        bypasses: times that a later prompt went first.
        left: times that a worker left the queue to another one.
        duplicates: prompts, and acks, that had no effect.
        expired, dead, cancelled: prompts.
    """

    queued: int = 0
    claimed: int = 0
    acked: int = 0
    redelivered: int = 0
    bypasses: int = 0
    left: int = 0
    duplicates: int = 0
    expired: int = 0
    dead: int = 0
    cancelled: int = 0
