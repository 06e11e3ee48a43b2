"""What a simulation found."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.control.caching_game import Placement
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.cost.fleet_bill import FleetBill
from pigou.objectives import AttainmentCounter, Objectives
from pigou.request import SECOND, Nanos
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.streams import ITLHistogram
from pigou.windows.builder import PERCENTILE_NAMES, PERCENTILES, latency_summary

#: For simulations without an objective.
NO_OBJECTIVES = Objectives()
#: Parts of the Price of Anarchy, which multiply to the whole.
_PARTS = ("whole", "queueing", "routing", "prefill_decode")


def class_name(objectives: Objectives, run: RequestRun) -> str:
    """Return the name of a request's class."""
    return objectives.name_of(run.spec.tenant, run.spec.prompt_tokens)


def is_attained(objectives: Objectives, run: RequestRun, since_ns: int) -> bool:
    """Whether a request is done, and inside its objective."""
    if run.outcome is not RunOutcome.DONE:
        return False
    itl_ns = request_itl_ns(run)
    itl_s = None if itl_ns is None else itl_ns / SECOND
    ttft_s = (run.first_token_ns - since_ns) / SECOND
    return objectives.attained(class_name(objectives, run), ttft_s, itl_s)


def objectives_document(objectives: Objectives, runs: Sequence[RequestRun]) -> dict[str, Any]:
    """Return objectives and attained shares of offered requests; TTFT counts from the intention."""
    attainment = AttainmentCounter(objectives)
    for run in runs:
        inside = is_attained(objectives, run, run.intended_ns)
        attainment.add(class_name(objectives, run), inside)
    return attainment.document()


def request_itl_ns(run: RequestRun) -> float | None:
    """Return a request's mean ITL in ns; None for one token."""
    if run.output_tokens < 2:
        return None
    return (run.last_token_ns - run.first_token_ns) / (run.output_tokens - 1)


