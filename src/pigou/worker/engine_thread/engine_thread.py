"""EngineThread: drives an EngineCore and its backend, and reports once per step."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pigou.engine.checks import QueueFull, UnknownLoad
from pigou.engine.core import EngineCore
from pigou.engine.plan import Effects, Finished, Plan, Result
from pigou.engine.preemption import RateMeter
from pigou.kv.hashing import chain
from pigou.kv.offload import RecomputeCost
from pigou.logs import about
from pigou.request import SECOND, BlockStored, FinishReason, KVEvent, Medium, Request
from pigou.runtime.step_output import StepOutput, described, is_contained
from pigou.wire.errors import REQUEST_FAILED
from pigou.wire.kv_event_decoding import event_map
from pigou.worker.adapters import AdapterStore, name_of
from pigou.worker.engine_thread.commands import (
    Abort,
    AdapterLoaded,
    Add,
    Backend,
    Begun,
    ClearCache,
    Command,
    EndLease,
    Failed,
    Gauges,
    LeaseCached,
    Loaded,
    OffloadDone,
    Recovered,
    Release,
    Report,
    Restored,
    SetLimits,
    Stop,
    failed_alone,
)
from pigou.worker.engine_thread.heartbeat import Heartbeat
from pigou.worker.engine_thread.kv_offload import OffloadConnector
from pigou.worker.kv_transfer.connector import Transfers
from pigou.worker.kv_transfer.transfer_params import hash_text

log = logging.getLogger(__name__)


class EngineThread:
    """Owns core and backend; takes commands by `put`, answers through `report`."""

    def __init__(
        self, core: EngineCore, backend: Backend, report: Callable[[Report], None],
        crashed: Callable[[BaseException], None], events: bool,
    ) -> None:  # fmt: skip
        self._core = core
        self._backend = backend
        self._report = report
        self._crashed = crashed
        self._events = events
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._adds: dict[str, Add] = {}
        self._tokens: dict[str, list[int]] = {}
        self._loaded: dict[str, int] = {}
        self._traced: dict[str, int] = {}  # start of the load of traced requests; 0 for none
        self._entries: list[str] = []
        self._left = 0
        self._owner: dict[int, str] = {}
        self._out = Report()
        core.stats.queried_tokens = 0  # tokens of the warm-up do not count
        self.gauges = Gauges(stats=core.stats)
        self._added = 0
        self._step_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.heartbeat = Heartbeat()
        backend.set_beat(self.heartbeat.beat)
        self.transfers: Transfers
        self.tiers: OffloadConnector | None = None
        self.adapters: AdapterStore | None = None
        self.meter: RateMeter | None = None
        self.rest: Callable[[], None] | None = None  # called when idle

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Send a command, from any thread; cuts the running plan short."""
        self._inbox.put(command)

    def join(self, timeout: float) -> bool:
        """Wait for the thread; True if it ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            idle = True
            while not self._stopping:
                self._take_commands(block=idle)
                idle = not self._step()
        except BaseException as error:
            log.critical("the engine thread died", exc_info=True)
            self._crashed(error)

    # --- commands ---------------------------------------------------------------------------

    def _take_commands(self, block: bool) -> None:
        """Run all queued commands; block for one if the engine is idle."""
        if block:
            if self.rest is not None:
                self.rest()
            self._flush()
            self.heartbeat.rest()
            due = self._core.next_return  # expected return of a session
            wait = None if due is None else max(0.0, (due - time.monotonic_ns()) / SECOND)
            try:
                self._do(self._inbox.get(timeout=wait))
            except queue.Empty:
                self._recall(time.monotonic_ns())
        while not self._inbox.empty():
            self._do(self._inbox.get())

    def _recall(self, now: int) -> None:
        due = self._core.next_return
        if due is not None and due <= now:
            self._take(self._core.recall(now))

    def _do(self, command: Command) -> None:
        self.heartbeat.work()
        self._stopping = isinstance(command, Stop)
        match command:
            case Add():
                self._add(command)
            case Abort(request, turn_ended):
                self._abort(request, turn_ended)
            case Release(request):
                self._take(self._core.release(request))
            case LeaseCached(request=core_request):
                self._lease_cached(core_request)
            case EndLease(request):
                self.transfers.end_offer(request)
            case Loaded():
                self._load_ended(command)
            case Restored(request, blocks, failed):
                tokens = blocks * self._core.config.block_size
                self._take(self._core.loaded(request, tokens, failed))
            case AdapterLoaded():
                self._adapter_loaded(command)
            case OffloadDone(move, good):
                self._take(self._core.on_transfer_done(move, good))
            case Recovered(tier, blocks):
                assert self.tiers is not None
                self.tiers.recovered(tier, blocks)
            case ClearCache(salts):
                self._take(self._core.clear_cache(salts))
            case SetLimits():
                self._set_limits(command)

    def _set_limits(self, limits: SetLimits) -> None:
        if limits.kv_quotas is not None:
            self._core.set_quotas(limits.kv_quotas)
        self._take(self._core.set_limits(limits.max_seqs, limits.max_batched_tokens))

    def _add(self, add: Add) -> None:
        request = add.request
        self._added += 1
        try:
            self._backend.add(
                request.id, add.tokens, add.params, seed=add.seed, resume=add.generated,
                hashes=request.hashes, grammar=add.grammar, adapter=request.model,
            )  # fmt: skip
        except ValueError as error:
            self._refuse(add, 400, str(error))
            return
        except BaseException as error:
            if not is_contained(error):
                raise
            log.error("%s cannot be taken up", request.id, exc_info=error, extra=about(request.id))
            self._refuse(add, 500, failed_alone(described(error)), REQUEST_FAILED)
            return
        try:
            self._core.add(request)
        except ValueError as error:  # too large, or a duplicate id
            self._refuse(add, 400, str(error))
        except QueueFull as error:
            self._refuse(add, 503, str(error))
        else:
            if add.ticket is not None and not request.remote:
                self.transfers.decline(add.ticket)
            self._adds[request.id] = add
            if add.trace_id:
                self._traced[request.id] = 0
            self._tokens[request.id] = list(add.tokens)

    def _refuse(self, add: Add, status: int, message: str, type: str = "") -> None:
        if add.request.id not in self._adds:
            self._backend.drop(add.request.id)
        if add.ticket is not None:
            self.transfers.decline(add.ticket)
        self._out.failed.append(Failed(add.request.id, status, message, type))

    def _abort(self, request: str, turn_ended: bool) -> None:
        self._decline(request)
        self.transfers.cancel(request)
        self._take(self._core.abort(request, turn_ended=turn_ended))

    def _decline(self, request: str) -> None:
        add = self._adds.get(request)
        if add is not None and add.request.remote and request not in self._loaded:
            self.transfers.decline(add.ticket or {})

    def _adapter_loaded(self, loaded: AdapterLoaded) -> None:
        effects = self._core.adapter_loaded(loaded.adapter, not loaded.error, loaded.seconds)
        for ended in effects.finished:
            self._decline(ended.request)
            self._out.failed.append(Failed(ended.request, 500, loaded.error))
        self._take(effects)

    def _lease_cached(self, request: Request) -> None:
        """Offer a prompt's cached blocks; reported without waiting for the next step."""
        core, ticket, held = self._core, None, np.empty(0, dtype=np.int32)
        try:
            held = core.hold_cached(request, time.monotonic_ns())
        except ValueError as error:
            log.warning("nothing is lent to request %s: %s", request.id, error)
        if len(held):
            last_hash = hash_text(request.hashes[len(held) - 1])
            ticket = self.transfers.offer(request.id, held, core.config.block_size, last_hash)
            self.gauges.blocks_leased_total += len(held)
            if ticket is None:
                self._take(core.release(request.id))
        self._out.leases[request.id] = ticket
        self._flush()

    def _load_ended(self, loaded: Loaded) -> None:
        request = loaded.request
        self.transfers.done(request)
        self.gauges.blocks_received_total += loaded.blocks
        self.gauges.bytes_received_total += loaded.bytes
        size = self._core.config.block_size
        try:
            effects = self._core.loaded(request, min(loaded.tokens, loaded.blocks * size))
        except UnknownLoad:
            log.warning("a load of %s ended that nobody waits for", request, extra=about(request))
            return
        if request in self._adds:
            self._loaded[request] = loaded.tokens
        self._take(effects)

    # --- steps ------------------------------------------------------------------------------

    def _step(self) -> bool:
        now = time.monotonic_ns()
        if self.tiers is not None:
            self._recall(now)
            if self._core.waiting:
                busy = self._core.running > self._core.loading
                self.tiers.measure(self._step_s / 2 if busy else 0.0)  # mean delay of commands
        plan = self._core.schedule(now, drafts=self._backend.drafts())
        self.gauges.read(self._core, plan, self._added)
        self._begin(plan, now)
        moves = len(plan.swap_out) or len(plan.copies) or len(plan.swap_in)
        if not (plan or plan.started or moves):
            return False
        self._left = plan.repeat
        self.heartbeat.work(plan.tokens * plan.repeat)
        self._entries = [self._owner[row] for row in plan.rows.tolist()]
        result = self._backend.execute(plan, self._on_step)
        if self._traced and plan.chunk_tokens:
            end_ns = time.monotonic_ns()
            for request, tokens in zip(self._entries, plan.counts.tolist(), strict=True):
                if tokens > 1 and request in self._traced:
                    self._out.chunks.append((request, now, end_ns, tokens))
        self.heartbeat.work()
        self.heartbeat.steps += result.steps
        self.gauges.count_steps(plan, result)
        self._out.computed, self._out.steps = plan.tokens, result.steps
        self._measure(plan, result)
        self._take(self._core.apply(plan, result))
        self._flush()
        if plan.tokens > len(plan.rows) and hasattr(os, "sched_yield"):
            # If both share a core, Linux lets a computing thread finish its slice before waking a
            # sleeper, which would delay a first token by up to 4 ms.
            os.sched_yield()
        return True

    def _measure(self, plan: Plan, result: Result) -> None:
        if self.meter is None or not len(result.durations):
            return
        self._step_s = int(result.durations[-1]) / SECOND
        rates = self.meter.observe(plan.tokens, int(result.durations[0]))
        if rates is not None:
            self._core.rates = rates
            if self._core.tiers is not None:
                self._core.tiers.learn(RecomputeCost(self._core.config.block_size / rates.prefill))

    def _begin(self, plan: Plan, now: int) -> None:
        if self.tiers is not None:
            self.tiers.make(plan.moves)
        for adapter_load in plan.adapters:
            assert self.adapters is not None
            self.adapters.begin(adapter_load)
        for started in plan.started:
            self._owner[started.row] = started.request
            loaded = self._loaded.get(started.request, 0)
            loading = self._traced.get(started.request, 0)
            self._out.begun.append(Begun(started.request, started.computed, loaded, now, loading))
        for load in plan.loads:
            if self._traced.get(load.request) == 0:
                self._traced[load.request] = now
            if load.row >= 0:  # else it is a recall for an absent session
                self._owner[load.row] = load.request
            if len(load.tiers):
                assert self.tiers is not None
                self.tiers.restore(load)
            elif (ticket := self._adds[load.request].ticket) is None:
                self.put(Loaded(load.request, 0, 0, 0))
            else:
                self._loaded[load.request] = 0
                self.transfers.begin(load, ticket)

    def _on_step(self, step: StepOutput) -> bool:
        self.heartbeat.beat()
        out = self._out
        for entry, prompt in step.prompt_logprobs.items():
            out.prompts.append((self._entries[entry], prompt))
        out.pooled += [(self._entries[entry], states) for entry, states in step.pooled.items()]
        for entry, message in step.failed.items():
            out.failed.append(Failed(self._entries[entry], 400, message))
        reports = step.logprobs
        for entry, token in enumerate(step.tokens.tolist()):
            if token >= 0:
                request = self._entries[entry]
                self._tokens[request].append(token)
                out.tokens.append((request, token, reports.get(entry) if reports else None))
        for entry, why in step.broken.items():
            request = self._entries[entry]
            log.error("%s failed in the engine, alone: %s", request, why, extra=about(request))
            out.failed.append(Failed(request, 500, failed_alone(why), REQUEST_FAILED))
        self._left -= 1
        if not self._inbox.empty():
            return False
        if self._left > 0 and not step.finished.any():
            self._flush()
        return True

    def _take(self, effects: Effects) -> None:
        if self._events and effects.events:
            self._out.events += [self._wire_event(event) for event in effects.events]
        for finished in effects.finished:
            self._finish(finished)

    def _finish(self, finished: Finished) -> None:
        request = finished.request
        add = self._adds.pop(request, None)
        if add is not None and add.request.hold and len(finished.held):
            self._offer(finished, add)
        self._tokens.pop(request, None)
        self._loaded.pop(request, None)
        self._traced.pop(request, None)
        self._backend.drop(request)
        self._out.finished.append(finished)

    def _offer(self, finished: Finished, add: Add) -> None:
        size = self._core.config.block_size
        last_hash = self._last_hash(add, len(finished.held))
        ticket = self.transfers.offer(finished.request, finished.held, size, last_hash)
        if ticket is None:
            self.put(Release(finished.request))
        elif finished.reason is not FinishReason.ABORT:
            self._out.tickets[finished.request] = ticket

    def _last_hash(self, add: Add, blocks: int) -> str:
        """Return the hash of a prompt's block `blocks - 1`, as in tickets."""
        hashes, size = add.request.hashes, self._core.config.block_size
        if len(hashes) < blocks:
            hashes = chain(self._tokens[add.request.id][: blocks * size], size, add.tenure)
        return hash_text(hashes[blocks - 1])

    def _wire_event(self, event: KVEvent) -> dict[str, Any]:
        """Convert a KV event to wire format; blocks of tiers carry no tokens."""
        size = self._core.config.block_size
        if not isinstance(event, BlockStored) or event.medium is not Medium.DEVICE:
            return event_map(event, size)
        tokens = self._tokens.get(event.request)
        if tokens is None:
            return event_map(event, size)  # recalled, not used yet
        start = event.first * size
        tokens = tokens[start : start + len(event.hashes) * size]
        add = self._adds[event.request]
        return event_map(event, size, tokens, add.salt, name_of(add.request.model))

    # --- reports ----------------------------------------------------------------------------

    def _flush(self) -> None:
        out, self._out = self._out, Report()
        out.now = time.monotonic_ns()
        self.gauges.read_load(self._core, self._added)
        self._report(out)
