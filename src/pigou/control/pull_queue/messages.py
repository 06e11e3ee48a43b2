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
    """A prompt that waits for a prefill worker."""

    request: str  # its id
    tokens: int
    arrival_ns: int  # when the request arrived; waits and the order are counted from it
    incarnation: int = 0  # rises when the same request is queued again; an older one has no effect
    deadline_ns: int = NEVER  # when it is answered with an error if nobody has claimed it
    priority: int = 0  # a lower one goes first


class PrefillClaim(msgspec.Struct, frozen=True):
    """A prompt that a worker has pulled, until it is acked or its lease ends."""

    item: PrefillItem
    worker: str
    delivery: int  # 1 for the first time
    lease_end_ns: int  # when it is delivered again, unless it is extended before


class PrefillExpired(msgspec.Struct, frozen=True):
    """Nobody claimed a prompt by its deadline: the driver answers it with an error."""

    item: PrefillItem


class PrefillDeadLetter(msgspec.Struct, frozen=True):
    """A prompt was delivered too often without an ack: the driver answers it with an error."""

    item: PrefillItem
    deliveries: int


QueueEffect: TypeAlias = PrefillExpired | PrefillDeadLetter


class ServiceTable(NamedTuple):
    """What prompts take on the workers of a queue, in their order."""

    seconds: Seconds  # (prompts, workers)
    tokens: NDArray[np.int64]  # of the prompts that are to be computed there, (prompts, workers)


ServiceLaw: TypeAlias = Callable[[Sequence[PrefillItem]], ServiceTable]


class QueueCounts(msgspec.Struct):
    """What became of the prompts of a queue.

    Attributes:
        queued, claimed, acked: prompts; redelivered ones are claimed several times.
    """

    queued: int = 0
    claimed: int = 0
    acked: int = 0
    redelivered: int = 0  # claims that ended without an ack
    bypasses: int = 0  # times that a later prompt went first
    left: int = 0  # times that a worker left the queue to another one
    duplicates: int = 0  # prompts, and acks, that had no effect
    expired: int = 0
    dead: int = 0
    cancelled: int = 0
