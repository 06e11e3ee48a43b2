"""KV between simulated workers: leases on held blocks, their transfer, and remote KV fetches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from pigou.engine.plan import Load
from pigou.lifecycle.messages import FetchKV
from pigou.request import Request
from pigou.sim.network import Network
from pigou.sim.request_run import Attempt, Leg
from pigou.sim.virtual_clock import Clock, Phase
from pigou.sim.worker import SimWorker
from pigou.sim.worker_spec import FleetWorker

#: Called with the fetch, the worker that holds the blocks, the id it holds them under, their
#: number, and the time.
OnFetched: TypeAlias = Callable[[Attempt, FetchKV, str, str, int, int], None]
#: Called with a fetch that brought nothing, and the time.
OnFetchFailed: TypeAlias = Callable[[Attempt, FetchKV, int], None]


class KVLeases:
    """Blocks held for other workers, until release or the lease's end."""

    def __init__(
        self, clock: Clock, workers: Mapping[str, FleetWorker], network: Network, lease_ns: int
    ) -> None:
        self._clock, self._workers, self._network = clock, workers, network
        self._lease_ns = lease_ns

    def add(self, worker: str, hold_id: str, key: int, now: int) -> None:
        """Record a hold under an id; `key` orders lease ends."""
        self._workers[worker].held_ids.add(hold_id)
        self._clock.at(
            now + self._lease_ns, Phase.TICK, key, lambda at: self.release(worker, hold_id, at)
        )

    def release(self, worker: str, hold_id: str, now: int) -> None:
        """Free held blocks, if the worker still has them."""
        owner = self._workers[worker]
        if hold_id in owner.held_ids:
            owner.held_ids.discard(hold_id)
            if owner.sim is not None:
                owner.sim.release(hold_id, now)

    def transfer(self, leg: Leg, load: Load, now: int) -> None:
        """Transfer a leg the blocks it asks of its source; 0 if it has them all."""
        source, hold_id = self._workers[leg.source.worker], leg.source.hold_id
        if not len(load.blocks):
            self.release(leg.source.worker, hold_id, now)
            return
        target = self._workers[leg.worker]
        receiver, sender = target.sim, source.sim
        assert receiver is not None
        held = hold_id in source.held_ids
        source.held_ids.discard(hold_id)  # the transfer keeps the lease alive
        tokens = len(load.blocks) * leg.attempt.block_size

        def arrived(at: int) -> None:
            sent = held and sender is not None and source.sim is sender
            if target.sim is receiver:
                receiver.loaded(leg.request.id, tokens if sent else 0, at)
            if sent and sender is not None:
                sender.release(hold_id, at)

        size = tokens * target.spec.kv_bytes if held else 0
        self._network.send(source.number, target.number, size, now, arrived)


class RemoteKVFetches:
    """Requests to hold the cached beginning of a prompt; each waits no longer than computing it."""

    def __init__(
        self, clock: Clock, workers: Mapping[str, FleetWorker], delay_ns: int,
        on_fetched: OnFetched, on_failed: OnFetchFailed,
    ) -> None:  # fmt: skip
        self.count = self.tokens = self.failed = 0
        self._clock, self._workers, self._delay_ns = clock, workers, delay_ns
        self._on_fetched, self._on_failed = on_fetched, on_failed
        self._number = 0

    def start(self, attempt: Attempt, fetch: FetchKV, now: int) -> None:
        """Ask a worker to hold a prompt's cached blocks."""
        self._number += 1
        hold_id = f"lend-{self._number}"
        run = attempt.run
        prompt_tokens = run.spec.prompt_tokens + run.output_tokens
        request = Request(hold_id, prompt_tokens, 1, attempt.hashes)
        worker = self._workers[fetch.read.worker]

        def arrive(at: int) -> None:
            sim = worker.sim
            if sim is not None and attempt.lifecycle.leg == fetch.leg:
                sim.hold_cached(
                    request,
                    lambda blocks, then: self._reply(attempt, fetch, sim, hold_id, blocks, then),
                    at,
                )

        deadline = now + fetch.wait_ns
        self._clock.at(deadline, Phase.TICK, run.number, lambda at: self._fail(attempt, fetch, at))
        if self._delay_ns:
            self._clock.at(now + self._delay_ns, Phase.SEND, run.number, arrive)
        else:
            arrive(now)

    def _reply(
        self, attempt: Attempt, fetch: FetchKV, sim: SimWorker, hold_id: str, blocks: int, now: int
    ) -> None:
        if attempt.lifecycle.leg != fetch.leg:  # the attempt continued without, or ended
            if blocks:
                sim.release(hold_id, now)
        elif blocks:
            self.count += 1
            self.tokens += blocks * attempt.block_size
            self._on_fetched(attempt, fetch, fetch.read.worker, hold_id, blocks, now)
        else:
            self._fail(attempt, fetch, now)

    def _fail(self, attempt: Attempt, fetch: FetchKV, now: int) -> None:
        if attempt.lifecycle.leg == fetch.leg:
            self.failed += 1
            self._on_failed(attempt, fetch, now)
