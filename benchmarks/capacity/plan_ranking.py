"""How well the analysis of `pigou plan` ranks configurations, against simulation of all of them.

    python -m benchmarks.capacity.plan_ranking [--configurations 60] [--jobs 2] [--only NAME]

For each workload, configurations are taken evenly from the ranking of the analysis. Each is
simulated with 300 requests at the analysed limit, then at rates 15% and more away until one is
inside and one is not, and between them until the limit is known within 6%. Printed: Kendall's tau
between the limits of analysis and simulation, in requests a second for each GPU, and the relative
errors of TTFT (at the percentile), ITL (likewise) and mean E2E at the analysed limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from pigou.capacity.plan.analysis import Analysis
from pigou.capacity.plan.demand import read_demand
from pigou.capacity.plan.plan import PlanRequest, make_trial, ranked_candidates
from pigou.capacity.plan.search_space import Candidate, candidates
from pigou.capacity.plan.trial import run_trial, trial_figures
from pigou.models.read import architecture
from pigou.objectives import Slo
from pigou.sim.network import LinkConfig

#: Name -> workload, model, GPUs, objective. The first three chose the constants of the analysis.
WORKLOADS = {
    "long": ("mix=1:4000/500,prefix=500", "Qwen3-32B-FP8", {"H200": 16}, "ttft=0.3,itl=0.01"),
    "documents": (
        "mix=0.6:3000/80,0.4:10000/150", "Qwen3-32B-FP8", {"H200": 8, "H100": 4},
        "ttft=1.5,itl=0.03",
    ),
    "agents": (
        "mix=0.5:1500/100,0.35:6000/200,0.15:12000/60,prefix=1000", "llama-3.1-8b", {"H100": 8},
        "ttft=0.5,itl=0.02",
    ),
    "mixed": (
        "mix=0.7:512/128,0.2:4096/256,0.1:16384/512", "llama-3.1-70b-fp8", {"H200": 8, "H100": 8},
        "ttft=1,itl=0.04",
    ),
    "chat": ("mix=0.5:300/200,0.5:1200/300", "llama-3.1-8b", {"H100": 6}, "ttft=0.2,itl=0.015"),
}  # fmt: skip
#: Simulations of a configuration at most, requests of one, and precision of its limit.
_STEPS, _REQUESTS, _PRECISION = 9, 300, 0.06
#: First step from the analysed limit, what it grows by, and the longest one.
_FACTOR, _LONGEST = 1.15, 1.6


def simulated_limit(
    request: PlanRequest, analysis: Analysis, candidate: Candidate
) -> tuple[float, dict[str, float]]:
    """Return the highest rate inside the objective, and the errors at the analysed limit."""
    slo = analysis.slo

    def run(rate_rps: float) -> tuple[bool, dict[str, float]]:
        trial = make_trial(request, analysis, candidate, rate_rps, _REQUESTS)
        seen = trial_figures(analysis, trial, run_trial(trial, slo))
        expected = analysis.figures(candidate.configuration, rate_rps)
        errors = {
            name: getattr(expected, name) / max(getattr(seen, name), 1e-9) - 1.0
            for name in ("ttft_s", "itl_s", "e2e_s")
        }
        return (seen.attained or 0.0) >= slo.share, errors

    rate = candidate.limit_rps
    inside, errors = run(rate)
    low, high = (rate, 0.0) if inside else (0.0, rate)
    factor = _FACTOR
    for _ in range(_STEPS):
        if low and high and high / low < 1.0 + _PRECISION:
            break
        rate = (low * high) ** 0.5 if low and high else (low * factor or high / factor)
        factor = min(factor * _FACTOR, _LONGEST)
        inside, _ = run(rate)
        low, high = (rate, high) if inside else (low, rate)
    return low, errors


def main() -> None:
    """Print the table."""
    from scipy.stats import kendalltau

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--configurations", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true", help="print each configuration, too")
    args = parser.parse_args()
    for name, (workload, model, gpus, objective) in WORKLOADS.items():
        if args.only not in name:
            continue
        request = PlanRequest(model=model, gpus=gpus, slo=Slo.parse(objective), seed=11)
        demand = read_demand(workload, 11)
        shape = architecture(model)
        analysis = Analysis(shape, demand, request.slo, LinkConfig(), {})
        ranked = ranked_candidates(
            analysis, candidates(analysis, shape, gpus, request.kv_dtypes, enough=sys.maxsize), 0.0
        )
        count = min(args.configurations, len(ranked))
        chosen = [ranked[i * (len(ranked) - 1) // max(count - 1, 1)] for i in range(count)]
        began = time.perf_counter()
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
            futures = [pool.submit(simulated_limit, request, analysis, c) for c in chosen]
            results = [future.result() for future in futures]
        gpus_of = [candidate.configuration.total_gpus for candidate in chosen]
        analysed = [c.limit_rps / n for c, n in zip(chosen, gpus_of, strict=True)]
        simulated = [limit / n for (limit, _), n in zip(results, gpus_of, strict=True)]
        tau = kendalltau(analysed, simulated).statistic
        print(f"{name}: {count} of {len(ranked)} configurations, tau {tau:.3f}, "
              f"{time.perf_counter() - began:.0f} s")  # fmt: skip
        for figure in ("ttft_s", "itl_s", "e2e_s"):
            column = [errors[figure] for _, errors in results]
            size = statistics.median(abs(error) for error in column)
            print(f"  {figure}: median |error| {size:.1%}, median {statistics.median(column):+.1%}")
        for candidate, (limit, errors) in zip(chosen, results, strict=True) if args.list else ():
            made = candidate.configuration
            print(f"  {made.name} tp {made.tp} batch {made.batch} {made.kv_dtype} {made.gpus}: "
                  f"{candidate.limit_rps:.2f} analysed, {limit:.2f} simulated, "
                  f"TTFT {errors['ttft_s']:+.0%}, ITL {errors['itl_s']:+.0%}")  # fmt: skip
        ratios = [
            limit / candidate.limit_rps
            for (limit, _), candidate in zip(results, chosen, strict=True)
        ]
        print(f"  simulated limit / analysed: median {statistics.median(ratios):.2f}, "
              f"{min(ratios):.2f} to {max(ratios):.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
