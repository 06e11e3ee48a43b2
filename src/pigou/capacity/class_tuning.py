"""Settings of a fleet by workload class: chunk, streams of each class, lane of long prompts.

Successive halving on the whole mix, as `pigou.capacity.frontier`; figures are told again for
requests that chose nothing: other seeds, or the second half of a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec

from pigou.capacity.frontier import (
    HALVINGS,
    SHARES,
    TIE,
    PointFigures,
    SimulatedSearch,
    Watch,
    Workload,
    excess,
    hypercube,
    mean_figures,
    measured,
    shortened,
    staged,
)
from pigou.config import ConfigError, LaneConfig
from pigou.control.planner.config import RequestClassConfig
from pigou.objectives import Slo
from pigou.sim.fleet_config import ScalingConfig
from pigou.sim.request_run import RequestRun
from pigou.sim.result import class_name
from pigou.sim.simulation import Simulation
from pigou.sim.workload import OpenLoop, RequestSession

#: Values that are tried of the lane, `tokens` as shares of the chunk (0 for one queue).
LANE_SHARES = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
LANE = {"halved_at": (0, 16_384, 32_768), "yields": (0, 3), "seqs": (1, 2), "kv_share": (0.3, 0.5)}


class ClassSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate."""

    chunk: int  # most tokens of a step
    concurrency: tuple[int, ...]  # most streams for each worker, by class; 0 for no limit
    long_lane: str = ""  # as `LaneConfig.parse` reads it; "" for one queue


class EvaluatedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate and its figures by class."""

    settings: ClassSettings
    figures: tuple[PointFigures, ...]


class ClassTuning(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search; figures in the order of the classes."""

    configured: EvaluatedSettings  # as started
    chosen: EvaluatedSettings  # for the worst-off class
    best: tuple[EvaluatedSettings, ...]  # for each class, whatever the others get
    #: Configured and chosen, on other requests.
    reported: tuple[EvaluatedSettings, EvaluatedSettings]
    reason: str


class SettingsTrial(NamedTuple):
    """One simulation."""

    settings: ClassSettings
    requests: int
    workload: int  # index


Figures: TypeAlias = tuple[PointFigures, ...]
Run: TypeAlias = Callable[[str, Sequence[SettingsTrial]], list[Figures]]


