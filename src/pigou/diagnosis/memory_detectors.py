"""Detectors of modes 1, 2, 3, 14, 15 and 16: memory of workers."""

from __future__ import annotations

from collections.abc import Callable

from pigou.diagnosis.mode import ModeEvidence, ModeFinding
from pigou.diagnosis.modes import MODES
from pigou.diagnosis.signals import Series, finding, mean, need, stretch
from pigou.windows.observations import FleetObservation, WorkerObservation


def _per_worker(
    series: Series, number: int, shows: Callable[[WorkerObservation, FleetObservation], bool],
    evidence: Callable[[list[WorkerObservation], float], list[ModeEvidence]],
) -> ModeFinding | None:  # fmt: skip
    """Return the finding of the worker that shows a signal longest."""
    mode, best = MODES[number], None
    for name in dict.fromkeys(w.worker for window in series for w in window.workers):

        def shown_by(window: FleetObservation, name: str = name) -> bool:
            return any(w.worker == name and shows(w, window) for w in window.workers)

        shown = stretch(series, mode, shown_by)
        if shown and (best is None or len(shown) > len(best[0])):
            workers = [w for window in shown for w in window.workers if w.worker == name]
            best = (shown, evidence(workers, sum(window.seconds for window in shown)))
    return None if best is None else finding(mode, best[0], best[1])


def out_of_memory(series: Series) -> ModeFinding | None:
    """Mode 1: a worker ended for want of memory."""
    mode = MODES[1]
    dead = [(window, worker) for window in series for worker in window.workers
            if worker.out_of_memory]  # fmt: skip
    if not dead:
        return None
    names = dict.fromkeys(worker.worker for _, worker in dead)
    evidence = [
        ModeEvidence("deaths for want of memory",
                 float(sum(w.out_of_memory for _, w in dead if w.worker == name)), "", 0.0, name)
        for name in names
    ]  # fmt: skip
    return finding(mode, [window for window, _ in dead], evidence, certain=True)


def kv_exhaustion(series: Series) -> ModeFinding | None:
    """Mode 2: a full pool, and preemptions."""
    need((w.preemptions for o in series for w in o.workers), "preemptions of workers")
    limits = MODES[2].limits

    def shows(worker: WorkerObservation, _: FleetObservation) -> bool:
        return (worker.kv_usage or 0.0) > limits["kv_usage"] and (worker.preemptions or 0) > 0

    def evidence(workers: list[WorkerObservation], seconds: float) -> list[ModeEvidence]:
        name, count = workers[0].worker, sum(w.preemptions or 0 for w in workers)
        usage = mean(w.kv_usage for w in workers)
        return [
            ModeEvidence("KV usage", usage, "", limits["kv_usage"], name),
            ModeEvidence("preemptions", count / seconds, "/s", 0.0, name),
            ModeEvidence("running", mean(w.running for w in workers), "requests", None, name),
        ]  # fmt: skip

    return _per_worker(series, 2, shows, evidence)


def fragmentation(series: Series) -> ModeFinding | None:
    """Mode 3: room that nobody can use."""
    limits = MODES[3].limits
    need(
        (w.wasted_tokens if not w.allocation_failures else 0 for o in series for w in o.workers),
        "room in used blocks, failed allocations",
    )

    def waste(worker: WorkerObservation) -> float:
        return (worker.wasted_tokens or 0.0) / max(worker.kv_tokens, 1)

    def shows(worker: WorkerObservation, _: FleetObservation) -> bool:
        free = 1.0 - (worker.kv_usage or 0.0)
        fails = worker.allocation_failures > 0 and free > limits["free"]
        return fails or waste(worker) > limits["waste"]

    def evidence(workers: list[WorkerObservation], seconds: float) -> list[ModeEvidence]:
        name, fails = workers[0].worker, sum(w.allocation_failures for w in workers)
        rows = [ModeEvidence("wasted share of the pool", mean(map(waste, workers)), "",
                         limits["waste"], name)]  # fmt: skip
        if fails:
            free = 1.0 - mean(w.kv_usage for w in workers)
            rows += [
                ModeEvidence("failed allocations", fails / seconds, "/s", 0.0, name),
                ModeEvidence("free share of the pool", free, "", limits["free"], name),
            ]
        return rows

    return _per_worker(series, 3, shows, evidence)


def tool_wait(series: Series) -> ModeFinding | None:
    """Mode 14: KV of requests that compute nothing."""
    need((w.idle_tokens for o in series for w in o.workers), "KV held by idle requests")
    limits = MODES[14].limits

    def idle(worker: WorkerObservation) -> float:
        return (worker.idle_tokens or 0.0) / max(worker.kv_tokens, 1)

    def evidence(workers: list[WorkerObservation], _: float) -> list[ModeEvidence]:
        name = workers[0].worker
        return [
            ModeEvidence(
                "idle share of the pool", mean(map(idle, workers)), "", limits["idle"], name
            ),
            ModeEvidence("KV usage", mean(w.kv_usage for w in workers), "", None, name),
        ]

    return _per_worker(series, 14, lambda worker, _: idle(worker) > limits["idle"], evidence)


def adapter_pressure(series: Series) -> ModeFinding | None:
    """Mode 15: adapters that push each other out."""
    need((w.adapter_loads for o in series for w in o.workers), "loads of adapters")
    limits = MODES[15].limits

    def shows(worker: WorkerObservation, window: FleetObservation) -> bool:
        loads = worker.adapter_loads or 0
        if loads / window.seconds <= limits["loads"]:
            return False
        return worker.adapter_load_s / loads > limits["share"] * (window.ttft_p50_s or 0.0)

    def evidence(workers: list[WorkerObservation], seconds: float) -> list[ModeEvidence]:
        name, loads = workers[0].worker, sum(w.adapter_loads or 0 for w in workers)
        load_s = sum(w.adapter_load_s for w in workers) / loads
        return [ModeEvidence("adapter loads", loads / seconds, "/s", limits["loads"], name),
                ModeEvidence("time of a load", load_s, "s", None, name)]  # fmt: skip

    return _per_worker(series, 15, shows, evidence)


def offload_collapse(series: Series) -> ModeFinding | None:
    """Mode 16: reads from tiers that are slower than to recompute."""
    need((w.slow_restores for o in series for w in o.workers), "times of reads from tiers")
    mode = MODES[16]
    limits = mode.limits

    def shows(window: FleetObservation) -> bool:
        slow, reads = window.total("slow_restores") or 0, window.total("restores") or 0
        return slow > limits["slow"] * reads

    shown = stretch(series, mode, shows)
    reads = sum(window.total("restores") or 0 for window in shown)
    if reads < limits["reads"]:
        return None
    slow = sum(window.total("slow_restores") or 0 for window in shown)
    busy = mean(w.link_busy for window in shown for w in window.workers)
    return finding(mode, shown, [
        ModeEvidence("slow reads from tiers", slow / reads, "", limits["slow"]),
        ModeEvidence("reads from tiers", float(reads), "", limits["reads"]),
        ModeEvidence("link busy", busy, ""),
    ])  # fmt: skip
