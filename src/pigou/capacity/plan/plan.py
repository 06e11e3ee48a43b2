"""Makes a plan: analyses all configurations, simulates the best, and prices scarce resources."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from pigou.capacity.frontier import dominated
from pigou.capacity.plan.analysis import Analysis, Configuration, LoadFigures
from pigou.capacity.plan.demand import Demand
from pigou.capacity.plan.search_space import NEAR, Candidate, candidates
from pigou.capacity.plan.tiers import TierUse, tier_use
from pigou.capacity.plan.trial import Trial, TrialFigures, run_trial, run_trials, trial_figures
from pigou.config import ConfigError
from pigou.models.architecture import Architecture
from pigou.objectives import Slo
from pigou.request import SECOND
from pigou.sim.network import LinkConfig
from pigou.sim.setup import Setup, TierConfig

#: Called with a stage, and the done of all simulations within it; 0 of 0 without any.
Watch = Callable[[str, int, int], None]
#: Configurations that the first, short simulations compare for each that is asked for.
_FIRST_ROUND = 2
#: Sizes of the pools of the same kinds of workers among them, where there are others.
_PER_KIND = 2
#: Multiples of the rate that fleets are then asked to hold, until one keeps the objective.
_MARGINS = (1.25, 1.6, 2.2, 3.2, 4.5)
#: Requests of the first and of the last simulations.
_SHORT_REQUESTS, LONG_REQUESTS = 200, 600
#: Load before and after the measured requests, in mean request lifetimes: short and long runs.
_SHORT_LIVES, _LONG_LIVES = (1.0, 0.5), (1.2, 1.0)
#: Longest request lifetime that a simulation waits for.
_LIFE_S = 60.0
#: Share by which a rate is lowered or raised between simulations of one configuration.
_STEP = 0.12
#: Simulations at most that look for the highest rate of a configuration.
_RATES = 3
#: Load of the first test, as a multiple of the plan's.
OVERLOAD = 1.3
#: Requests of a burst, in a row, and the percentile of their paces that is tried.
_BURST, _BURST_PERCENTILE = 100, 99.0


def shadow_prices(
    gpus: Mapping[str, int], analysis: Analysis, model: Architecture, kv_dtype: str,
    use: TierUse | None, pool: ProcessPoolExecutor | None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the output tokens a second that a little more of each scarce thing is worth."""
    demand = replace(analysis.demand, rate_rps=0.0)
    slo = analysis.slo
    same = analysis.changed(slo, demand)
    changes: dict[str, tuple[Analysis, Mapping[str, int]]] = {"": (same, gpus)}
    for name, count in gpus.items():
        changes[f"one_more_{name}"] = (same, {**gpus, name: count + 1})
    if slo.ttft_s < float("inf"):
        longer = msgspec.structs.replace(slo, ttft_s=slo.ttft_s + 0.02)
        changes["ttft_20_ms_longer"] = (analysis.changed(longer, demand), gpus)
    if slo.itl_s < float("inf"):
        longer = msgspec.structs.replace(slo, itl_s=slo.itl_s + 0.02)
        changes["itl_20_ms_longer"] = (analysis.changed(longer, demand), gpus)
    hotter = demand.with_hit_rate(min(demand.mix.hit_rate + 0.05, 0.99))
    changes["hit_rate_5_points_higher"] = (analysis.changed(slo, hotter), gpus)

    if use is not None:
        lost = use.hit_rate - use.half_hit_rate
        colder = demand.with_hit_rate(max(demand.mix.hit_rate - lost, 0.0))
        changes["half_the_tier_memory"] = (analysis.changed(slo, colder), gpus)

    limit_of = partial(_limit_tok_s, model, (kv_dtype,))
    limits = (map if pool is None else pool.map)(limit_of, *zip(*changes.values(), strict=True))
    tok_s = dict(zip(changes, limits, strict=True))
    base = tok_s.pop("")
    return {
        name: {"output_tok_s": value - base, "share": value / base - 1.0 if base else 0.0}
        for name, value in tok_s.items()
    }


