"""Stress tests of a plan: the same fleet under more load, and under the workload's worst burst."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pigou.capacity.plan.analysis import Analysis
from pigou.capacity.plan.demand import Demand
from pigou.capacity.plan.plan import LONG_REQUESTS, CapacityPlan, PlanRequest, make_trial
from pigou.capacity.plan.search_space import Candidate
from pigou.capacity.plan.trial import run_trial, trial_figures
from pigou.models.architecture import Architecture
from pigou.request import SECOND
from pigou.sim.network import LinkConfig

#: Load of the first test, as a multiple of the plan's.
OVERLOAD = 1.3
#: Requests of a burst, in a row, and the percentile of their paces that is tried.
_BURST, _BURST_PERCENTILE = 100, 99.0


@dataclass(frozen=True)
class StressResult:
    """What a fleet does under stress."""

    name: str
    rate_rps: float  # requests a second
    attained: float  # share of the offered requests inside the objective
    reason: str  # what exceeds the objective at its percentile; empty where nothing does

    @property
    def healthy(self) -> bool:
        """Whether nothing exceeds the objective."""
        return not self.reason


def stress(plan: CapacityPlan, request: PlanRequest, model: Architecture) -> list[StressResult]:
    """Simulate the recommended fleet under 1.3 times its load, and in a burst.

    The burst goes on at a pace that 99% of all 100 requests in a row do not exceed.
    """
    rate_rps = plan.best.figures.rate_rps
    analysis = Analysis(model, plan.demand, request.slo, LinkConfig(), request.usd_per_hour)
    rates = {
        "1.3 times the load": OVERLOAD * rate_rps,
        "burst P99": burst_rps(plan.demand, rate_rps),
    }
    return [_run(name, plan, request, analysis, rate) for name, rate in rates.items()]


def burst_rps(demand: Demand, rate_rps: float) -> float:
    """Return the requests a second that 99% of the stretches of 100 requests do not exceed.

    Args:
        rate_rps: to which it is stretched; at least so many are returned.
    """
    sessions = demand.loop.sessions
    per_session = demand.loop.request_count / len(sessions)
    width = min(math.ceil(_BURST / per_session), len(sessions) - 1)
    if width < 1:
        return rate_rps
    starts = np.sort([session.start_ns for session in sessions])
    spans_s = np.maximum(starts[width:] - starts[:-width], 1) / SECOND
    own = demand.rate_rps or 1.0
    pace = float(np.percentile(width * per_session / spans_s, _BURST_PERCENTILE))
    return max(rate_rps, pace / own * rate_rps)


def _run(
    name: str, plan: CapacityPlan, request: PlanRequest, analysis: Analysis, rate_rps: float
) -> StressResult:
    candidate = Candidate(plan.best.configuration, rate_rps)
    trial = make_trial(request, analysis, candidate, rate_rps, LONG_REQUESTS)
    seen = run_trial(trial, request.slo)
    figures = trial_figures(analysis, trial, seen)
    slo, reasons = request.slo, []
    for what, value, limit in (
        ("TTFT", figures.ttft_s, slo.ttft_s), ("ITL", figures.itl_s, slo.itl_s),
    ):  # fmt: skip
        if value > limit:
            reasons.append(f"{what} p{slo.percentile:g} is {value:.3g} s for {limit:g}")
    attained = seen.attained
    if not reasons and attained < slo.share:
        reasons.append(f"{attained:.1%} of the requests are inside both for {slo.share:.1%}")
    return StressResult(name, rate_rps, attained, "; ".join(reasons))
