"""What a simulation found."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.control.caching_game import Placement
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.request import SECOND, Nanos
from pigou.sim.call import Call, Outcome
from pigou.sim.streams import Gaps

PERCENTILES = np.array([50.0, 90.0, 95.0, 99.0])
_NAMES = ("p50", "p90", "p95", "p99")
#: Parts of the Price of Anarchy, which multiply to the whole.
_PARTS = ("whole", "queueing", "routing", "prefill_decode")


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        calls: all that were meant to be sent, in that order.
        gaps: between the tokens of streams.
        begin: of the run, in nanoseconds of the virtual clock.
        end: of it.
        wall: seconds that it took to compute.
        assessments: of the Price of Anarchy.
        placements: games of what lay where.
        caching: what became of the workers' memory (`CacheMonitor.summary`).
        workers: what each did: its name, steps, share of the time that it was busy, requests.
        shed: calls that were refused for want of room, each time counted.
        transfers: (number, bytes) of KV between workers.
        reads: prompts that began with a read from another worker's cache: those that did, the
            tokens that were held for them, and those of which nothing came.
    """

    calls: Sequence[Call]
    gaps: Gaps
    begin: int
    end: int
    wall: float
    assessments: Sequence[PoAEstimate]
    placements: Sequence[Placement]
    caching: dict[str, float | int | None]
    workers: Sequence[dict[str, Any]]
    shed: int
    transfers: tuple[int, int]
    reads: tuple[int, int, int] = (0, 0, 0)

    @property
    def done(self) -> list[Call]:
        """Calls that were served."""
        return [call for call in self.calls if call.outcome is Outcome.DONE]

    @property
    def seconds(self) -> float:
        """Simulated time."""
        return (self.end - self.begin) / SECOND

    def column(self, *names: str) -> tuple[Nanos, ...]:
        """Return attributes of the calls that were served, shape (done,) each."""
        done = self.done
        return tuple(
            np.array([getattr(call, name) for call in done], dtype=np.int64) for name in names
        )

    def ttft(self) -> Nanos:
        """From the intention to the first token, in nanoseconds, shape (done,)."""
        intended, first = self.column("intended", "first")
        return first - intended

    def document(self) -> dict[str, Any]:
        """Return the figures as a JSON document; latencies count from the intention to send."""
        done = self.done
        intended, sent, first, last, tokens, cached = self.column(
            "intended", "sent", "first", "last", "tokens", "cached"
        )
        prompts = sum(call.job.input for call in done)
        ended = [call for call in self.calls if call.outcome is not Outcome.PENDING]
        many = tokens > 1
        tpot = (last[many] - first[many]) / (tokens[many] - 1)
        failed = len(ended) - len(done)
        return {
            "offered": len(self.calls),
            "completed": len(done),
            "failed": failed,
            "unfinished": len(self.calls) - len(ended),
            "timed_out": sum(call.outcome is Outcome.TIMED_OUT for call in ended),
            "shed": self.shed,
            "wall_s": self.wall,
            "simulated_s": self.seconds,
            "throughput_rps": _ratio(len(done), self.seconds),
            "output_tok_s": _ratio(int(tokens.sum()), self.seconds),
            "prefix_hit_ratio": _ratio(int(cached.sum()), prompts),
            "preemptions": sum(call.preemptions for call in self.calls),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "ttft_s": summary(first - intended),
            "itl_s": _gaps(self.gaps),
            "tpot_s": summary(tpot),
            "e2e_s": summary(last - intended),
            "client_wait_s": summary(sent - intended),
            "server_ttft_s": summary(first - sent),
            "server_e2e_s": summary(last - sent),
            "poa": _anarchy(self.assessments) | {"caching": _placements(self.placements)},
            "caching": self.caching,
            "transfers": {"count": self.transfers[0], "bytes": self.transfers[1]},
            "peer_reads": dict(zip(("count", "tokens", "failed"), self.reads, strict=True)),
            "workers": list(self.workers),
        }


def summary(nanos: NDArray[Any]) -> dict[str, float | None]:
    """Return mean and percentiles in seconds; None where there is nothing.

    The percentile of share q among n sorted values is value k = ceil(q n).
    """
    if not len(nanos):
        return dict.fromkeys(("mean", *_NAMES))
    ordered = np.sort(nanos)
    ranks = np.maximum(1, np.ceil(PERCENTILES / 100 * len(ordered))).astype(np.int64)
    mean = math.fsum(ordered.tolist()) / len(ordered) / SECOND
    found = (ordered[ranks - 1] / SECOND).tolist()
    return {"mean": mean, **dict(zip(_NAMES, found, strict=True))}


def _gaps(gaps: Gaps) -> dict[str, float | None]:
    if not gaps.count:
        return dict.fromkeys(("mean", *_NAMES))
    found = gaps.percentiles(PERCENTILES).tolist()
    return {"mean": gaps.mean(), **dict(zip(_NAMES, found, strict=True))}


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _anarchy(assessments: Sequence[PoAEstimate]) -> dict[str, float | None]:
    """Geometric means over the windows, each weighted by its requests; parts still multiply."""
    found: dict[str, float | None] = dict.fromkeys((*_PARTS, "legacy"))
    weights = np.array([each.requests for each in assessments], dtype=np.float64)
    if weights.sum() > 0:
        for name in _PARTS:
            values = [getattr(each.anarchy, name).value for each in assessments]
            found[name] = _mean(values, weights)
        found["legacy"] = _mean([each.legacy for each in assessments], weights)
    return found


def _placements(placements: Sequence[Placement]) -> float | None:
    """Geometric mean over the games, each weighted by its prompts."""
    if not placements:
        return None
    weights = np.array([each.prompts for each in placements], dtype=np.float64)
    return _mean([each.poa for each in placements], weights)


def _mean(values: Sequence[float], weights: NDArray[np.float64]) -> float:
    return float(np.exp(np.average(np.log(values), weights=weights)))
