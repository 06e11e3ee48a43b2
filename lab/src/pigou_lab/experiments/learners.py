"""Tenants that learn where to send, by capacity factor, with Pigou's tolls and without.

Each tenant runs EXP3 over the workers of a production fleet; its reward is m / (m + latency), m the
mean latency. With tolls it discounts a worker by the toll that is quoted as it sends: the weight
of worker w is p_w exp(-s toll_w / m), s = `STRENGTH`. Tenants share long prefixes, and a worker's
cache holds those of its own part of the tenants: who goes elsewhere evicts others.

| contender | tenants choose by |
|---|---|
| own | what they learned from their own latency |
| charged | the same, tolls charged afterwards as seconds |
| quoted | the same, and the expected seconds that the router quotes, without tolls |
| tolls | the same, and the tolls that it quotes |
| router | nothing: the toll policy places everything |

Capacity is the router's throughput under overload. Constants were chosen on seed 2 alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np

from pigou.control.routing.policy import Costs, CostTable, RequestView
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.view import Candidates, FleetView
from pigou.games import Floats
from pigou.games.strategic_queues import Learners
from pigou.request import SECOND
from pigou.sim.arrival_rate import renewal_times
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, WorkerGroup
from pigou.sim.request_run import RequestRun
from pigou.sim.result import SimulationResult
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.results import COMPARED, Row, over_seeds, run_simulation

Contender = Literal["own", "charged", "quoted", "tolls", "router"]
CONTENDERS: tuple[Contender, ...] = ("own", "charged", "quoted", "tolls", "router")
#: Capacity factors, in per cent.
LEVELS = (100, 110, 120, 130, 150, 170, 200, 220)
TENANTS, WORKERS, STRENGTH = 8, 4, 3.0
#: Tokens of a tenant's prefix, of the prompt's own part, and of the output; KV blocks of a worker.
PREFIX, OWN, OUTPUT, BLOCKS = 8192, 1024, 32, 3000
_BLOCK = 1024
#: Seconds of arrivals; growth of the backlog over arrivals up to which a run is stable.
SECONDS, STABLE = 60.0, 0.05
_PRIVATE, _TOLLS = slice(0, 4), slice(5, 8)  # rows of the toll policy's parts


class LearningTenants:
    """A routing policy in which tenants choose, each by weights of its own."""

    def __init__(self, contender: Contender, seed: int) -> None:
        self.learners = Learners(TENANTS, WORKERS, rate=0.1, explore=0.05)
        self.contender = contender
        self.runs: Sequence[RequestRun] = ()
        self._random = np.random.default_rng(seed)
        self._toll = Toll()
        self._mean_s = 0.0

    def costs(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Costs:
        """Return costs whose minimum is a draw by the tenant's chances (Gumbel's trick)."""
        logits, _ = self._logits(request, fleet, candidates)
        return np.log(-np.log(self._random.random(len(candidates)))) - logits

    def note(
        self, request: RequestView, fleet: FleetView, candidates: Candidates, chosen: int,
        _: CostTable | None,
    ) -> None:  # fmt: skip
        """Learn from the latency of this request when it ends."""
        logits, tolls = self._logits(request, fleet, candidates)
        chance = float(np.exp(logits[chosen] - logits.max()) / np.exp(logits - logits.max()).sum())
        paid = float(tolls[chosen]) if self.contender in ("charged", "tolls") else 0.0
        run = self.runs[int(request.id.partition(".")[0])]
        tenant, worker, forward = (
            _number(request.tenant),
            int(candidates.decode[chosen]),
            run.on_end,
        )

        def ended(run: RequestRun, now: int) -> None:
            spent = (now - run.intended_ns) / SECOND + paid
            self._mean_s += 0.02 * (spent - self._mean_s) if self._mean_s else spent
            losses = np.zeros(WORKERS)
            # A reward, not a loss: what has not answered yet must not look good.
            losses[worker] = -self._mean_s / (spent + self._mean_s) / max(chance, 0.01)
            self.learners.learn(losses, tenant)
            forward(run, now)

        run.on_end = ended

    def _logits(
        self, request: RequestView, fleet: FleetView, candidates: Candidates
    ) -> tuple[Floats, Floats]:
        rows = self._toll.parts(request, fleet, candidates).rows
        tolls = rows[_TOLLS].sum(axis=0)
        logits = np.log(self.learners.chances(_number(request.tenant))[candidates.decode])
        quoted = {"quoted": rows[_PRIVATE].sum(axis=0), "tolls": tolls}.get(self.contender)
        if quoted is not None:
            logits -= STRENGTH * quoted / max(self._mean_s, 0.1)
        return logits, tolls


def _number(tenant: str) -> int:
    return int(tenant[1:])


def simulate(contender: Contender, rate: float, seconds: float, seed: int) -> SimulationResult:
    """Return a run at a rate of requests a second."""
    policy = None if contender == "router" else LearningTenants(contender, seed)
    fleet = FleetConfig(workers=(WorkerGroup(gpu="H100", count=WORKERS, blocks=BLOCKS),))
    setup = Setup(model="llama-3.1-8b", gpu="H100")
    control = unlimited(seed=seed, policy="toll")
    client = ClientConfig(timeout=4 * seconds)
    simulation = Simulation(
        _load(rate, seconds, seed), fleet, setup, control, client, seed=seed, policy=policy
    )
    if policy is not None:
        policy.runs = simulation.client.runs
    return run_simulation(simulation, contender=contender, rate=rate, seed=seed)


def _load(rate: float, seconds: float, seed: int) -> OpenLoop:
    rng = np.random.default_rng(1000 + seed)
    sessions: list[RequestSession] = []
    for start in renewal_times(rate, 1.0, np.random.default_rng(seed)):
        if start >= seconds * SECOND:
            break
        tenant = int(rng.integers(TENANTS))
        shared = [tenant * PREFIX + block for block in range(PREFIX // _BLOCK)]
        own = [TENANTS * PREFIX + len(sessions) * OWN + block for block in range(OWN // _BLOCK)]
        spec = RequestSpec(
            PREFIX + OWN, OUTPUT, (*shared, *own), hash_scope=1, block_tokens=float(_BLOCK),
            tenant=f"t{tenant}",
        )  # fmt: skip
        sessions.append(RequestSession(start, (spec,)))
    return OpenLoop(sessions)


@cache
def capacity_rps(seconds: float = 20.0, seed: int = 2) -> float:
    """Return requests a second that the router's fleet completes, overloaded three times."""
    result = simulate("router", 200.0, seconds, seed)
    low, high = (EPOCH + round(share * seconds * SECOND) for share in (0.3, 1.0))
    return sum(low <= run.last_token_ns < high for run in result.done) / (0.7 * seconds)