@dataclass(frozen=True, kw_only=True)
class ClassSearch(SimulatedSearch):
    """Search for settings by class: half of the workloads choose, and the others report."""

    classes: tuple[RequestClassConfig, ...]

    @property
    def slos(self) -> list[Slo]:
        """Objectives by class."""
        return [one.workload_class.slo for one in self.classes]

    def check(self) -> None:
        """Refuse a class that no request belongs to."""
        objectives = ScalingConfig(classes=self.classes).objectives
        for workload in self.workloads:
            if isinstance(workload, OpenLoop):
                specs = (spec for one in workload.sessions for spec in one.requests)
                names = {objectives.name_of(spec.tenant, spec.prompt_tokens) for spec in specs}
                for one in self.classes:
                    if one.name not in names:
                        raise ConfigError(
                            f"class {one.name}: no request of the workload belongs to it; mend "
                            "its key or prompt tokens, or leave it out"
                        )

    def entrants(self) -> list[ClassSettings]:
        """Return the settings as configured, and a Latin hypercube of others."""
        whole, streams = self.setup.max_batched_tokens, self.setup.max_seqs
        grids: dict[str, Sequence[float]] = {
            "chunk": [max(int(share * whole), min(16, whole)) for share in SHARES],
            **{f"class {n}": [0, *(max(1, streams // k) for k in (4, 8, 16, 32))]
               for n in range(len(self.classes))},
        }  # fmt: skip
        if long_from := self.long_from():
            grids |= {"lane": LANE_SHARES, **LANE}
        rows = hypercube(grids, self.candidates, self.control.seed)
        others = [self._settings(row, long_from) for row in rows]
        return list(dict.fromkeys([self.configured(), *others]))

    def configured(self) -> ClassSettings:
        """Return the settings as given."""
        own = [one.workload_class for one in self.classes]
        chunks = [one.chunk for one in own if one.chunk]
        return ClassSettings(
            chunk=min([self.setup.max_batched_tokens, *chunks]),
            concurrency=tuple(one.concurrency for one in own), long_lane=self.setup.long_lane,
        )  # fmt: skip

    def long_from(self) -> int:
        """Return the prompt tokens from which the lane is, as given or by classes; 0 for none."""
        if (lane := LaneConfig.parse(self.setup.long_lane)) is not None:
            return lane.min_prompt
        own = [one.workload_class for one in self.classes]
        return min((one.min_prompt_tokens for one in own if one.lane == "long"), default=0)

    def _settings(self, row: dict[str, float], long_from: int) -> ClassSettings:
        chunk, lane = int(row["chunk"]), ""
        if long_from and (tokens := int(row["lane"] * chunk)):
            row["seqs"] = min(row["seqs"], max(1, self.setup.max_seqs - 1))
            rest = ",".join(f"{name}={row[name]:g}" for name in LANE)
            lane = f"min_prompt={long_from},tokens={tokens},idle_tokens={2 * tokens},{rest}"
        caps = tuple(int(row[f"class {n}"]) for n in range(len(self.classes)))
        return ClassSettings(chunk=chunk, concurrency=caps, long_lane=lane)

    def run(self, trial: SettingsTrial) -> Figures:
        """Return a simulation's figures by class."""
        settings = trial.settings
        seed = self.control.seed + trial.workload
        simulation = Simulation(
            shortened(self.workloads[trial.workload], 1.0, trial.requests), self.fleet,
            msgspec.structs.replace(
                self.setup, max_batched_tokens=settings.chunk, long_lane=settings.long_lane
            ),
            msgspec.structs.replace(self.control, seed=seed, long_lane=settings.long_lane),
            self.client, seed=seed, assess_every=1e6,
            scaling=ScalingConfig(classes=tuned(self.classes, settings)),
        )  # fmt: skip
        result = simulation.run()

        def belongs(name: str, run: RequestRun) -> bool:
            return class_name(result.objectives, run) == name

        return tuple(
            measured(result, one.workload_class.slo, partial(belongs, one.name))
            for one in self.classes
        )


def tuned(
    classes: Iterable[RequestClassConfig], settings: ClassSettings
) -> tuple[RequestClassConfig, ...]:
    """Return the classes with a candidate's chunk and streams."""
    return tuple(
        msgspec.structs.replace(one, chunk=settings.chunk, concurrency=cap)
        for one, cap in zip(classes, settings.concurrency, strict=True)
    )


def halves(workload: Workload) -> list[Workload]:
    """Return the first and the second half of a workload's sessions, both from time 0."""
    if not isinstance(workload, OpenLoop) or len(workload.sessions) < 2:
        raise ConfigError(
            "workload: all seeds give the same requests, and they cannot be halved; give rate=..."
        )
    middle = len(workload.sessions) // 2
    first, second = workload.sessions[:middle], workload.sessions[middle:]
    begin = second[0].start_ns
    moved = [RequestSession(one.start_ns - begin, one.requests) for one in second]
    return [OpenLoop(part, workload.concurrency) for part in (first, tuple(moved))]


def tune_classes(
    search: ClassSearch, executor: Executor | None = None, watch: Watch = lambda *_: None
) -> ClassTuning:
    """Search by half of the workloads; report on the others."""
    search.check()
    run = staged(search.run, executor, watch)
    slos, left, count = search.slos, search.entrants(), len(search.workloads) // 2
    for halving in range(HALVINGS + 1):
        requests = math.ceil(search.requests / 2 ** (HALVINGS - halving))
        entries = _evaluate(left, requests, range(count), run)
        order = sorted(entries[1:], key=lambda one: _worst(one, slos))
        left = [one.settings for one in (entries[0], *order[: max(len(order) // 2, 1)])]
    chosen, reason = _choose(entries, slos)
    distances = [[excess(one.figures[n], slo)[0] for one in entries] for n, slo in enumerate(slos)]
    best = tuple(entries[row.index(min(row))] for row in distances)
    again = _evaluate(
        [search.configured(), chosen.settings], search.requests, range(count, 2 * count), run
    )
    return ClassTuning(
        configured=entries[0],
        chosen=chosen,
        best=best,
        reported=(again[0], again[1]),
        reason=reason,
    )


def _evaluate(
    settings: Sequence[ClassSettings], requests: int, workloads: range, run: Run
) -> list[EvaluatedSettings]:  # fmt: skip
    """Return the mean figures of settings over workloads."""
    trials = [SettingsTrial(one, requests, number) for one in settings for number in workloads]
    figures = iter(run(f"{len(settings)} settings", trials))
    rows = [[next(figures) for _ in workloads] for _ in settings]
    return [
        EvaluatedSettings(
            settings=one, figures=tuple(mean_figures(column) for column in zip(*row, strict=True))
        )
        for one, row in zip(settings, rows, strict=True)
    ]


def _worst(entry: EvaluatedSettings, slos: Sequence[Slo]) -> float:
    """Return the largest figure over its objective, of all classes."""
    pairs = zip(entry.figures, slos, strict=True)
    return max(excess(figures, slo)[0] for figures, slo in pairs)


def _choose(
    entries: Sequence[EvaluatedSettings], slos: Sequence[Slo]
) -> tuple[EvaluatedSettings, str]:
    """Return the most tokens/s with every class inside, to 1%, else the nearest to it."""
    inside = [one for one in entries if _worst(one, slos) <= 1.0]
    if not inside:
        return min(entries, key=lambda one: _worst(one, slos)), "nearest to all objectives"
    rates = {id(one): sum(part.output_tok_s for part in one.figures) for one in inside}
    near = [one for one in inside if rates[id(one)] >= (1.0 - TIE) * max(rates.values())]
    best = min(near, key=lambda one: _worst(one, slos))
    return best, f"inside all objectives, most tokens/s of {len(inside)} that are"
