"""Third game: equilibria and optimum of the prefill/decode split, beside the planner's.

With P and D workers of at most G, payoffs in weighted seconds of delay a second are
    U_P = late_s lambda a_P(P) - price P,    U_D = late_s lambda' a_D(D) - price D,
a the share of requests inside the pool's objective, lambda' = min(lambda, prefill throughput). A
split is an equilibrium where neither pool gains by another number. The optimum maximises late_s
lambda a_P a_D - price (P + D) over all splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pigou.control.planner.price.terms import PricePlannerParams
from pigou.objectives import Slo
from pigou.performance.model import PerformanceModel
from pigou.request import Role
from pigou.sim.arrival_rate import RateSchedule
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.planned_fleet import MIX, PlannedRun, mean_row, planned_figures, supply
from pigou_lab.experiments.results import Row

#: Per cent of the load that three prefill workers compute; workers in all; seconds of a run.
LEVELS, WORKERS, SECONDS = (30, 60, 90, 120), 6, 1200.0
_START = (1, 1)
Split = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SplitGame:
    """The game of two pools at a constant load; `late_s` and `price` as in `PricePlannerParams`."""

    models: Mapping[Role, PerformanceModel]
    slo: Slo
    rps: float  # requests a second
    workers: int
    late_s: float
    price: float

    @property
    def splits(self) -> list[Split]:
        """All splits, of at least one worker each."""
        top = self.workers
        return [(p, d) for p in range(1, top) for d in range(1, top - p + 1)]

    def shares(self, split: Split) -> tuple[float, float]:
        """Return the shares inside the parts of prefill and of decode."""
        prefill, decode = split
        model = self.models[Role.PREFILL]
        passed = min(self.rps, prefill / model.service_s(MIX))
        return (
            model.inside_share(Role.PREFILL, self.rps, prefill, MIX, self.slo),
            self.models[Role.DECODE].inside_share(Role.DECODE, passed, decode, MIX, self.slo),
        )

    def payoffs(self, split: Split) -> tuple[float, float]:
        """Return U_P and U_D."""
        of_prefill, of_decode = self.shares(split)
        passed = min(self.rps, split[0] / self.models[Role.PREFILL].service_s(MIX))
        return (
            self.late_s * self.rps * of_prefill - self.price * split[0],
            self.late_s * passed * of_decode - self.price * split[1],
        )

    def welfare(self, split: Split) -> float:
        """Return the value of both less the price of the workers."""
        of_prefill, of_decode = self.shares(split)
        return self.late_s * self.rps * of_prefill * of_decode - self.price * sum(split)

    def equilibria(self) -> list[Split]:
        """Return the splits without a profitable unilateral change."""
        payoffs = {split: self.payoffs(split) for split in self.splits}
        return [
            (p, d)
            for p, d in self.splits
            if payoffs[p, d][0] >= max(payoffs[s][0] for s in self.splits if s[1] == d) - 1e-9
            and payoffs[p, d][1] >= max(payoffs[s][1] for s in self.splits if s[0] == p) - 1e-9
        ]

    def optimum(self) -> Split:
        """Return the split of largest welfare; ties go to fewest workers."""
        return max(self.splits, key=lambda split: (self.welfare(split), -sum(split)))


def equilibria(
    fleet: PaperFleet, _: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each load, in per cent of what three prefill workers compute."""
    for level in levels:
        made = planned_run(fleet, level)
        game = split_game(made)
        resting = game.equilibria()
        optimum = game.optimum()
        runs, rests = [], []
        for seed in seeds:
            figures = planned_figures(made.simulation(seed))
            rests.append(supply(figures["replicas"][-1]))
            runs.append(figures)
        worst = min((game.welfare(split) for split in resting), default=None)
        best = game.welfare(optimum)
        yield mean_row(
            "planner", level, runs, equilibria=" ".join(map(_text, resting)),
            optimum=_text(optimum), rest=" ".join(dict.fromkeys(map(_text, rests))),
            anarchy=None if worst is None or worst <= 0 else best / worst,
            rest_welfare=min(map(game.welfare, rests)) / best if best > 0 else None,
        )  # fmt: skip


def planned_run(fleet: PaperFleet, level: int) -> PlannedRun:
    """Return the run of a load."""
    made = PlannedRun(fleet, "price", RateSchedule.of(1.0), SECONDS, _START, WORKERS)
    rate = level / 100 * (WORKERS // 2) / made.prompt_s
    return replace(made, schedule=RateSchedule.of(rate))


def split_game(made: PlannedRun) -> SplitGame:
    """Return the game of a run's fleet, with the planner's own weights."""
    own = PricePlannerParams()
    slo, rps = Slo.parse(made.slo), made.schedule.rates[0]
    return SplitGame(made.performance(), slo, rps, made.max_workers, own.late_s, own.gpu_price)


def _text(split: Split) -> str:
    return f"{split[0]}+{split[1]}"


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return the worst Price of Anarchy and the planner's worst welfare over the optimum's."""
    known = [row["anarchy"] for row in rows if row["anarchy"] is not None]
    rests = [row["rest_welfare"] for row in rows if row["rest_welfare"] is not None]
    return {
        "worst_price_of_anarchy": max(known, default=None),
        "worst_rest_welfare": min(rests, default=None),
    }
