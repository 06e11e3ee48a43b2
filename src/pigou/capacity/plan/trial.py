"""Trials of configurations by the simulator, which runs the code that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from pigou.capacity.plan.analysis import (
    Analysis,
    Configuration,
    LoadFigures,
    PlannedPool,
    WorkerKind,
)
from pigou.objectives import Slo
from pigou.request import SECOND, Role
from pigou.sim.client import ClientConfig
from pigou.sim.network import LinkConfig
from pigou.sim.result import SimulationResult
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec


@dataclass(frozen=True)
class Trial:
    """One simulation to run."""

    configuration: Configuration
    loop: OpenLoop
    rate_rps: float
    setup: Setup
    link: LinkConfig
    seed: int
    warm_up_s: float = 0.0  # not measured: the fleet fills
    tail_s: float = 0.0  # seconds at the end whose requests are not measured: it empties


@dataclass(frozen=True)
class TrialFigures:
    """What a simulation saw."""

    ttft_s: np.ndarray  # seconds to the first token of each served request
    itl_s: np.ndarray  # mean seconds between tokens of each that had several
    e2e_s: float  # mean seconds of a request
    attained: float  # share of the offered requests inside the objective


def warm_up() -> None:
    """Simulate a few requests, so that kernels are compiled and modules loaded."""
    kind = WorkerKind(gpu="H200", tp=1, kv_dtype="", max_seqs=8, chunk=512)
    pools = tuple(
        PlannedPool(role=role, kind=kind, workers=1) for role in (Role.PREFILL, Role.DECODE)
    )
    trial = Trial(
        configuration=Configuration(pools=pools),
        loop=OpenLoop(tuple(RequestSession(i * 1000, (RequestSpec(64, 8),)) for i in range(20))),
        rate_rps=1.0,
        setup=Setup(model="llama-3.1-8b", blocks=1000),
        link=LinkConfig(),
        seed=0,
    )
    run_trial(trial, Slo(ttft_s=1.0, itl_s=1.0))
    gc.freeze()  # the collector need not scan the imports after each trial


def run_trials(
    trials: Sequence[Trial], slo: Slo, pool: ProcessPoolExecutor | None
) -> Iterator[TrialFigures]:
    """Run simulations, in the processes of a pool where there is one; yield all, in order."""
    return iter((map if pool is None else pool.map)(run_trial, trials, [slo] * len(trials)))


def run_trial(trial: Trial, slo: Slo) -> TrialFigures:
    """Simulate a configuration under an objective."""
    simulation = Simulation(
        trial.loop, trial.configuration.fleet(trial.link), trial.setup,
        unlimited(seed=trial.seed), ClientConfig(), seed=trial.seed, assess_every=1e6,
    )  # fmt: skip
    figures = _figures(simulation.run(), slo, trial)
    del simulation
    gc.collect()  # a fleet is a cycle, and its tables are large
    return figures


def _figures(result: SimulationResult, slo: Slo, trial: Trial) -> TrialFigures:
    intended_all = np.array([run.intended_ns for run in result.runs], dtype=np.int64)
    begin = result.begin_ns + trial.warm_up_s * SECOND
    end = max(intended_all.max() - trial.tail_s * SECOND, begin + 1)
    intended, first, last, tokens = result.column(
        "intended_ns", "first_token_ns", "last_token_ns", "output_tokens"
    )
    chosen = (intended >= begin) & (intended <= end)
    intended, first, last, tokens = (column[chosen] for column in (intended, first, last, tokens))
    ttft = (first - intended) / SECOND
    itl = (last - first) / SECOND / np.maximum(tokens - 1, 1)
    inside = (ttft <= slo.ttft_s) & ((itl <= slo.itl_s) | (tokens <= 1))
    e2e = (last - intended) / SECOND
    count = int(((intended_all >= begin) & (intended_all <= end)).sum())
    return TrialFigures(
        ttft, itl[tokens > 1], float(e2e.mean()) if len(e2e) else float("inf"),
        float(inside.sum()) / max(count, 1),
    )  # fmt: skip


def trial_figures(analysis: Analysis, trial: Trial, seen: TrialFigures) -> LoadFigures:
    """Return the figures of a simulated configuration, latencies at the objective's percentile."""
    percentile = analysis.slo.percentile
    ttft, itl = (
        float(np.percentile(values, percentile)) if len(values) else 0.0
        for values in (seen.ttft_s, seen.itl_s)
    )
    return analysis.priced(
        trial.configuration, trial.rate_rps, (ttft, itl, seen.e2e_s), seen.attained
    )
