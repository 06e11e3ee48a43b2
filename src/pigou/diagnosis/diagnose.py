"""Detectors of the 19 failure modes, and the diagnosis of a series of windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby, pairwise

import msgspec
import numpy as np

from pigou.diagnosis.mode import (
    Diagnosis,
    FailureMode,
    ModeEvidence,
    ModeFinding,
    Series,
    SignalMissing,
    correlation,
    finding,
    mean,
    median,
    need,
    stretch,
)
from pigou.diagnosis.modes import MODES
from pigou.windows.observations import FleetObservation, WorkerObservation

#: Long prompts, in medians of the windows' longest prompts.
_LONG = 4.0


def _per_worker(
    series: Series, mode: FailureMode,
    shows: Callable[[WorkerObservation, FleetObservation], bool],
    evidence: Callable[[list[WorkerObservation], float], list[ModeEvidence]],
) -> ModeFinding | None:  # fmt: skip
    def shown_by(name: str, window: FleetObservation) -> bool:
        return any(w.worker == name and shows(w, window) for w in window.workers)

    names = dict.fromkeys(w.worker for window in series for w in window.workers)
    name, shown = _longest_stretch(series, mode, names, shown_by)
    if not shown:
        return None
    workers = [w for window in shown for w in window.workers if w.worker == name]
    return finding(mode, shown, evidence(workers, sum(window.seconds for window in shown)))


def _longest_stretch(
    series: Series, mode: FailureMode, names: Iterable[str],
    shows: Callable[[str, FleetObservation], bool],
) -> tuple[str, Series]:  # fmt: skip
    """Return the worker or tenant that shows a signal longest, and that stretch; () for none."""
    stretches = [(name, stretch(series, mode, partial(shows, name))) for name in names]
    return max(stretches, key=lambda named: len(named[1]), default=("", ()))


def out_of_memory(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 1: a worker ran out of memory."""
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


