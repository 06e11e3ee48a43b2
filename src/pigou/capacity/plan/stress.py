"""Stress tests of a plan: the same fleet under more load, and under the workload's worst burst."""

from __future__ import annotations

from dataclasses import dataclass

from pigou.capacity.plan.analysis import Analysis
from pigou.capacity.plan.demand import Demand, busiest
from pigou.capacity.plan.plan import LONG_REQUESTS, CapacityPlan, PlanRequest, make_trial
from pigou.capacity.plan.search_space import Candidate
from pigou.capacity.plan.trial import run_trial, trial_figures
from pigou.sim.architecture import Architecture
from pigou.sim.network import LinkConfig

#: Load of the first test, as a multiple of the plan's.
OVERLOAD = 1.3
#: Requests of a burst: the densest so many in a row.
_BURST = 100


@dataclass(frozen=True)
class StressResult:
    """What a fleet does under stress.

    Attributes:
        name: of the test.
        rate_rps: requests a second.
        attained: share of the offered requests inside the objective.
        reason: what exceeds the objective at its percentile; empty where nothing does.
    """

    name: str
    rate_rps: float
    attained: float
    reason: str

    @property
    def healthy(self) -> bool:
        """Whether nothing exceeds the objective."""
        return not self.reason


def stress(plan: CapacityPlan, request: PlanRequest, model: Architecture) -> list[StressResult]:
    """Simulate the recommended fleet under 1.3 times its load, and in the densest burst.

    The burst goes on at the pace of the densest 100 requests in a row.

    Args:
        plan: as it was made.
        request: what it was made for.
        model: its architecture.
    """
    rate_rps = plan.best.figures.rate_rps
    analysis = Analysis(model, plan.demand, request.slo, LinkConfig(), request.usd_per_hour)
    rates = {
        "1.3 times the load": OVERLOAD * rate_rps,
        "densest burst": burst_rps(plan.demand, rate_rps),
    }
    return [_run(name, plan, request, analysis, rate) for name, rate in rates.items()]


def burst_rps(demand: Demand, rate_rps: float) -> float:
    """Return the requests a second of the densest 100 requests in a row."""
    sessions = busiest(demand.loop, _BURST).sessions
    span_ns = sessions[-1].start_ns - sessions[0].start_ns
    requests = sum(len(session.requests) for session in sessions)
    own = demand.rate_rps or 1.0
    return max(rate_rps, requests * 1e9 / max(span_ns, 1) / own * rate_rps)


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
