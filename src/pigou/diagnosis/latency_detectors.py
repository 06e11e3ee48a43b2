"""Detectors of modes 6, 7, 8, 9, 10, 13 and 18: queues, batches, and gaps between tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pigou.diagnosis.mode import ModeEvidence, ModeFinding
from pigou.diagnosis.modes import MODES
from pigou.diagnosis.signals import (
    Series,
    SignalMissing,
    correlation,
    finding,
    mean,
    median,
    need,
    stretch,
)
from pigou.windows.observations import FleetObservation

#: Times the median of the windows' longest prompts that a long prompt has.
_LONG = 4.0


def queue_build_up(series: Series) -> ModeFinding | None:
    """Mode 6: the queue grows, window after window."""
    mode = MODES[6]
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


def prefill_spikes(series: Series) -> ModeFinding | None:
    """Mode 7: steps with prompts in them hold up the streams."""
    need((window.itl_p99_s for window in series), "times between tokens")
    need((w.prefill_s for window in series for w in window.decoders), "time of steps with prompts")
    mode = MODES[7]
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
    """Return the mean seconds of a step with a prompt at a worker that decodes."""
    steps = sum(worker.prefill_steps or 0 for worker in window.decoders)
    return sum(worker.prefill_s or 0.0 for worker in window.decoders) / steps if steps else None


def _prefill_share(window: FleetObservation) -> float:
    return mean(worker.prefill_s for worker in window.decoders) / window.seconds


def head_of_line(series: Series) -> ModeFinding | None:
    """Mode 8: short prompts wait where a long one is computed."""
    need((window.short_wait_p95_s for window in series), "waits by length of the prompt")
    mode = MODES[8]
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


def starvation(series: Series) -> ModeFinding | None:
    """Mode 9: long prompts wait far longer than others."""
    need((window.short_wait_p95_s for window in series), "waits by length of the prompt")
    mode = MODES[9]
    limits = mode.limits

    def shows(window: FleetObservation) -> bool:
        wait, typical = window.long_wait_max_s, window.wait_p50_s
        if wait is None or typical is None:
            return False
        others = 2 * (window.short_wait_p95_s or 0.0)
        return wait > max(limits["wait_s"], limits["times"] * typical, others)

    shown = stretch(series, mode, shows)
    if not shown:
        return None
    return finding(mode, shown, [
        ModeEvidence("longest wait of a long prompt", max(w.long_wait_max_s or 0.0 for w in shown),
                 "s", limits["wait_s"]),
        ModeEvidence("median wait", mean(w.wait_p50_s for w in shown), "s"),
        ModeEvidence("P95 wait of short prompts", mean(w.short_wait_p95_s for w in shown), "s"),
    ])  # fmt: skip


def batch_inefficiency(series: Series) -> ModeFinding | None:
    """Mode 10: a cap far below the knee, and requests that wait."""
    need((w.knee for window in series for w in window.decoders), "the batch at which ITL doubles")
    mode = MODES[10]
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


def stream_stall(series: Series) -> ModeFinding | None:
    """Mode 13: an engine that makes no step, or a client that does not read."""
    need((value for window in series
          for value in (window.client_stalls, *(w.decode_stall_s for w in window.decoders))),
         "the longest step, and clients that do not read")  # fmt: skip
    mode = MODES[13]
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
    """Whether streams had gaps that the computation of prompts does not explain."""
    gap_s = window.engine_stall_s or 0.0
    prefill_s = max((worker.prefill_s or 0.0 for worker in window.decoders), default=0.0)
    return window.engine_stalls > 0 and gap_s > max(bar, 2 * prefill_s)


def saturation(series: Series) -> ModeFinding | None:
    """Mode 18: full batches, flat throughput, requests that wait."""
    need((w.knee for window in series for w in window.decoders), "the batch at which ITL doubles")
    mode = MODES[18]
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
