"""Operating points of a fleet: what settings of router and engines trade, by simulation.

Successive halving (Jamieson and Talwalkar, AISTATS 2016) on shortened workloads: all candidates see
the same requests, the better half sees twice as many, and a load has its own search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError, ControlConfig
from pigou.control.routing.policy import load as load_policy
from pigou.control.routing.policy import params_of
from pigou.control.routing_controller import OperatingPoint
from pigou.control.saturation.regime import LEVELS, Regime
from pigou.objectives import Slo
from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.result import SimulationResult, request_itl_ns
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation
from pigou.sim.virtual_clock import EPOCH, Phase
from pigou.sim.workload import ClosedLoop, OpenLoop, RequestSession

Workload = OpenLoop | ClosedLoop
#: Values that are tried of a policy's parameters, of those it has.
PARAMS: Mapping[str, tuple[float, ...]] = {
    "toll": (0.25, 0.5, 1.0, 2.0),
    "urgency": (0.0, 1.0, 2.0, 4.0, 8.0),
    "overlap_weight": (0.1, 0.5, 1.0, 2.0, 4.0),
}
TEMPERATURES = (0.0, 0.02, 0.1, 0.5)
#: Shares of the tokens per step, and of the running requests, that workers are started with.
SHARES = (1.0, 0.5, 0.25, 0.125)
#: Multiples of the workload's own load, among which its light and heavy loads are sought.
LOADS = (0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
#: Share of a run that is in its regime: Below where the load is light, Saturated where heavy.
_BELOW, _SATURATED = 0.9, 0.5
#: First requests of a run that are not measured, as a share: the fleet fills.
_WARM_UP = 0.15
#: Halvings of the candidates, and doublings of their requests.
HALVINGS = 2
#: Relative difference below which figures are the same.
TIE = 0.01
#: Seconds that a request which was not served counts as (a day).
_LOST_S = 86_400.0
#: Percentile of latencies without an objective.
PERCENTILE = 99.0
#: Called with a stage, and the done of all simulations within it.
Watch = Callable[[str, int, int], None]


class PointFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation under an operating point saw."""

    ttft_s: float  # at the percentile
    itl_s: float  # mean seconds between a request's tokens, at the percentile
    output_tok_s: float
    attained: float | None = None  # share of offered requests inside the objective

    @property
    def objectives(self) -> tuple[float, ...]:
        """Logarithms of figures of which less is better, in steps of `TIE`: below it is noise."""
        figures = self.ttft_s, self.itl_s, 1.0 / max(self.output_tok_s, 1e-9)
        return tuple(TIE * round(math.log(max(figure, 1e-9)) / TIE) for figure in figures)


class EvaluatedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate, and what is known of it."""

    point: OperatingPoint
    figures: PointFigures
    requests: int  # simulated with it in its last round, over all seeds
    final: bool = False  # whether it was left in the last round
    dominated: bool = True  # whether another one is at least as good in all figures
    chosen: bool = False


class LoadFrontier(msgspec.Struct, frozen=True, kw_only=True):
    """The frontier of one load, the configured point first."""

    load: float  # multiple of the workload's own
    in_regime: float  # share of the time that its regime was in force, as configured
    points: tuple[EvaluatedPoint, ...]
    reason: str = ""  # why the chosen one was chosen

    @property
    def chosen(self) -> OperatingPoint:
        """The point to serve with."""
        return next(entry.point for entry in self.points if entry.chosen)


class Frontier(msgspec.Struct, frozen=True, kw_only=True):
    """Frontiers by load, as the JSON file of `pigou frontier` has them."""

    percentile: float
    regimes: dict[str, LoadFrontier]  # by "light" and "heavy"
    operating_points: dict[str, OperatingPoint] = {}
    run: dict[str, str | int] = {}  # workload, fleet, policy, objective, seed

    def choose(self, slo: Slo | None) -> Frontier:
        """Return it with the points that an objective picks; without one, those of least regret."""
        if slo is not None and slo.percentile != self.percentile:
            raise ConfigError(
                f"slo has percentile {slo.percentile:g}, and the frontier's figures are at "
                f"{self.percentile:g}; give percentile={self.percentile:g}, or simulate again"
            )
        regimes = {name: _choose(one, slo) for name, one in self.regimes.items()}
        points = {name: one.chosen for name, one in regimes.items()}
        return msgspec.structs.replace(self, regimes=regimes, operating_points=points)


@dataclass(frozen=True, kw_only=True)
class SimulatedSearch:
    """What a search simulates."""

    workloads: Sequence[Workload]  # one for each seed
    fleet: FleetConfig
    setup: Setup
    control: ControlConfig
    client: ClientConfig
    requests: int = 600  # in a simulation of the last round
    candidates: int = 32


@dataclass(frozen=True, kw_only=True)
class FrontierSearch(SimulatedSearch):
    """Search for operating points of the router and the engines."""

    slo: Slo | None = None

    def entrants(self) -> list[OperatingPoint]:
        """Return the candidates: the point as configured, and a Latin hypercube of others."""
        own = params_of(load_policy(self.control.policy, self.control.params))
        grids: dict[str, Sequence[float]] = {
            **{name: values for name, values in PARAMS.items() if name in own},
            "temperature": TEMPERATURES,
            "max_batched_tokens": _limits(self.setup.max_batched_tokens, 16),
            "max_seqs": _limits(self.setup.max_seqs, 1),
        }
        rows = hypercube(grids, self.candidates, self.control.seed)
        points = [OperatingPoint(), *(_point(row) for row in rows)]
        return list({_key(point): point for point in points}.values())

    def run(self, trial: PointTrial) -> Outcome:
        """Return a simulation's figures, and its shares of time Below and Saturated."""
        points = {name: msgspec.to_builtins(trial.point) for name in ("light", "heavy")}
        seed = self.control.seed + trial.seed
        control = msgspec.structs.replace(self.control, operating_points=points, seed=seed)
        simulation = Simulation(
            shortened(self.workloads[trial.seed], trial.load, trial.requests), self.fleet,
            self.setup, control, self.client, seed=seed, assess_every=1e6,
        )  # fmt: skip
        regimes: list[tuple[int, Regime]] = []
        clock, detector = simulation.clock, simulation.fleet.plane.tracker.detector

        def look(now: int) -> None:
            regimes.append((now, detector.regime))
            clock.at(now + SECOND, Phase.TICK, -1, look)

        clock.at(EPOCH + SECOND, Phase.TICK, -1, look)
        result = simulation.run()
        runs = result.runs
        begin = runs[int(_WARM_UP * len(runs))].intended_ns
        seen = [regime for at, regime in regimes if at >= begin] or [Regime.BELOW]
        below, saturated = (seen.count(one) / len(seen) for one in (LEVELS[0], LEVELS[-1]))
        return measured(result, self.slo), (below, saturated)


class PointTrial(NamedTuple):
    """One simulation."""

    point: OperatingPoint
    load: float  # multiple of the workload's own
    requests: int
    seed: int  # index of the workload


#: Figures of a simulation, and its shares of time Below and Saturated.
Outcome: TypeAlias = tuple[PointFigures, tuple[float, float]]
Outcomes: TypeAlias = list[Outcome]
Run: TypeAlias = Callable[[str, Sequence[PointTrial]], Outcomes]
Trial = TypeVar("Trial")
Figures = TypeVar("Figures")


def staged(
    simulate: Callable[[Trial], Figures], executor: Executor | None, watch: Watch
) -> Callable[[str, Sequence[Trial]], list[Figures]]:
    """Return a function that simulates the trials of a stage, and tells `watch` what is done."""

    def run(stage: str, trials: Sequence[Trial]) -> list[Figures]:
        watch(stage, 0, len(trials))
        done: list[Figures] = []
        for figures in (map if executor is None else executor.map)(simulate, trials):
            done.append(figures)
            watch(stage, len(done), len(trials))
        return done

    return run


def find_frontier(
    search: FrontierSearch, executor: Executor | None = None, watch: Watch = lambda *_: None
) -> Frontier:
    """Return the frontiers of a light and a heavy load, with the chosen points."""
    run = staged(search.run, executor, watch)
    loads = _loads(search, run)
    regimes = {name: _halve(search, name, *loads[name], run) for name in loads}
    percentile = PERCENTILE if search.slo is None else search.slo.percentile
    return Frontier(percentile=percentile, regimes=regimes).choose(search.slo)


def _loads(search: FrontierSearch, run: Run) -> dict[str, tuple[float, float]]:
    """Return the light and the heavy load, each with the share of time in its regime.

    Light is the most, up to the workload's own, that is Below nearly always; heavy the least, from
    its own on where that is not light, that is mostly Saturated.
    """
    trials = [
        PointTrial(OperatingPoint(), load, search.requests, seed)
        for load in LOADS for seed in range(len(search.workloads))
    ]  # fmt: skip
    results = run("looking for a light and a heavy load", trials)
    regimes = np.array([shares for _, shares in results]).reshape(len(LOADS), -1, 2).mean(axis=1)
    (below, saturated), own = regimes.T, LOADS.index(1.0)
    quiet = np.flatnonzero(below[: own + 1] >= _BELOW)
    light = int(quiet[-1]) if len(quiet) else int(np.argmax(below[: own + 1]))
    full = np.flatnonzero(saturated[light:] >= _SATURATED) + light
    heavy = len(LOADS) - 1 - int(np.argmax(saturated[::-1]))
    if (full >= own).any():
        heavy = int(full[full >= own][0])
    return {
        "light": (LOADS[light], float(below[light])),
        "heavy": (LOADS[heavy], float(saturated[heavy])),
    }