@dataclass(frozen=True)
class SimulationResult:
    """A finished run."""

    runs: Sequence[RequestRun]  # requests in the order of the client's intentions
    itl: ITLHistogram  # gaps between the tokens of streams
    begin_ns: int
    end_ns: int
    wall_s: float  # wall-clock seconds of the simulation
    assessments: Sequence[PoAEstimate]  # estimates of the Price of Anarchy
    placements: Sequence[Placement]  # solved caching games
    caching: dict[str, float | int | None]  # use of the workers' memory (`CacheMonitor.summary`)
    workers: Sequence[dict[str, Any]]
    shed: int  # attempts that the control plane refused
    transfers: tuple[int, int]  # (number, bytes) of KV between workers
    reads: tuple[int, int, int] = (0, 0, 0)  # remote KV fetches: count, tokens, failed
    objectives: Objectives = NO_OBJECTIVES
    planner: dict[str, Any] | None = None  # planner log; None without a planner
    gateways: dict[str, Any] | None = None  # gateway figures; None for one gateway
    bill: FleetBill | None = None  # fleet costs; None without prices
    # prefix hits by level of memory, G1 to G4: tokens, their share, bytes.
    tier_hits: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def done(self) -> list[RequestRun]:
        """Served requests."""
        return [run for run in self.runs if run.outcome is RunOutcome.DONE]

    @property
    def seconds(self) -> float:
        """Simulated time."""
        return (self.end_ns - self.begin_ns) / SECOND

    def column(self, *names: str) -> tuple[Nanos, ...]:
        """Return attributes of the served requests, shape (done,) each."""
        done = self.done
        return tuple(
            np.array([getattr(run, name) for run in done], dtype=np.int64) for name in names
        )

    def ttft(self) -> Nanos:
        """From the intention to the first token, in nanoseconds, shape (done,)."""
        intended_ns, first_token_ns = self.column("intended_ns", "first_token_ns")
        return first_token_ns - intended_ns

    def document(self) -> dict[str, Any]:
        """Return the figures as a JSON document; latencies count from the intention to send."""
        done = self.done
        intended_ns, sent_ns, first_ns, last_ns, output_tokens, cached_tokens = self.column(
            "intended_ns",
            "sent_ns",
            "first_token_ns",
            "last_token_ns",
            "output_tokens",
            "cached_tokens",
        )
        prompt_tokens = sum(run.spec.prompt_tokens for run in done)
        ended_runs = [run for run in self.runs if run.outcome is not RunOutcome.PENDING]
        several = output_tokens > 1
        tpot = (last_ns[several] - first_ns[several]) / (output_tokens[several] - 1)
        failed = len(ended_runs) - len(done)
        return {
            "offered": len(self.runs),
            "completed": len(done),
            "failed": failed,
            "unfinished": len(self.runs) - len(ended_runs),
            "timed_out": sum(run.outcome is RunOutcome.TIMED_OUT for run in ended_runs),
            "shed": self.shed,
            "wall_s": self.wall_s,
            "simulated_s": self.seconds,
            "throughput_rps": _ratio(len(done), self.seconds),
            "output_tok_s": _ratio(int(output_tokens.sum()), self.seconds),
            "prefix_hit_ratio": _ratio(int(cached_tokens.sum()), prompt_tokens),
            "preemptions": sum(run.preemptions for run in self.runs),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "ttft_s": summary(first_ns - intended_ns),
            "itl_s": _itl_summary(self.itl),
            "tpot_s": summary(tpot),
            "e2e_s": summary(last_ns - intended_ns),
            "client_wait_s": summary(sent_ns - intended_ns),
            "server_ttft_s": summary(first_ns - sent_ns),
            "server_e2e_s": summary(last_ns - sent_ns),
            "poa": _anarchy(self.assessments) | {"caching": _placements(self.placements)},
            "caching": self.caching,
            "transfers": {"count": self.transfers[0], "bytes": self.transfers[1]},
            "peer_reads": dict(zip(("count", "tokens", "failed"), self.reads, strict=True)),
            "tier_hits": self.tier_hits,
            "workers": list(self.workers),
            **self._objective(),
            **({} if self.gateways is None else {"gateways": self.gateways}),
        }

    def _objective(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        if self.objectives.known:
            figures["slo"] = objectives_document(self.objectives, self.runs)
        if self.planner is not None:
            figures["planner"] = self.planner
        if self.bill is not None:
            figures |= {"cost": self.bill.document(), "energy": self.bill.energy_document()}
        return figures


def summary(nanos: NDArray[Any]) -> dict[str, float | None]:
    """Return mean and percentiles in seconds, or None."""
    return msgspec.structs.asdict(latency_summary(nanos))


def _itl_summary(itl: ITLHistogram) -> dict[str, float | None]:
    if not itl.count:
        return dict.fromkeys(("mean", *PERCENTILE_NAMES))
    percentiles = itl.percentiles(PERCENTILES).tolist()
    return {"mean": itl.mean(), **dict(zip(PERCENTILE_NAMES, percentiles, strict=True))}


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _anarchy(assessments: Sequence[PoAEstimate]) -> dict[str, Any]:
    """Geometric means over windows, weighted by requests; `interval` averages the windows' ends."""
    means: dict[str, Any] = dict.fromkeys((*_PARTS, "legacy"))
    means["interval"] = None
    weights = np.array([estimate.requests for estimate in assessments], dtype=np.float64)
    if weights.sum() > 0:
        for name in _PARTS:
            values = [getattr(estimate.anarchy, name).value for estimate in assessments]
            means[name] = _mean(values, weights)
        means["legacy"] = _mean([estimate.legacy for estimate in assessments], weights)
        means["interval"] = {
            name: [
                _mean([getattr(getattr(one.anarchy, name), end) for one in assessments], weights)
                for end in ("low", "high")
            ]
            for name in _PARTS
        }
    return means


def _placements(placements: Sequence[Placement]) -> float | None:
    if not placements:
        return None
    weights = np.array([placement.prompts for placement in placements], dtype=np.float64)
    return _mean([placement.poa for placement in placements], weights)


def _mean(values: Sequence[float], weights: NDArray[np.float64]) -> float:
    return float(np.exp(np.average(np.log(values), weights=weights)))