def figures(result: SimulationResult, seconds: float) -> dict[str, float]:
    """Return backlog, its growth over arrivals, and the mean latency, of a run's second half."""
    sent = np.array([run.intended_ns for run in result.runs]) - EPOCH
    ended = np.array([run.ended_ns or np.iinfo(np.int64).max for run in result.runs]) - EPOCH

    def backlog(begin: float) -> float:
        times = np.linspace(begin, begin + 0.1, 11) * seconds * SECOND
        return float(np.mean([((sent <= t) & (ended > t)).sum() for t in times]))

    late = sent >= 0.5 * seconds * SECOND
    growth = (backlog(0.9) - backlog(0.5)) / max(1, int(late.sum()))
    done = late & np.array([run.last_token_ns > 0 for run in result.runs])
    e2e_s = float((ended - sent)[done].mean() / SECOND) if done.any() else math.nan
    return {"backlog": backlog(0.9), "growth": growth, "e2e_mean_s": e2e_s}


def learners(
    _: PaperFleet, __: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each capacity factor, in per cent, and contender."""
    for level in levels:
        for contender in CONTENDERS:
            rate = capacity_rps() * 100 / level
            runs = [figures(simulate(contender, rate, SECONDS, s), SECONDS) for s in seeds]
            columns = {name: [run[name] for run in runs] for name in runs[0]}
            stable = all(run["growth"] <= STABLE for run in runs)
            row: Row = {"experiment": "learners", "concurrency": level, "contender": contender,
                        "stable": stable, "runs": runs} | over_seeds(columns)  # fmt: skip
            yield row | dict.fromkeys(COMPARED)


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return the capacity factor from which each contender is stable at all higher ones."""
    factors: dict[str, float | None] = {}
    for contender in CONTENDERS:
        mine = sorted((row for row in rows if row["contender"] == contender),
                      key=lambda row: -row["concurrency"])  # fmt: skip
        unstable = next((at for at, row in enumerate(mine) if not row["stable"]), len(mine))
        factors[contender] = mine[unstable - 1]["concurrency"] / 100 if unstable else None
    growth = statistics.fmean(row["growth"] for row in rows if row["contender"] == "own")
    return {"stable_from": factors, "mean_growth_own": growth, "capacity_rps": capacity_rps()}