def _halve(search: FrontierSearch, name: str, load: float, share: float, run: Run) -> LoadFrontier:
    """Halve the candidates at a load, and double their requests, until a few are left."""
    left, seeds = search.entrants(), len(search.workloads)
    evaluated: dict[bytes, EvaluatedPoint] = {}
    for halving in range(HALVINGS + 1):
        requests = math.ceil(search.requests / 2 ** (HALVINGS - halving))
        stage = f"{name} load, {load:g} times: {len(left)} settings"
        trials = [
            PointTrial(point, load, requests, seed) for point in left for seed in range(seeds)
        ]
        runs = [figures for figures, _ in run(stage, trials)]
        entries = [
            EvaluatedPoint(
                point=point, figures=mean_figures(runs[i * seeds : (i + 1) * seeds]),
                requests=requests * seeds,
            )
            for i, point in enumerate(left)
        ]  # fmt: skip
        evaluated |= {_key(entry.point): entry for entry in entries}
        left = [entry.point for entry in _better(entries, search.slo)]
    if not any(entry.figures.output_tok_s for entry in entries):
        raise ConfigError(
            "workload: no request is served under any settings; give workers more --blocks, or "
            "shorter prompts"
        )
    beaten = dominated(np.array([entry.figures.objectives for entry in entries])).tolist()
    for entry, is_beaten in zip(entries, beaten, strict=True):
        final = msgspec.structs.replace(entry, final=True, dominated=is_beaten)
        evaluated[_key(entry.point)] = final
    points = list(evaluated.values())
    points.sort(
        key=lambda e: (e.point != OperatingPoint(), not e.final, e.dominated, e.figures.ttft_s)
    )
    return LoadFrontier(load=load, in_regime=share, points=tuple(points))


def hypercube(
    grids: Mapping[str, Sequence[float]], count: int, seed: int
) -> Iterator[dict[str, float]]:
    """Yield `count` draws of a Latin hypercube over each name's values."""
    rng = np.random.default_rng(seed)
    columns = [
        [values[i % len(values)] for i in rng.permutation(count).tolist()]
        for values in grids.values()
    ]
    return (dict(zip(grids, row, strict=True)) for row in zip(*columns, strict=True))


def shortened(workload: Workload, load: float, requests: int) -> Workload:
    """Return the first requests of a workload at a multiple of its load."""
    if isinstance(workload, ClosedLoop):
        phases = tuple((max(round(load * users), 1), s) for users, s in workload.phases)
        return msgspec.structs.replace(
            workload, phases=phases, requests=min(requests, workload.requests or requests)
        )
    sessions: list[RequestSession] = []
    count = 0
    for session in workload.sessions:
        if count >= requests:
            break
        sessions.append(RequestSession(round(session.start_ns / load), session.requests))
        count += len(session.requests)
    concurrency = max(round(load * workload.concurrency), 1) if workload.concurrency else 0
    return OpenLoop(tuple(sessions), concurrency)


def measured(
    result: SimulationResult, slo: Slo | None, of: Callable[[RequestRun], bool] = lambda _: True
) -> PointFigures:
    """Return the figures of a run's requests after its warm-up, of those that `of` is true of."""
    runs = result.runs[int(_WARM_UP * len(result.runs)) :]
    # Without those that were cut off at the end.
    runs = [run for run in runs if run.outcome is not RunOutcome.PENDING and of(run)]
    served = [run for run in runs if run.outcome is RunOutcome.DONE]
    lost = [_LOST_S] * (len(runs) - len(served))
    ttft = [(run.first_token_ns - run.intended_ns) / SECOND for run in served]
    itl = [(request_itl_ns(run) or 0.0) / SECOND for run in served]
    percentile = PERCENTILE if slo is None else slo.percentile
    attained = None
    if slo is not None:
        inside = sum(a <= slo.ttft_s and b <= slo.itl_s for a, b in zip(ttft, itl, strict=True))
        attained = inside / max(len(runs), 1)
    several = [value for run, value in zip(served, itl, strict=True) if run.output_tokens > 1]
    tokens = sum(run.output_tokens for run in result.done if of(run))
    return PointFigures(
        ttft_s=float(np.percentile(ttft + lost or [0.0], percentile)),
        itl_s=float(np.percentile(several + lost or [0.0], percentile)),
        output_tok_s=tokens / max(result.seconds, 1e-9), attained=attained,
    )  # fmt: skip


