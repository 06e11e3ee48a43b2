"""HeteroScale: one signal drives both pools at a maintained ratio."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import msgspec

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.target_planner import supply
from pigou.performance.model import joint_share
from pigou.performance.speed import RequestMix
from pigou.request import SECOND
from pigou.windows.planner_window import PlannerWindow, PoolWindow
from pigou_lab.planner.history_planner import (
    HistoryPlanner,
    NonNegativeParams,
    known_mean,
    prefill_and_decode,
)


class HeteroScaleParams(NonNegativeParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `HeteroScale`; cooldowns follow a change."""

    # decode tokens a second of one decode worker; 0 for what it serves inside the objective by its
    # performance model.
    target: float = 0.0
    ratio: float = 0.0  # prefill workers of one decode worker; 0 for that of the fleet at first
    up_tolerance: float = 0.1
    down_tolerance: float = 0.1
    window_s: float = 60.0  # over which the signal is averaged
    up_cooldown_s: float = 0.0
    down_cooldown_s: float = 300.0


class HeteroScale(HistoryPlanner):
    """D = ceil(decode tokens a second / target), P = ceil(ratio D) (arXiv 2508.19559)."""

    name: ClassVar[str] = "heteroscale"
    Params: ClassVar[type[msgspec.Struct]] = HeteroScaleParams

    def __init__(self, setup: PlannerSetup, params: HeteroScaleParams) -> None:
        super().__init__(setup, params.window_s)
        self.params = params
        self._ratios: dict[str, float] = {}
        self._changed_ns: dict[str, int] = {}

    def _targets(self, window: PlannerWindow, now_ns: int) -> tuple[dict[str, int], list[str]]:
        targets: dict[str, int] = {}
        reasons: list[str] = []
        for model in window.models:
            prefill, decode = prefill_and_decode(window, model)
            if decode is None or supply(decode) == 0:
                continue
            rate = self._history.mean(partial(tokens_per_s, model=model))
            target = self._target_of(window, decode)
            if rate is None or not target:
                reasons.append(f"{decode.name}: no decode tokens a second, or no target for them")
                continue
            count = supply(decode)
            signal = rate / count / target
            wanted = count
            if signal > 1.0 + self.params.up_tolerance or signal < 1.0 - self.params.down_tolerance:
                wanted = max(math.ceil(rate / target - 1e-9), 0)
            cooldown = self.params.up_cooldown_s
            cooldown = cooldown if wanted > count else self.params.down_cooldown_s
            if wanted == count:
                continue
            if now_ns - self._changed_ns.get(model, -(2**62)) < cooldown * SECOND:
                continue
            self._changed_ns[model] = now_ns
            targets[decode.name] = wanted
            if prefill is not None:
                ratio = self._ratio_of(model, prefill, decode)
                targets[prefill.name] = max(math.ceil(ratio * wanted - 1e-9), 1)
        return targets, reasons

    def _ratio_of(self, model: str, prefill: PoolWindow, decode: PoolWindow) -> float:
        if self.params.ratio > 0:
            return self.params.ratio
        first = max(supply(prefill), 1) / max(supply(decode), 1)
        return self._ratios.setdefault(model, first)

    def _target_of(self, window: PlannerWindow, decode: PoolWindow) -> float | None:
        if self.params.target > 0:
            return self.params.target
        performance = self.setup.performance.get(decode.name)
        loads = [load for load in window.loads if load.model == decode.model]
        isl, osl = known_mean(x.isl for x in loads), known_mean(x.osl for x in loads)
        if performance is None or not isl or not osl:
            return None
        slo = self.setup.class_of("", decode.model).slo
        mix = RequestMix(isl, osl)
        return performance.limit_rps(decode.role, 1, mix, slo, joint_share(slo)) * osl


def tokens_per_s(window: PlannerWindow, model: str) -> float | None:
    """Return a model's generated tokens per second, or None."""
    counts = [load.output_tokens for load in window.loads if load.model == model]
    known = [count for count in counts if count is not None]
    return sum(known) / window.seconds if known else None
