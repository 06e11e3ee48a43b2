"""The experiments by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pigou_lab.experiments import (
    adaptive,
    anarchy_alerts,
    costs,
    counterfactual,
    equilibria,
    gateways,
    learners,
    mechanisms,
    oscillation,
    paper,
    pareto,
    prices,
    racks,
    regimes,
    table4,
    tenants,
    three_games,
    tiers,
)
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.results import Row

#: From fleet, reading, seeds and levels to rows.
Run: TypeAlias = Callable[[PaperFleet, Reading, Sequence[int], Sequence[int]], Iterator[Row]]
#: Summary of rows.
Summary: TypeAlias = Callable[[Sequence[Row], PaperFleet, Reading], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment."""

    about: str
    rows: Run  # makes its rows
    summary: Summary
    runs: int  # default number of seeds
    levels: Sequence[int]  # default levels of concurrency
    columns: Sequence[str] = ()  # further columns to show
    fixed: bool = False  # whether its levels cannot be chosen, only given in that number
    reads: bool = True  # whether the reading matters to it


#: In the order of `all`.
EXPERIMENTS: Mapping[str, Experiment] = {
    "table4": Experiment(
        "Experiment 1: fourteen levels", table4.table4, lambda rows, *_: table4.errors(rows),
        5, paper.LEVELS, ("regime", "wait_p99_s", "inflight"),
    ),
    "regimes": Experiment(
        "Experiment 2: the detector at nine levels", regimes.regimes,
        lambda rows, fleet, _: regimes.slopes(rows, fleet),
        1, paper.REGIME_LEVELS, ("regime_client", "regime_server", "slope_s", "unsent"),
    ),
    "adaptive": Experiment(
        "Experiment 3: the spike, static and adaptive", adaptive.adaptive,
        lambda rows, *_: adaptive.static_ratios(rows),
        10, (32, 128), ("strategy", "phase", "inflight", "switch_s", *regimes.AFTER), fixed=True,
    ),
    "pareto-below": Experiment(
        "Experiment 4a: the grid below saturation", pareto.grid,
        lambda rows, fleet, _: pareto.cells(rows, fleet),
        2, (64,), ("temperature", "overlap_weight"), fixed=True,
    ),
    "pareto-at": Experiment(
        "Experiment 4b: the grid at saturation", pareto.grid,
        lambda rows, fleet, _: pareto.cells(rows, fleet),
        3, (128,), ("temperature", "overlap_weight"), fixed=True,
    ),
    "knee": Experiment(
        "96 to 128 users in steps of four", regimes.knee, regimes.knee_of,
        3, regimes.KNEE_LEVELS, ("slope_s",),
    ),
    "saturated": Experiment(
        "the Saturated row of Table 2, held for long", regimes.saturated,
        lambda rows, *_: regimes.held_ratios(rows), 1, (256, 512),
        ("strategy", "saturated_from_s", *regimes.AFTER),
    ),
    "overlap-weights": Experiment(
        "overlap weights above 1", pareto.weights, lambda rows, *_: pareto.effects(rows),
        2, (64, 128), ("templates", "overlap_weight", "busiest"),
    ),
    "counterfactual": Experiment(
        "routers without state", counterfactual.counterfactual,
        lambda rows, fleet, _: counterfactual.summary(rows, fleet),
        2, (64, 128), ("policy", "e2e_mean_s"),
    ),
    "mechanisms": Experiment(
        "which mechanism explains Table 4", mechanisms.mechanisms,
        lambda rows, *_: mechanisms.ranking(rows),
        1, (96, 128, 192, 256, 384, 512), ("mechanism",), reads=False,
    ),
    "toll": Experiment(
        "prices against thresholds, where prefill is the bottleneck", prices.prices,
        lambda rows, *_: prices.verdict(rows),
        5, prices.LEVELS, ("contender", "tpot_p99_s", "e2e_mean_s", "local"), reads=False,
    ),
    "planner": Experiment(
        "the split of the GPUs: equilibria, optimum, and where the planner rests",
        equilibria.equilibria, lambda rows, *_: equilibria.verdict(rows),
        1, equilibria.LEVELS,
        ("equilibria", "optimum", "rest", "anarchy", "rest_welfare", "attained"), reads=False,
    ),
    "oscillation": Experiment(
        "the oscillation of section 5.2 by seconds of lag, by thresholds and by prices",
        oscillation.oscillation, lambda rows, *_: oscillation.verdict(rows),
        1, oscillation.LAGS,
        ("contender", "late_reversals", "moves", "attained", "gpu_hours", "splits"), reads=False,
    ),
    "three-games": Experiment(
        "planner, router and cache: each coupling switched off in turn",
        three_games.three_games, lambda rows, *_: three_games.verdict(rows),
        5, three_games.LEVELS,
        ("arm", "attained", "gpu_hours", "ttft_mean_s", "e2e_mean_s", "hits", "moves"),
        reads=False,
    ),
    "alerts": Experiment(
        "fault trials by mode: leads of alerts, the Price of Anarchy among them",
        anarchy_alerts.alerts, lambda rows, *_: anarchy_alerts.leads(rows), 3,
        anarchy_alerts.MODES,
        ("fault", "broken", "anarchy_lead_s", "queue_lead_s", "late_lead_s", "anarchy_false"),
        reads=False,
    ),
    "gateways": Experiment(
        "several gateways: anarchy and unfairness by their number and seconds of lag",
        gateways.gateways, lambda rows, *_: gateways.verdict(rows), 3, gateways.LAGS_MS,
        ("lag_s", "anarchy", "ttft_ratio", "poa", "unfairness"), reads=False,
    ),
    "learners": Experiment(
        "tenants that learn where to send, by capacity factor in per cent, with tolls and without",
        learners.learners, lambda rows, *_: learners.verdict(rows), 3, learners.LEVELS,
        ("contender", "stable", "growth", "backlog", "e2e_mean_s"), reads=False,
    ),
    "costs": Experiment(
        "claims about costs: 1 utilisation and split, 2 throughput of a split, 3 20 ms of SLO",
        costs.costs, lambda rows, *_: costs.verdict(rows), 1, costs.LEVELS,
        ("contender", "itl_slo_s", "goodput_rps", "usd_per_million", "goodput_ratio",
         "price_ratio"), reads=False,
    ),
    "racks": Experiment(
        "claims about racks: wide expert parallelism over co-located nodes (6x) and Hopper (30x)",
        racks.racks, lambda rows, *_: racks.verdict(rows), 1, racks.LEVELS,
        ("contender", "made", "analysed", "tok_s_gpu", "inside"), reads=False,
    ),
    "tiers": Experiment(
        "prefix hits by tier, G1 to G4, by load", tiers.tiers, lambda rows, *_: tiers.verdict(rows),
        3, tiers.LEVELS, ("hits", *(f"{tier}_share" for tier in tiers.TIERS)), reads=False,
    ),
    "tenants": Experiment(
        "attacks of tenants under each admission order, by the best lie that a search found",
        tenants.tenants, lambda rows, *_: tenants.verdict(rows), 3, tenants.LEVELS,
        ("level_name", "order", "lie", "victim_ttft_p99_s", "victim_ratio", "goodput_ratio",
         "gain", "latency_gain", "cost", "attempts", "throughput_ratio", "accuracy",
         "workers"), reads=False,
    ),
}  # fmt: skip
