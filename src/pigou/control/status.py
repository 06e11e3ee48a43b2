"""Status: the present prices and parameters of a control plane."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.control.cache_monitor import CacheMonitor, CacheStatus
from pigou.control.latency_model.estimates import Estimates
from pigou.control.prefix_index import PrefixIndex
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.control.request_tracker import RequestTracker
from pigou.control.router import Router
from pigou.control.routing.policy import params_of
from pigou.control.saturation.regime import Regime
from pigou.request import NEVER


@dataclass(frozen=True, slots=True)
class Status:
    """The present prices and parameters."""

    policy: str  # name of the routing policy
    controller: str  # name of what sets its parameters; "static" leaves them alone
    regime: Regime
    signal: float  # that the detector compares: smoothed TTFT P99, or its own statistic
    temperature: float
    parameters: dict[str, float]
    poa: PoAEstimate | None  # the Price of Anarchy of the last minute; None while it is unknown
    # how full memory is, what was evicted, and the Price of Anarchy of the placement.
    caching: CacheStatus
    workers: tuple[str, ...]  # ids, in the order of the arrays
    # seconds that one more stream on each worker would cost those there, (workers,).
    tolls: NDArray[np.float64]
    # seconds of prefill that a token of KV on each worker pushes out, (workers,).
    memory: NDArray[np.float64]
    estimates: Estimates
    output: float  # tokens that a request is expected to generate
    unknown: str = ""  # why it is; empty where it is known


def plane_status(
    controller: str, tracker: RequestTracker, router: Router, index: PrefixIndex,
    cache_monitor: CacheMonitor, poa: PoAEstimate | None, away: Collection[str], now: int,
) -> Status:  # fmt: skip
    """Return the status of a control plane with these parts; none of them changes.

    Args:
        controller: name of what sets the routing parameters.
        tracker: has the workers, their speeds, and the detector.
        router: has the routing policy.
        index: has what blocks cost that were computed again.
        cache_monitor: has the caches' occupancy.
        poa: the last Price of Anarchy; None before the first.
        away: ids of workers that are down, and expected back.
        now: nanoseconds.
    """
    unknown = _unknown(tracker, poa, away, now)
    state, detector = tracker.state, tracker.detector
    columns, estimates = state.columns, tracker.latency_model.peek(now)
    output = tracker.latency_model.expected_output(NEVER)
    return Status(
        policy=router.name,
        controller=controller,
        regime=detector.regime,
        signal=detector.signal,
        temperature=router.temperature,
        parameters=dict(params_of(router.policy)),
        poa=None if unknown else poa,
        unknown=unknown,
        caching=cache_monitor.status(state),
        workers=state.ids,
        tolls=stream_tolls(estimates, columns.decode_requests, output),
        memory=memory_prices(estimates, index.recomputed_share(state.ids)),
        estimates=estimates,
        output=output,
    )


def _unknown(
    tracker: RequestTracker, poa: PoAEstimate | None, away: Collection[str], now: int
) -> str:
    """Return why the Price of Anarchy is not known now; empty where it is."""
    if away:
        return f"the fleet is incomplete: {', '.join(sorted(away))} is down"
    if gateways := tracker.state.peers.gateways:
        return f"{len(gateways)} other gateways send requests to the workers, too"
    if unknown := tracker.poa.unknown(now):
        return unknown
    return "" if poa is not None else "it was not assessed yet"


def stream_tolls(
    known: Estimates, streams: NDArray[np.int64], output: float
) -> NDArray[np.float64]:
    """Return the seconds that one more stream on each worker would cost those there, (workers,).

    The toll of the stream alone: N n (f(n+1) - f(n)), its prompt not counted.

    Args:
        known: speeds of the workers.
        streams: on each worker, (workers,).
        output: tokens that a stream is expected to have (N).
    """
    rows, n = np.arange(len(streams)), streams.astype(np.float64)
    tolls: NDArray[np.float64] = output * n * (known.itl(rows, n + 1.0) - known.itl(rows, n))
    return tolls


def memory_prices(known: Estimates, recomputed_share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of prefill that a token of KV on each worker pushes out, (workers,).

    Args:
        known: speeds of the workers.
        recomputed_share: as of `FleetView`, (workers,).
    """
    prices: NDArray[np.float64] = recomputed_share * known.prefill_per_token
    return prices