def _limit_tok_s(
    model: Architecture, kv_dtypes: Sequence[str], analysis: Analysis, gpus: Mapping[str, int]
) -> float:
    """Return the most output tokens a second that GPUs hold inside the objective."""
    # bounds of pools: a replay's limit jumps with single requests
    limits = (c.limit_rps for c in candidates(analysis, model, gpus, kv_dtypes, enough=0))
    return max(limits, default=0.0) * analysis.demand.mix.osl


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made for."""

    model: str  # name of the model, as `pigou.models.read.architecture` reads it
    gpus: dict[str, int]  # how many there are of each kind
    slo: Slo
    usd_per_hour: dict[str, float] = {}  # price of a GPU of each kind; empty without prices
    kv_dtypes: tuple[str, ...] = ("", "fp8")  # dtypes of the KV cache to try; "": the model's own
    top: int = 5  # configurations to simulate at length
    seed: int = 0
    tiers: tuple[TierConfig, ...] = ()
    expert_load: str = ""  # loads of experts, as `pigou simulate --expert-load`


@dataclass(frozen=True)
class PlannedConfiguration:
    """A configuration of a plan."""

    configuration: Configuration
    analysed: LoadFigures  # by the analysis, at the simulated rate
    simulated: LoadFigures | None = None  # by the simulator; None where it was not simulated

    @property
    def figures(self) -> LoadFigures:
        """What is known best."""
        return self.simulated or self.analysed

    @property
    def error(self) -> dict[str, float] | None:
        """Relative error of the analysis against the simulation; None without one."""
        if self.simulated is None:
            return None
        return {
            name: getattr(self.analysed, name) / getattr(self.simulated, name) - 1.0
            for name in ("ttft_s", "itl_s", "e2e_s")
            if getattr(self.simulated, name)
        }


@dataclass(frozen=True)
class CapacityPlan:
    """A plan."""

    demand: Demand
    configurations: int
    best: PlannedConfiguration
    pareto: Sequence[PlannedConfiguration]  # in TTFT, ITL, throughput a GPU, cost
    dominated: Sequence[PlannedConfiguration]  # simulated ones that others dominate
    duals: Mapping[str, Mapping[str, float]]  # worth of a little more, by name
    seconds: float
    analytic_seconds: float
    meets: bool  # True if the best configuration keeps the objective in simulation
    tiers: TierUse | None = None  # tier use of the best configuration; None without tiers


def make_plan(
    request: PlanRequest, demand: Demand, model: Architecture,
    pool: ProcessPoolExecutor | None = None, watch: Watch = lambda *_: None,
) -> CapacityPlan:  # fmt: skip
    """Make a plan; `watch` is called with the stage, and its simulations done and in all."""
    began = time.perf_counter()
    analysis = _analysis(request, model, demand)
    watch("analysing configurations", 0, 0)
    seen = candidates(analysis, model, request.gpus, request.kv_dtypes)
    if not seen:
        raise ConfigError(
            f"model is {request.model!r}, which no worker made of {request.gpus} holds with "
            f"requests of {demand.max_tokens:,} tokens; give larger GPUs, or more"
        )
    ranked = ranked_candidates(analysis, seen, demand.rate_rps)
    if not ranked:
        raise ConfigError(_no_way(analysis, seen, demand.rate_rps))
    analytic_s = time.perf_counter() - began
    planned = _simulated(request, analysis, ranked, pool, watch)
    for margin in _MARGINS if demand.rate_rps else ():
        if _short(analysis, planned[0].figures) <= 0.0:
            break
        # The analysis promised too much: take what it says holds more.
        wider = analysis.changed(request.slo, replace(demand, rate_rps=margin * demand.rate_rps))
        more = candidates(wider, model, request.gpus, request.kv_dtypes)
        ranked = ranked_candidates(wider, more, wider.demand.rate_rps)
        if not ranked:
            break
        seen += more
        planned += _simulated(request, analysis, ranked, pool, watch)
        planned.sort(key=lambda item: _merit(analysis, item.figures))
    planned = planned[: max(request.top, 1)]
    watch("pricing GPUs, latencies and hits", 0, 0)
    front, dominated = _front(planned)
    best = planned[0]
    attained = best.figures.attained
    use: TierUse | None = None
    if request.tiers:
        kv_bytes = replace(model, kv_dtype=best.configuration.kv_dtype or model.kv_dtype).kv_bytes
        use = tier_use(best.configuration, analysis, kv_bytes, request.tiers)
    return CapacityPlan(
        demand=demand,
        configurations=len(seen),
        best=best,
        pareto=front,
        dominated=dominated,
        duals=shadow_prices(request.gpus, analysis, model, best.configuration.kv_dtype, use, pool),
        seconds=time.perf_counter() - began,
        analytic_seconds=analytic_s,
        meets=attained is not None and attained >= request.slo.share,
        tiers=use,
    )


def _analysis(request: PlanRequest, model: Architecture, demand: Demand) -> Analysis:
    # Ranks of wide expert parallelism have ports of their own.
    link = LinkConfig(per="gpu") if model.experts else LinkConfig()
    return Analysis(model, demand, request.slo, link, request.usd_per_hour, request.expert_load)


def ranked_candidates(
    analysis: Analysis, seen: Sequence[Candidate], rate_rps: float
) -> list[Candidate]:
    """Return candidates that may hold the workload, best first, one of each equivalent kind.

    With a rate: cheapest first, then by limit. Without: by limit, then by price.
    """
    unique: dict[tuple[object, ...], Candidate] = {}
    for candidate in sorted(seen, key=lambda c: -c.limit_rps):
        key = candidate.configuration.workers_key
        if candidate.limit_rps > 0.0 and candidate.limit_rps >= NEAR * rate_rps:
            unique.setdefault(key, candidate)

    def order(candidate: Candidate) -> tuple[float, float]:
        usd = analysis.usd_per_hour_of(candidate.configuration)
        if rate_rps:
            short = candidate.limit_rps < rate_rps  # the analysis says no
            return (usd * (1.0 + 0.2 * short), -candidate.limit_rps)
        return (-candidate.limit_rps, usd)

    return sorted(unique.values(), key=order)


def _no_way(analysis: Analysis, seen: Sequence[Candidate], rate_rps: float) -> str:
    best = max(seen, key=lambda candidate: candidate.limit_rps)
    if best.limit_rps > 0.0:
        return (
            f"workload: it has {rate_rps:.3g} requests/s, and the GPUs hold {best.limit_rps:.3g} "
            f"inside the objective ({best.configuration.name}); give more GPUs, or a longer --slo"
        )
    unloaded = min(
        (analysis.figures(candidate.configuration, 1e-9) for candidate in seen),
        key=lambda figures: (
            figures.ttft_s / analysis.slo.ttft_s + figures.itl_s / analysis.slo.itl_s
        ),
    )
    return (
        f"slo: no configuration keeps it even without load: the nearest takes "
        f"{unloaded.ttft_s:.3g} s to the first token, and {unloaded.itl_s:.3g} s between tokens; "
        "give a longer --slo"
    )


def _simulated(
    request: PlanRequest, analysis: Analysis, ranked: Sequence[Candidate],
    pool: ProcessPoolExecutor | None, watch: Watch,
) -> list[PlannedConfiguration]:  # fmt: skip
    """Simulate the best by successive halving; return the last ones, best first."""
    rate = analysis.demand.rate_rps
    entrants = [
        (candidate, rate or candidate.limit_rps)
        for candidate in _diverse(ranked, _FIRST_ROUND * request.top)
    ]
    report = partial(watch, f"simulating {len(entrants)} of {len(ranked)}")
    short = _round(request, analysis, entrants, _SHORT_REQUESTS, pool, report)
    short.sort(key=lambda item: _merit(analysis, item[1]))
    finalists = [(candidate, figures.rate_rps) for candidate, figures in short[: request.top]]
    report = partial(watch, f"simulating {len(finalists)} at length")
    final = _round(request, analysis, finalists, LONG_REQUESTS, pool, report)
    for _ in range(_RATES if not rate else 0):
        failing = [
            (candidate, figures.rate_rps * (1.0 - _STEP))
            for candidate, figures in final
            if (figures.attained or 0.0) < analysis.slo.share
        ]
        if not failing:
            break
        report = partial(watch, f"simulating {len(failing)} at a lower rate")
        again = dict(_round(request, analysis, failing, LONG_REQUESTS, pool, report))
        final = [(candidate, again.get(candidate, figures)) for candidate, figures in final]
    final.sort(key=lambda item: _merit(analysis, item[1]))
    return [
        PlannedConfiguration(
            candidate.configuration,
            analysis.figures(candidate.configuration, figures.rate_rps),
            figures,
        )
        for candidate, figures in final
    ]


def _diverse(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the best of both kinds of fleets: a third at least is of the kind that ranks lower."""
    joint: list[Candidate] = []
    split: list[Candidate] = []
    counts: Counter[tuple[object, ...]] = Counter()
    rest: list[Candidate] = []
    for candidate in ranked:
        made = candidate.configuration
        workers = (*made.tp.items(), *made.dp.values(), made.kv_dtype, *made.gpus)
        counts[workers] += 1
        if counts[workers] > _PER_KIND:
            rest.append(candidate)
        else:
            (joint if len(made.pools) == 1 else split).append(candidate)
    first, second = (joint, split) if ranked[0] in joint else (split, joint)
    third = second[: count // 3]
    return [*third, *[*first, *rest][: count - len(third)]]


def _round(
    request: PlanRequest, analysis: Analysis, entrants: Sequence[tuple[Candidate, float]],
    requests: int, pool: ProcessPoolExecutor | None, watch: Callable[[int, int], None],
) -> list[tuple[Candidate, LoadFigures]]:  # fmt: skip
    trials = [make_trial(request, analysis, *entrant, requests) for entrant in entrants]
    watch(0, len(trials))
    done = list[TrialFigures]()
    for figures in run_trials(trials, analysis.slo, pool):
        done.append(figures)
        watch(len(done), len(trials))
    return [
        (candidate, trial_figures(analysis, trial, seen))
        for (candidate, _), trial, seen in zip(entrants, trials, done, strict=True)
    ]


def make_trial(
    request: PlanRequest, analysis: Analysis, candidate: Candidate, rate_rps: float, requests: int
) -> Trial:
    """Return a simulation that measures `requests` requests between warm-up and tail."""
    life_s = min(analysis.figures(candidate.configuration, rate_rps).e2e_s, _LIFE_S)
    filling, tail = _SHORT_LIVES if requests <= _SHORT_REQUESTS else _LONG_LIVES
    count = requests + round(rate_rps * life_s * (filling + tail))
    return Trial(
        configuration=candidate.configuration,
        loop=analysis.demand.at(rate_rps, count),
        rate_rps=rate_rps,
        setup=Setup(
            model=request.model,
            kv_dtype=candidate.configuration.kv_dtype,
            tiers=request.tiers,
            expert_load=request.expert_load,
            eplb=bool(request.expert_load),
        ),
        link=analysis.link,
        seed=request.seed,
        warm_up_s=filling * life_s,
        tail_s=tail * life_s,
    )


def _merit(analysis: Analysis, figures: LoadFigures) -> tuple[float, float]:
    cost = figures.usd_per_million_output or 1.0 / max(figures.output_tok_s_per_gpu, 1e-9)
    return (_short(analysis, figures), cost)


def _short(analysis: Analysis, figures: LoadFigures) -> float:
    """Return the share of the requests that is missing from the objective."""
    return max(analysis.slo.share - (figures.attained or 0.0), 0.0)


def _front(
    planned: Sequence[PlannedConfiguration],
) -> tuple[list[PlannedConfiguration], list[PlannedConfiguration]]:
    """Split configurations into the Pareto front and the rest."""

    def loss(item: PlannedConfiguration) -> tuple[float, ...]:
        figures = item.figures
        return (
            figures.ttft_s, figures.itl_s, -figures.output_tok_s_per_gpu,
            figures.usd_per_million_output or 0.0,
        )  # fmt: skip

    beaten = dominated(np.array([loss(item) for item in planned])).tolist()
    pairs = list(zip(planned, beaten, strict=True))
    return [item for item, lost in pairs if not lost], [item for item, lost in pairs if lost]


@dataclass(frozen=True)
class StressResult:
    """What a fleet does under stress."""

    name: str
    rate_rps: float  # requests a second
    attained: float  # share of the offered requests inside the objective
    reason: str  # latency that exceeds the objective at its percentile; empty if none does

    @property
    def healthy(self) -> bool:
        """Whether nothing exceeds the objective."""
        return not self.reason


def stress(plan: CapacityPlan, request: PlanRequest, model: Architecture) -> list[StressResult]:
    """Simulate the best fleet at 1.3 times its load, and at the P99 pace of 100 requests."""
    rate_rps = plan.best.figures.rate_rps
    analysis = _analysis(request, model, plan.demand)
    rates = {
        "1.3 times the load": OVERLOAD * rate_rps,
        "burst P99": burst_rps(plan.demand, rate_rps),
    }
    return [_run(name, plan, request, analysis, rate) for name, rate in rates.items()]


def burst_rps(demand: Demand, rate_rps: float) -> float:
    """Return the pace that 99% of stretches of 100 requests keep, at a mean of `rate_rps`."""
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
