"""Diagnoses a series of windows: every detector, and what follows from what."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pigou.diagnosis import latency_detectors as latency
from pigou.diagnosis import memory_detectors as memory
from pigou.diagnosis import traffic_detectors as traffic
from pigou.diagnosis.mode import Diagnosis, ModeFinding
from pigou.diagnosis.modes import MODES
from pigou.diagnosis.signals import Series, SignalMissing

#: Detector of each mode, by number. It returns a finding or None, and raises `SignalMissing`.
DETECTORS: Mapping[int, Callable[[Series], ModeFinding | None]] = {
    1: memory.out_of_memory, 2: memory.kv_exhaustion, 3: memory.fragmentation,
    4: traffic.prefix_miss_storm, 5: traffic.semantic_staleness, 6: latency.queue_build_up,
    7: latency.prefill_spikes, 8: latency.head_of_line, 9: latency.starvation,
    10: latency.batch_inefficiency, 11: traffic.noisy_neighbour, 12: traffic.retry_storm,
    13: latency.stream_stall, 14: memory.tool_wait, 15: memory.adapter_pressure,
    16: memory.offload_collapse, 17: traffic.under_use, 18: latency.saturation,
    19: traffic.back_pressure_failure,
}  # fmt: skip


def diagnose(series: Series) -> Diagnosis:
    """Return what a series of windows, at least one, shows."""
    findings: dict[int, ModeFinding] = {}
    not_judged: dict[str, str] = {}
    for number, detect in DETECTORS.items():
        try:
            finding = detect(series)
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
