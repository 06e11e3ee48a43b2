"""A call: one request as its client knows it, from the intention to the end."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from pigou.sim.workload import Job


class Outcome(StrEnum):
    """How a call ended; `PENDING` until then, and for good where the run was cut off."""

    PENDING = "pending"
    DONE = "done"
    SHED = "shed"
    TIMED_OUT = "timed out"
    FAILED = "failed"


class Call(msgspec.Struct, eq=False):
    """Times are nanoseconds of the virtual clock, 0 where it did not come to that.

    Attributes:
        number: unique, in the order of the intentions.
        job: what is asked for.
        intended: when the client meant to send it.
        on_end: told when an attempt is over.
        sent: when its last attempt was sent.
        retry_after: nanoseconds after which a refused one may come again.
        routed: when workers were chosen for it, the last time.
        first: when its first token came.
        last: when its last token came.
        ended: when it was over.
        tokens: that came.
        cached: tokens of the prompt that needed no computing.
        prefill: worker that computed the prompt, "" for the one that streamed it.
        decode: worker that streamed it.
        attempts: times that it was sent.
        moves: times that it went to other workers because one failed.
        preemptions: times that it lost its place in a batch.
        outcome: how it ended.
        reason: why it failed.
    """

    number: int
    job: Job
    intended: int
    on_end: Callable[[Call, int], None]
    sent: int = 0
    retry_after: int = 0
    routed: int = 0
    first: int = 0
    last: int = 0
    ended: int = 0
    tokens: int = 0
    cached: int = 0
    prefill: str = ""
    decode: str = ""
    attempts: int = 0
    moves: int = 0
    preemptions: int = 0
    outcome: Outcome = Outcome.PENDING
    reason: str = ""
