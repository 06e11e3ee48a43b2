"""Windows of a live fleet: load of gateway and workers in one interval."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from pigou.fleet.live_fleet import LiveFleet
from pigou.fleet.member import Member
from pigou.fleet.provider import ProvidedPool
from pigou.fleet.worker_process import process_stat
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import Upstream, WorkerReport
from pigou.request import SECOND
from pigou.windows.builder import ComputedPrompt, LoadMeter, PlannerWindowBuilder
from pigou.windows.planner_window import (
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerState,
    WorkerWindow,
)

#: Nanoseconds after which a report is stale.
_STALE_NS = 5 * SECOND
_TICKS = os.sysconf("SC_CLK_TCK")


class _Reported(NamedTuple):
    """What was known of a worker at the end of a window; another upstream is another start."""

    upstream: Upstream
    report: WorkerReport | None
    cpu_s: float | None
    prefill_ns: int  # end of the last window in which its seconds of prompts rose


class PlannerWindows:
    """Makes a planner's windows, back to back; None for figures without a fresh report."""

    def __init__(self, live_fleet: LiveFleet, *plane_drivers: PlaneDriver) -> None:
        self._live_fleet = live_fleet
        self._loads = [
            (driver, LoadMeter(driver.meter.objectives, driver.meter.model()))
            for driver in plane_drivers
        ]
        self._builder = PlannerWindowBuilder(time.monotonic_ns())
        self._prompts: dict[str, list[ComputedPrompt]] = {}  # prompts that no report covers yet
        self._reported: dict[str, _Reported] = {}
        self._members: dict[str, Member] = {}  # members of the last window, without draining ones
        for driver in plane_drivers:
            driver.meter.is_windowed = True
            driver.meter.take(())

    def sample(self) -> None:
        """Sample the running load."""
        for driver, _ in self._loads:
            state = driver.plane.state
            for member in self._live_fleet.members:
                if (row := state.row.get(member.id)) is not None:
                    columns = state.columns
                    self._builder.counts_of(member.id).sample(
                        columns.decoding.item(row), columns.decode_tokens.item(row)
                    )

    def window(self, now: int) -> PlannerWindow:
        """Return the window since the last; `now` is in ns of the gateway's clock."""
        loads: list[LoadWindow] = []
        routing = {}
        for driver, load_meter in self._loads:
            model = load_meter.model = driver.meter.model()
            requests = driver.meter.take(driver.plane.queue)
            loads += load_meter.loads(requests)
            for request in requests.first:
                if (computed := request.computed) is not None:
                    self._prompts.setdefault(computed.worker, []).append(computed)
            routing[model] = driver.plane.status(now).poa
        seconds = max(now - self._builder.last_ns, 1) / SECOND
        pools = tuple(self._pool(pool, now, seconds) for pool in self._live_fleet.provided.values())
        members = self._live_fleet.members
        present = {member.id for member in members}
        self._members = {
            member.id: member for member in members if member.state is not WorkerState.DRAINING
        }
        self._reported = {id: seen for id, seen in self._reported.items() if id in present}
        self._prompts = {id: left for id, left in self._prompts.items() if id in present}
        self._builder.counts.clear()
        return self._builder.window(now, tuple(loads), pools, routing)

    def _pool(self, pool: ProvidedPool, now: int, seconds: float) -> PoolWindow:
        drivers = {load_meter.model: driver for driver, load_meter in self._loads}
        model = pool.model if len(self._loads) > 1 else self._loads[0][1].model
        driver = drivers.get(model, self._loads[0][0])
        members = [member for member in self._live_fleet.members if member.pool == pool.name]
        workers = [self._worker(member, driver, now, seconds) for member in members]
        workers += [
            WorkerWindow(id=member.id, state=WorkerState.DRAINING, since_ns=member.since_ns)
            for member in self._members.values()
            if member.leaving and member.pool == pool.name and member not in members
        ]
        return PoolWindow(
            name=pool.name,
            role=pool.role,
            model=model,
            gpus=pool.gpus,
            workers=tuple(workers),
            can_start=not self._live_fleet.start_refusal(pool.name),
        )

    def _worker(
        self, member: Member, driver: PlaneDriver, now: int, seconds: float
    ) -> WorkerWindow:
        plane, upstream = driver.plane, driver.upstreams.get(member.id)
        row = plane.state.row.get(member.id)
        life = WorkerWindow(
            id=member.id,
            state=member.state,
            since_ns=member.since_ns,
            unplaceable=member.unplaceable,
        )
        if upstream is None or row is None:
            self._reported.pop(member.id, None)
            return life
        before = self._reported.get(member.id)
        if before is not None and before.upstream is not upstream:
            before = None
        report, last = upstream.report, before.report if before is not None else None
        if report is not None and now - report.at_ns > _STALE_NS:
            report = None
        worker, decodes = upstream.worker, upstream.worker.role.decodes
        self._add_prompts(member.id, now if report is None else report.at_ns)
        cpu_s = cpu_seconds(member.row().pid)
        cpu = _increase(cpu_s, before.cpu_s if before is not None else None)
        prefill_s = _rise(report, last, "prefill_s")
        since_ns = self._builder.last_ns if before is None else before.prefill_ns
        if prefill_s and upstream.engine.stock:
            # It adds up the prompts that it computes side by side. Pigou's are reported by
            # step, and a step can be longer than a window.
            prefill_s = min(prefill_s, max(now - since_ns, 1) / SECOND)
        rose_ns = since_ns if prefill_s == 0 else now
        self._reported[member.id] = _Reported(upstream, report, cpu_s, rose_ns)
        itl_s, gaps = _rise(report, last, "itl_s"), _rise(report, last, "itl_count")
        figures: dict[str, Any] = {} if decodes else {"mean_running": None}
        if report is not None:
            figures |= {
                "waiting": report.waiting,
                "running": report.running,
                "kv_usage": report.kv_usage,
                "rank_imbalance": report.rank_imbalance,
            }
        return self._builder.worker(
            life, worker, plane, row, _rise(report, last, "prefill_tokens"),
            cached_tokens=float(plane.index.cache(member.id).blocks * worker.block_size),
            prefill_s=prefill_s,
            itl_s=itl_s / gaps if decodes and itl_s is not None and gaps else None,
            cpu_usage=None if cpu is None else cpu / seconds,
            **figures,
        )  # fmt: skip

    def _add_prompts(self, worker: str, until_ns: int) -> None:
        """Count prompts computed by the time of a report, maybe a second old."""
        prompts = self._prompts.pop(worker, [])
        counts = self._builder.counts_of(worker)
        for prompt in prompts:
            if prompt.at_ns <= until_ns:
                counts.add_prompt(prompt)
        if left := [prompt for prompt in prompts if prompt.at_ns > until_ns]:
            self._prompts[worker] = left


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds of a process of this machine, by `/proc`; None where not known."""
    if not pid:
        return None
    stat = process_stat(pid)
    return None if stat is None else stat[1] / _TICKS


def _rise(now: WorkerReport | None, before: WorkerReport | None, counter: str) -> float | None:
    """Return how far a counter of a worker's reports rose; None where it is not known."""
    return (
        None
        if now is None or before is None
        else _increase(getattr(now, counter), getattr(before, counter))
    )


def _increase(now: float | None, before: float | None) -> float | None:
    """Return how far a counter rose; None where it is not known, or began again."""
    if now is None or before is None or now < before:
        return None
    return now - before