def dominated(objectives: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which rows, (points, figures), are dominated: another is nowhere above, once below."""
    nowhere_above = (objectives[None] <= objectives[:, None]).all(axis=2)
    once_below = (objectives[None] < objectives[:, None]).any(axis=2)
    beaten: NDArray[np.bool_] = np.any(nowhere_above & once_below, axis=1)
    return beaten


def regrets(points: Sequence[EvaluatedPoint]) -> NDArray[np.float64]:
    """Return each point's figures over the best of all points, in the geometric mean."""
    objectives = np.array([entry.figures.objectives for entry in points])
    means: NDArray[np.float64] = np.exp((objectives - objectives.min(axis=0)).mean(axis=1))
    return means


def _better(entries: Sequence[EvaluatedPoint], slo: Slo | None) -> list[EvaluatedPoint]:
    """Return half of the candidates, the configured one among them.

    They are taken in turns from two orders: by front, and within one from the emptiest parts of it
    (NSGA-II; Deb et al., IEEE Transactions on Evolutionary Computation 2002); and by regret, or
    nearest to the objective.
    """
    objectives = np.array([entry.figures.objectives for entry in entries])
    ranks, room = np.zeros(len(entries), dtype=np.int64), np.zeros(len(entries))
    rest = np.arange(len(entries))
    while len(rest):
        beaten = dominated(objectives[rest])
        front = rest[~beaten]
        room[front] = _room(objectives[front])
        rest = rest[beaten]
        ranks[rest] += 1
    merit = regrets(entries)
    if slo is not None:
        merit = np.array([excess(entry.figures, slo)[0] for entry in entries])
    turns = zip(np.lexsort((-room, ranks)).tolist(), np.argsort(merit, kind="stable").tolist(),
                strict=True)  # fmt: skip
    selected = dict.fromkeys([0, *(i for turn in turns for i in turn)])
    return [entries[i] for i in sorted(list(selected)[: max((len(entries) + 1) // 2, 2)])]


def _room(objectives: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of each point's neighbours in a front, (points,); infinity at ends."""
    room = np.zeros(len(objectives))
    for column in objectives.T:
        order = np.argsort(column, kind="stable")
        room[order[[0, -1]]] = math.inf
        span = max(float(column[order[-1]] - column[order[0]]), 1e-12)
        room[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / span
    return room


def _choose(frontier: LoadFrontier, slo: Slo | None) -> LoadFrontier:
    able = [entry for entry in frontier.points if entry.final and not entry.dominated]
    regret = {id(entry): value for entry, value in zip(able, regrets(able).tolist(), strict=True)}
    inside = able if slo is None else [e for e in able if excess(e.figures, slo)[0] <= 1.0]
    if inside:
        max_tok_s = max(entry.figures.output_tok_s for entry in inside)
        near = [e for e in inside if e.figures.output_tok_s >= (1.0 - TIE) * max_tok_s]
        best = min(inside if slo is None else near, key=lambda entry: regret[id(entry)])
        reason = "least regret over all figures"
        if slo is not None:
            reason = f"inside the objective, most tokens/s of {len(inside)} that are"
    else:
        assert slo is not None
        best = min(able, key=lambda entry: excess(entry.figures, slo)[0])
        reason = f"none is inside the objective; nearest: {excess(best.figures, slo)[1]}"
    points = tuple(
        msgspec.structs.replace(entry, chosen=entry is best) for entry in frontier.points
    )
    return msgspec.structs.replace(frontier, points=points, reason=reason)


def excess(figures: PointFigures, slo: Slo) -> tuple[float, str]:
    """Return the largest figure over its objective, and which objectives are broken."""
    pairs = (("TTFT", figures.ttft_s, slo.ttft_s), ("ITL", figures.itl_s, slo.itl_s))
    broken = [
        f"{name} p{slo.percentile:g} is {value:.3g} s for {limit:g}"
        for name, value, limit in pairs if value > limit
    ]  # fmt: skip
    return max(value / limit for _, value, limit in pairs), ", ".join(broken)


def _key(point: OperatingPoint) -> bytes:
    return msgspec.json.encode(point)


def _point(values: dict[str, float]) -> OperatingPoint:
    limits = {name: int(values.pop(name)) for name in ("max_seqs", "max_batched_tokens")}
    temperature = values.pop("temperature")
    return OperatingPoint(temperature=temperature, params=values, **limits)


def _limits(limit: int, floor: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(max(int(share * limit), min(floor, limit)) for share in SHARES))


def mean_figures(figures: Sequence[PointFigures]) -> PointFigures:
    """Return the means over seeds."""
    rows = [msgspec.structs.asdict(one) for one in figures]
    means = {
        name: None if value is None else fmean(row[name] for row in rows)
        for name, value in rows[0].items()
    }
    return msgspec.convert(means, PointFigures)