def kv_exhaustion(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 2: a full pool, and preemptions."""
    need((w.preemptions for o in series for w in o.workers), "preemptions of workers")
    limits = mode.limits

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

    return _per_worker(series, mode, shows, evidence)


def fragmentation(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 3: unusable free space."""
    limits = mode.limits
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

    return _per_worker(series, mode, shows, evidence)


def tool_wait(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 14: KV held by requests that compute nothing."""
    need((w.idle_tokens for o in series for w in o.workers), "KV held by idle requests")
    limits = mode.limits

    def idle(worker: WorkerObservation) -> float:
        return (worker.idle_tokens or 0.0) / max(worker.kv_tokens, 1)

    def evidence(workers: list[WorkerObservation], _: float) -> list[ModeEvidence]:
        name = workers[0].worker
        tenant = Counter(worker.idle_tenant for worker in workers).most_common(1)[0][0]
        share, usage = mean(map(idle, workers)), mean(w.kv_usage for w in workers)
        rows = [
            ModeEvidence("idle share of the pool", share, "", limits["idle"], name),
            ModeEvidence("KV usage", usage, "", None, name),
        ]
        return [*rows, ModeEvidence("most of it", share, "", None, tenant)] if tenant else rows

    return _per_worker(series, mode, lambda worker, _: idle(worker) > limits["idle"], evidence)


def adapter_pressure(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 15: adapters evict each other."""
    need((w.adapter_loads for o in series for w in o.workers), "loads of adapters")
    limits = mode.limits

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

    return _per_worker(series, mode, shows, evidence)


def offload_collapse(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 16: tier reads slower than recomputing."""
    need((w.slow_restores for o in series for w in o.workers), "times of reads from tiers")
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


def prefix_miss_storm(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 4: the hit ratio falls at the same request rate."""
    limits = mode.limits
    if not any(window.total("queried_tokens") for window in series):
        need((None,), "hits of prefix caches")
    for at in range(3, len(series)):
        recent = _next(series[at:], mode.lasts_s)
        if not recent:
            break
        before = series[:at]
        known, now = _hit_ratio(before), _hit_ratio(recent)
        prefill, requests = (
            _rate(recent, name) / max(_rate(before, name), 1e-9)
            for name in ("prefill_tokens", "arrived")
        )
        if (
            sum(window.arrived for window in recent) >= limits["count"]
            and known > limits["known"] and now < limits["drop"] * known
            and prefill > limits["prefill"] and requests < limits["requests"]
        ):  # fmt: skip
            return finding(mode, series[at:], [
                ModeEvidence("hit ratio", now, "", limits["drop"] * known),
                ModeEvidence("hit ratio before", known, ""),
                ModeEvidence("prefill tokens", prefill, "times", limits["prefill"]),
                ModeEvidence("requests a second", requests, "times", limits["requests"]),
            ])  # fmt: skip
    return None


def _next(series: Series, seconds: float) -> Series:
    total = 0.0
    for count, window in enumerate(series, 1):
        total += window.seconds
        if total >= seconds:
            return series[:count]
    return ()


def _hit_ratio(series: Series) -> float:
    queried = sum(window.total("queried_tokens") or 0 for window in series)
    return sum(window.total("hit_tokens") or 0 for window in series) / queried if queried else 0.0


def _rate(series: Series, name: str) -> float:
    total = sum(w.arrived if name == "arrived" else w.total(name) or 0 for w in series)
    return total / sum(window.seconds for window in series)


def semantic_staleness(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 5: cached answers older than their sources, or downvoted."""
    need((w.answer_hits if w.answer_hits is not None or not w.feedbacks else 0 for w in series),
         "hits of a semantic cache, users' feedback")  # fmt: skip
    limits = mode.limits
    hits, feedbacks = sum(w.answer_hits or 0 for w in series), sum(w.feedbacks for w in series)
    stale = sum(w.stale_answer_hits for w in series) / max(hits, 1)
    disliked = sum(w.downvotes for w in series) / max(feedbacks, 1)
    is_stale = hits >= limits["answers"] and stale > limits["stale"]
    is_disliked = feedbacks >= limits["answers"] and disliked > limits["disliked"]
    if not is_stale and not is_disliked:
        return None
    shown = [w for w in series if w.stale_answer_hits or w.downvotes]
    return finding(mode, shown, [
        ModeEvidence("stale hits", stale, "", limits["stale"]),
        ModeEvidence("disliked answers", disliked, "", limits["disliked"]),
    ])  # fmt: skip


def noisy_neighbour(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 11: a tenant far above its share while others wait."""
    limits = mode.limits
    if not any(len(window.tenants) > 1 for window in series):
        need((None,), "tenants: there is one at most")
    names = dict.fromkeys(t.tenant for window in series for t in window.tenants)

    def others(name: str, window: FleetObservation) -> float:
        return sum(t.waiting for t in window.tenants if t.tenant != name)

    def is_noisy(name: str, window: FleetObservation) -> bool:
        share, fair = _shares(window, name)
        is_above = fair < 1.0 and share > _limit(fair, limits["times"])
        return is_above and others(name, window) > limits["waiting"]

    name, shown = _longest_stretch(series, mode, names, is_noisy)
    if not shown:
        return None
    share, fair = (mean(values) for values in zip(*(_shares(w, name) for w in shown), strict=True))
    waiting = mean(others(name, w) for w in shown)
    return finding(mode, shown, [
        ModeEvidence("share of KV or tokens", share, "", _limit(fair, limits["times"]), name),
        ModeEvidence("its weight's share", fair, "", None, name),
        ModeEvidence("requests of others that wait", waiting, "requests", limits["waiting"]),
    ])  # fmt: skip


def _limit(fair: float, times: float) -> float:
    """Return the share above which a tenant is noisy: twice its own, or half of the rest."""
    return min(times * fair, (1.0 + fair) / 2)


def _shares(window: FleetObservation, name: str) -> tuple[float, float]:
    weights = sum(t.weight for t in window.tenants)
    own = [t for t in window.tenants if t.tenant == name]
    if not own:
        return 0.0, 1.0
    shares = [
        (getattr(own[0], used) or 0.0) / total
        for used in ("tokens", "kv_token_s")
        if (total := sum(getattr(t, used) or 0.0 for t in window.tenants))
    ]
    return max(shares, default=0.0), own[0].weight / weights


def retry_storm(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 12: repeats that grow with the waits."""
    need((window.repeated for window in series), "requests that came again")
    limits = mode.limits

    def share(window: FleetObservation) -> float:
        return (window.repeated or 0) / window.arrived if window.arrived else 0.0

    shown = stretch(series, mode, lambda window: share(window) > limits["share"])
    repeated = sum(window.repeated or 0 for window in shown)
    if repeated < limits["requests"]:
        return None
    queues = [window.waiting for window in series]
    rises = correlation([share(window) for window in series], queues) > 0
    total = repeated / sum(window.arrived for window in shown)
    if not rises and total < limits["flat"]:
        return None
    return finding(mode, shown, [
        ModeEvidence("requests that came again", total, "", limits["share"]),
        ModeEvidence("requests that wait", mean(w.waiting for w in shown), "requests"),
    ])  # fmt: skip


def under_use(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 17: low load for long."""
    need((w.busy for window in series for w in window.workers), "the time that workers compute")
    limits = mode.limits

    def busy(window: FleetObservation) -> float:
        return mean(worker.busy for worker in window.decoders)

    def shows(window: FleetObservation) -> bool:
        return busy(window) < limits["busy"] and window.waiting < limits["waiting"]

    shown = stretch(series, mode, shows)
    if not shown:
        return None
    return finding(mode, shown, [
        ModeEvidence("workers busy", mean(map(busy, shown)), "", limits["busy"]),
        ModeEvidence("running", mean(w.running for w in shown), "requests"),
        ModeEvidence("workers", float(len(shown[-1].workers)), ""),
    ])  # fmt: skip


def back_pressure_failure(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 19: failures while the queue grows and nothing is refused."""
    limits = mode.limits
    runs = groupby(series, lambda window: window.refused > 0)
    growths = [_growth(tuple(run)) for refuses, run in runs if not refuses]
    best = max(growths, key=len, default=())
    grows = best and best[-1].waiting > max(limits["waiting"], 2 * best[0].waiting)
    if not grows or sum(map(_failures, best)) < limits["failures"]:
        return None
    if sum(window.seconds for window in best) < mode.lasts_s:
        return None
    return finding(mode, best, [
        ModeEvidence("failed requests", float(sum(map(_failures, best))), "", 0.0),
        ModeEvidence("requests that wait, at the end", best[-1].waiting, "requests",
                     limits["waiting"]),
        ModeEvidence("refused requests", 0.0, ""),
    ])  # fmt: skip


def _failures(window: FleetObservation) -> int:
    return window.failed + int(window.total("out_of_memory") or 0)


def _growth(run: Series) -> Series:
    return run[: max(range(len(run)), key=lambda at: run[at].waiting) + 1]


def queue_build_up(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 6: the queue grows, window after window."""
    limits = mode.limits
    best: list[FleetObservation] = []
    run = list(series[:1])
    for before, window in pairwise(series):
        run = [*run, window] if window.waiting > before.waiting else [window]
        if len(run) > len(best):
            best = run
    if len(best) <= limits["windows"] or best[-1].waiting - best[0].waiting < limits["growth"]:
        return None
    grown = best[1:]
    arrived = sum(window.arrived - window.refused for window in grown)
    rho = arrived / max(sum(window.completed for window in grown), 1)
    if rho < limits["rho"]:
        return None
    seconds = sum(window.seconds for window in grown)
    growth = (best[-1].waiting - best[0].waiting) / seconds
    return finding(mode, grown, [
        ModeEvidence("requests that wait, at the end", best[-1].waiting, "requests"),
        ModeEvidence("growth of the queue", growth, "requests/s", 0.0),
        ModeEvidence("arrived over served", rho, "", limits["rho"]),
    ])  # fmt: skip


def prefill_spikes(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 7: prefill steps stall the streams."""
    need((window.itl_p99_s for window in series), "times between tokens")
    need((w.prefill_s for window in series for w in window.decoders), "time of steps with prompts")
    limits = mode.limits

    def shows(window: FleetObservation) -> bool:
        p50, p99 = window.itl_p50_s, window.itl_p99_s
        if p50 is None or p99 is None or p99 <= limits["ratio"] * p50:
            return False
        steps = _prefill_step_s(window)
        if steps is not None:
            return steps > limits["step"] * p50
        return _prefill_share(window) > limits["share"]

    shown = stretch(series, mode, shows)
    if not shown:
        return None
    p50, p99 = median(w.itl_p50_s for w in shown), median(w.itl_p99_s for w in shown)
    return finding(mode, shown, [
        ModeEvidence("ITL P99 over P50", p99 / p50, "times", limits["ratio"]),
        ModeEvidence("ITL P99", p99, "s"),
        ModeEvidence("step with a prompt", mean(map(_prefill_step_s, shown)), "s"),
        ModeEvidence("time of these steps", mean(map(_prefill_share, shown)), ""),
    ])  # fmt: skip


def _prefill_step_s(window: FleetObservation) -> float | None:
    steps = sum(worker.prefill_steps or 0 for worker in window.decoders)
    return sum(worker.prefill_s or 0.0 for worker in window.decoders) / steps if steps else None


def _prefill_share(window: FleetObservation) -> float:
    return mean(worker.prefill_s for worker in window.decoders) / window.seconds


def head_of_line(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 8: short prompts wait behind a long one."""
    need((window.short_wait_p95_s for window in series), "waits by length of the prompt")
    limits = mode.limits
    known = [window for window in series if window.short_wait_p95_s is not None]
    wait_times = [window.short_wait_p95_s or 0.0 for window in known]
    prompts = [float(window.longest_prompt_tokens or 0) for window in known]
    if len(known) < limits["windows"]:
        raise SignalMissing(f"waits by length of the prompt in {limits['windows']:.0f} windows")
    bar = _LONG * float(np.quantile([tokens for tokens in prompts if tokens] or [0.0], 0.25))
    blocked = [wait for wait, tokens in zip(wait_times, prompts, strict=True) if tokens > bar]
    clear = [wait for wait, tokens in zip(wait_times, prompts, strict=True) if tokens <= bar]
    if not blocked or not clear:
        return None
    follows = correlation(np.log1p(wait_times).tolist(), np.log1p(prompts).tolist())
    wait, other = median(blocked), median(clear)
    if follows <= limits["correlation"] or wait <= max(limits["wait_s"], limits["times"] * other):
        return None
    shown = [window for window, tokens in zip(known, prompts, strict=True) if tokens > bar]
    return finding(mode, shown, [
        ModeEvidence("correlation of waits with the longest prompt", follows, "",
                 limits["correlation"]),
        ModeEvidence("P95 wait of short prompts beside a long one", wait, "s", limits["wait_s"]),
        ModeEvidence("P95 wait of short prompts otherwise", other, "s"),
        ModeEvidence("longest prompt", max(prompts), "tokens"),
    ])  # fmt: skip


def starvation(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 9: long prompts, or the requests of a lane, wait far longer than others."""
    lanes = max(window.starving_lanes for window in series)
    if not lanes:
        need((window.short_wait_p95_s for window in series), "waits by length of the prompt")
    limits = mode.limits

    def shows(window: FleetObservation) -> bool:
        wait, typical = window.long_wait_max_s, window.wait_p50_s
        if window.starving_lanes:
            return True
        if wait is None or typical is None:
            return False
        others = 2 * (window.short_wait_p95_s or 0.0)
        return wait > max(limits["wait_s"], limits["times"] * typical, others)

    shown = stretch(series, mode, shows)
    if not shown:
        return None
    rows = [ModeEvidence("lanes that starve", float(lanes), "", 0.0)] if lanes else []
    if wait_times := [w.long_wait_max_s for w in shown if w.long_wait_max_s is not None]:
        rows += [
            ModeEvidence("longest wait of a long prompt", max(wait_times), "s", limits["wait_s"]),
            ModeEvidence("median wait", mean(w.wait_p50_s for w in shown), "s"),
            ModeEvidence("P95 wait of short prompts", mean(w.short_wait_p95_s for w in shown), "s"),
        ]
    return finding(mode, shown, rows)


def batch_inefficiency(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 10: a cap far below the knee while requests wait."""
    need((w.knee for window in series for w in window.decoders), "the batch at which ITL doubles")
    limits = mode.limits
    caps = {worker.worker: 0.0 for window in series for worker in window.workers}
    for window in series:
        for worker in window.workers:
            caps[worker.worker] = max(caps[worker.worker], worker.running)

    def shows(window: FleetObservation) -> bool:
        busy = [worker for worker in window.decoders if worker.knee is not None]
        return bool(busy) and window.waiting > limits["waiting"] and all(
            worker.running < limits["share"] * (worker.knee or 0.0)
            and worker.running >= limits["full"] * caps[worker.worker]
            and (worker.kv_usage or 0.0) < limits["kv_usage"]
            and (worker.prefill_s or 0.0) < 0.5 * window.seconds
            for worker in busy
        )  # fmt: skip

    shown = stretch(series, mode, shows)
    if not shown:
        return None
    workers = [worker for window in shown for worker in window.decoders]
    share = mean(w.running / w.knee for w in workers if w.knee)
    return finding(mode, shown, [
        ModeEvidence("running over the batch at which ITL doubles", share, "", limits["share"]),
        ModeEvidence("running on a worker", mean(w.running for w in workers), "requests"),
        ModeEvidence("requests that wait", mean(w.waiting for w in shown), "requests",
                 limits["waiting"]),
        ModeEvidence("KV usage", mean(w.kv_usage for w in workers), "", limits["kv_usage"]),
    ])  # fmt: skip


def stream_stall(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 13: an engine without steps, or a client that does not read."""
    need((value for window in series
          for value in (window.client_stalls, *(w.decode_stall_s for w in window.decoders))),
         "the longest step, and clients that do not read")  # fmt: skip
    limits = mode.limits
    typical = median(window.itl_p50_s for window in series)
    bar = max(limits["stall_s"], limits["times"] * typical)
    stalls = [(window, w) for window in series for w in window.decoders
              if typical and (w.decode_stall_s or 0.0) > bar]  # fmt: skip
    gaps = [window for window in series if typical and _engine_gaps(window, bar)]
    slow = [window for window in series if window.client_stalls]
    if not stalls and not slow and not gaps:
        return None
    evidence = [ModeEvidence("ITL P50", typical, "s")]
    if stalls:
        worst = max(stalls, key=lambda stall: stall[1].decode_stall_s or 0.0)[1]
        evidence.append(ModeEvidence("engine: longest step without a prompt",
                                 worst.decode_stall_s or 0.0, "s", bar, worst.worker))  # fmt: skip
    if gaps:
        gap_s = max(window.engine_stall_s or 0.0 for window in gaps)
        evidence.append(ModeEvidence("engine: gap without a token", gap_s, "s", bar))
    if slow:
        count = sum(window.client_stalls or 0 for window in slow)
        evidence.append(ModeEvidence("slow readers", float(count), "streams", 0.0))
    marked = {window.start_s for window in (*slow, *gaps, *(window for window, _ in stalls))}
    return finding(mode, [window for window in series if window.start_s in marked], evidence)


def _engine_gaps(window: FleetObservation, bar: float) -> bool:
    """True if streams had gaps that prefill does not explain."""
    gap_s = window.engine_stall_s or 0.0
    prefill_s = max((worker.prefill_s or 0.0 for worker in window.decoders), default=0.0)
    return window.engine_stalls > 0 and gap_s > max(bar, 2 * prefill_s)


def saturation(series: Series, mode: FailureMode) -> ModeFinding | None:
    """Mode 18: full batches, flat throughput, waiting requests."""
    need((w.knee for window in series for w in window.decoders), "the batch at which ITL doubles")
    limits = mode.limits

    def shows(window: FleetObservation) -> bool:
        busy = [worker for worker in window.decoders if worker.knee is not None]
        arrived = window.arrived - window.refused
        return (
            bool(busy)
            and all(w.running >= limits["knee"] * (w.knee or 0.0) for w in busy)
            and window.waiting > limits["waiting"] * window.running
            and arrived >= limits["rho"] * window.completed * 0.9
        )

    shown = stretch(series, mode, shows)
    if not shown:
        return None
    rates = [(window.total("output_tokens") or 0) / window.seconds for window in shown]
    typical = median(rates)
    off = float(np.median([abs(rate - typical) for rate in rates])) / typical if typical else 1.0
    if off > limits["flat"]:
        return None
    served = sum(window.completed for window in shown)
    rho = sum(window.arrived for window in shown) / max(served, 1)
    if rho < limits["rho"]:
        return None
    return finding(mode, shown, [
        ModeEvidence("arrived over served", rho, "", limits["rho"]),
        ModeEvidence("running", mean(w.running for w in shown), "requests"),
        ModeEvidence("requests that wait", mean(w.waiting for w in shown), "requests"),
        ModeEvidence("tokens a second", typical, "tokens/s"),
        ModeEvidence("their deviation", off, "", limits["flat"]),
    ])  # fmt: skip


#: Detector of each mode. Returns a finding or None, and raises `SignalMissing`.
DETECTORS: Mapping[int, Callable[[Series, FailureMode], ModeFinding | None]] = {
    1: out_of_memory, 2: kv_exhaustion, 3: fragmentation, 4: prefix_miss_storm,
    5: semantic_staleness, 6: queue_build_up, 7: prefill_spikes, 8: head_of_line, 9: starvation,
    10: batch_inefficiency, 11: noisy_neighbour, 12: retry_storm, 13: stream_stall, 14: tool_wait,
    15: adapter_pressure, 16: offload_collapse, 17: under_use, 18: saturation,
    19: back_pressure_failure,
}  # fmt: skip


def diagnose(series: Series) -> Diagnosis:
    """Return the diagnosis of at least one window."""
    findings: dict[int, ModeFinding] = {}
    not_judged: dict[str, str] = {}
    for number, detect in DETECTORS.items():
        try:
            finding = detect(series, MODES[number])
        except SignalMissing as missing:
            not_judged[MODES[number].name] = str(missing)
            continue
        if finding is not None:
            findings[number] = finding
    for number in findings:
        for other in MODES[number].follows:
            if other in findings and not findings[other].follows_from:
                findings[other] = msgspec.structs.replace(findings[other], follows_from=number)
    ordered = sorted(findings.values(), key=lambda one: (one.follows_from > 0, one.number))
    return Diagnosis(
        healthy=not findings, windows=len(series),
        seconds=sum(window.seconds for window in series), findings=tuple(ordered),
        not_judged=not_judged,
    )  # fmt: skip
