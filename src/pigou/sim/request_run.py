"""A request's run through the simulator: the client's attempts, and their legs on workers."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from pigou.engine.plan import Finished, Load
from pigou.lifecycle.messages import RequestOutcome
from pigou.lifecycle.request import RequestLifecycle
from pigou.request import NEVER, BlockHashes, KVEvent, Request
from pigou.sim.workload import RequestSpec


class RunOutcome(StrEnum):
    """Outcome of a request; `PENDING` until its end, or if cut off."""

    PENDING = "pending"
    DONE = "done"
    SHED = "shed"
    TIMED_OUT = "timed out"
    FAILED = "failed"


#: Attempt outcome to client result.
CLIENT_OUTCOMES = dict.fromkeys(RequestOutcome, RunOutcome.FAILED) | {
    RequestOutcome.DONE: RunOutcome.DONE,
    RequestOutcome.SHED: RunOutcome.SHED,
    RequestOutcome.CLIENT_TIMED_OUT: RunOutcome.TIMED_OUT,
}


class RequestRun(msgspec.Struct, eq=False):
    """One request as its client knows it; times in nanoseconds of the virtual clock, 0 for none."""

    number: int  # unique, in the order of the intentions
    spec: RequestSpec
    intended_ns: int  # when the client meant to send it
    on_end: Callable[[RequestRun, int], None]
    sent_ns: int = 0  # when its last attempt was sent
    retry_after_ns: int = 0  # a duration; a refused request may be sent again after it
    routed_ns: int = 0  # when its last route was chosen
    began_ns: int = 0  # when a worker first began to compute it, in its last attempt
    first_token_ns: int = 0  # when its first token was received
    last_token_ns: int = 0  # when its last token was received
    ended_ns: int = 0
    output_tokens: int = 0  # tokens received
    cached_tokens: int = 0  # prompt tokens found in a prefix cache
    prefill_worker: str = ""  # computed the prompt; "" for the decode worker
    decode_worker: str = ""  # streamed the tokens
    attempts: int = 0  # times that it was sent
    moves: int = 0  # times that it was routed again because its worker failed
    preemptions: int = 0  # times that it was preempted
    outcome: RunOutcome = RunOutcome.PENDING
    reason: str = ""  # why it failed

    @property
    def attempt_id(self) -> str:
        """Control plane id of the present attempt."""
        return str(self.number) if self.attempts <= 1 else f"{self.number}.{self.attempts}"

    def begin(self, now: int) -> None:
        """Note the first computation of this attempt."""
        if self.began_ns < self.sent_ns:
            self.began_ns = now


class KVSource(NamedTuple):
    """Source of a leg's prompt prefix; none by default."""

    worker: str = ""  # holds the blocks; "" for none
    hold_id: str = ""  # request id under which it holds them
    tokens: int = 0  # tokens of these blocks


NO_SOURCE = KVSource()


class Attempt(msgspec.Struct, eq=False):
    """One attempt of a client to have a request served, over as many workers as it takes."""

    run: RequestRun
    lifecycle: RequestLifecycle  # decides its next step
    hashes: BlockHashes  # hashes of the prompt's blocks
    block_size: int  # tokens in each of these
    arrival_ns: int  # when it reached the fleet
    leg: Leg | None = None  # running on a worker, if any
    source: KVSource = NO_SOURCE
    priority: int = 0  # sent to its workers
    request: Request | None = None
    slot: int = -1
    expected: int = 0  # output tokens that the control plane predicts

    def plane_request(self, tokens: int) -> Request:
        """Return the control plane's request, with `tokens` output tokens so far."""
        spec = self.run.spec
        return Request(
            self.lifecycle.id,
            spec.prompt_tokens + tokens,
            (spec.max_tokens or spec.output_tokens) - tokens,
            self.hashes,
            priority=spec.priority,
            arrival=self.arrival_ns,
            deadline=self.arrival_ns + spec.deadline_ns if spec.deadline_ns else NEVER,
            tenant=spec.tenant,
            expected=spec.expected,
        )

    def leg_request(self, max_tokens: int, *, keep_blocks: bool = False) -> Request:
        """Return a worker's request; `keep_blocks` holds the prompt's blocks for another."""
        run, lifecycle = self.run, self.lifecycle
        return Request(
            f"{lifecycle.id}+{lifecycle.moves}" if lifecycle.moves else lifecycle.id,
            run.spec.prompt_tokens + run.output_tokens,
            max_tokens,
            self.hashes,
            arrival=self.arrival_ns,
            tenant=run.spec.tenant,
            hold=keep_blocks,
            priority=self.priority,
            remote=self.source.tokens,
            expected=self.expected,
        )


class Leg(msgspec.Struct, eq=False):
    """One worker's part of an attempt."""

    attempt: Attempt
    worker: str
    request: Request  # as the worker's core knows it
    number: int = 0
    source: KVSource = NO_SOURCE  # source of prompt blocks that need not be computed
    streams: bool = True  # whether the client receives its tokens
    first: bool = True  # whether its first token has not been generated yet
    row: int = -1  # in the batch; -1 while it has none
    produced: int = 0  # tokens generated; current only while it has no row
    published: int = 0  # tokens of these that the control plane knows of
    last_token_ns: int = 0  # when its last token was generated


class Listener(Protocol):
    """Listener of worker events."""

    def refused(self, leg: Leg, error: Exception, now: int) -> None:
        """A leg was refused."""

    def first_token(self, leg: Leg, now: int) -> None:
        """A leg generated its first token."""

    def finished(self, leg: Leg, finished: Finished, now: int) -> None:
        """A leg ended by itself."""

    def wanted(self, leg: Leg, load: Load, now: int) -> None:
        """A leg asks for blocks of its source; 0 if it has them all."""


#: Publishes a worker's KV events, at a time.
Publish: TypeAlias = Callable[[tuple[KVEvent, ...], int], None]
