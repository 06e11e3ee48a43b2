"""Prices of the control plane, as JSON for the page and gauges for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from prometheus_client.core import HistogramMetricFamily, Metric

from pigou.control.cache_monitor import CacheStatus
from pigou.control.lengths import ERRORS
from pigou.control.plane import Status
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.games.price_of_anarchy import Estimate
from pigou.metric_rows import counter_family, gauge_family

PARTS = ("whole", "routing", "prefill_decode", "queueing")


def _gauge(name: str, help: str) -> Any:
    return field(default=math.nan, metadata={"name": f"pigou_game_{name}", "help": help})


@dataclass(frozen=True, slots=True)
class Price:
    """Prices of one worker at its current load, with their gauges; NaN if unknown."""

    worker: str
    toll: float = _gauge(
        "toll_seconds", "Seconds that one more stream on a worker would cost those there."
    )
    social_ratio: float = _gauge(
        "social_ratio", "Cost of one more stream to everybody over its own."
    )
    itl: float = _gauge(
        "expected_itl_seconds",
        "Seconds between tokens that a worker's law expects for one more stream.",
    )
    prefill_token: float = _gauge(
        "prefill_token_seconds", "Seconds that an uncached prompt token takes on a worker."
    )
    memory: float = _gauge(
        "memory_token_seconds",
        "Seconds of prefill that a token of KV on a worker pushes out of its cache.",
    )
    busy: float = _gauge("prefill_busy_ratio", "Share of its time that a worker computes prompts.")
    poa: float = _gauge(
        "worker_poa", "Observed over best seconds of the requests that a worker had a part in."
    )
    poa_low: float = _gauge("worker_poa_low", "Lower end of its 90% interval.")
    poa_high: float = _gauge("worker_poa_high", "Upper end of its 90% interval.")
    rho: float = _gauge("worker_rho", "Active KV blocks of a worker over its device blocks.")


PRICES = fields(Price)[1:]


def worker_prices(status: Status, streams: Sequence[int]) -> list[Price]:
    """Return each worker's prices; `streams` are in the order of `status.workers`."""
    known, rows = status.estimates, np.arange(len(status.workers))
    itl = known.itl(rows, np.asarray(streams, dtype=np.float64) + 1.0)
    own = np.maximum(status.output * itl, 1e-12)
    by_worker = {} if status.poa is None else status.poa.by_worker
    ranges = {} if status.poa is None else status.poa.ranges
    unknown = (math.nan, math.nan)
    return [
        Price(
            worker=worker,
            toll=float(status.tolls[row]),
            itl=float(itl[row]),
            social_ratio=float(1.0 + status.tolls[row] / own[row]),
            prefill_token=float(known.prefill_token[row]),
            memory=float(status.memory[row]),
            busy=float(known.busy[row]),
            # Without an interval it says nothing.
            poa=by_worker.get(worker, math.nan) if worker in ranges else math.nan,
            poa_low=ranges.get(worker, unknown)[0],
            poa_high=ranges.get(worker, unknown)[1],
            rho=float(status.caching.rho[row]),
        )
        for row, worker in enumerate(status.workers)
    ]


def game_view(status: Status) -> dict[str, Any]:
    """Return parameters and the Price of Anarchy as JSON builtins."""
    estimate = status.poa
    return {
        "policy": status.policy,
        "controller": status.controller,
        "regime": status.regime.value,
        "signal": json_number(status.signal),
        "operating_point": msgspec.to_builtins(status.point),
        "temperature": json_number(status.temperature),
        "parameters": {
            name: json_number(value) if isinstance(value, float) else value
            for name, value in status.parameters.items()
        },
        "poa": None
        if estimate is None
        else {name: _estimate(getattr(estimate.anarchy, name)) for name in PARTS},
        "poa_legacy": None if estimate is None else json_number(estimate.legacy),
        "poa_requests": 0 if estimate is None else estimate.requests,
        "poa_unknown": status.unknown or None,
        "poa_split": None if estimate is None or estimate.split is None else _split(estimate),
        "caching": _caching(status.caching),
    }


def _split(estimate: PoAEstimate) -> dict[str, Any] | None:
    """Return the better split and its gain."""
    split = estimate.split
    if split is None:
        return None
    gain = estimate.anarchy.prefill_decode
    return {
        "prefill": list(split.prefill),
        "decode": list(split.decode),
        "moves": list(split.moves),
        "saves_seconds_per_request": json_number(split.saves),
        "gain": _estimate(gain),
        "certain": gain.low > 1.0,
    }


def _caching(caching: CacheStatus) -> dict[str, Any]:
    """Return the fleet's memory status; null for unknown values."""
    game = caching.placement
    seconds = ("poa", "cost", "best", "unavoidable", "met")
    return {
        "rho": json_number(caching.fleet_rho),
        "evicted_blocks": caching.evicted,
        "evicted_blocks_per_second": json_number(caching.rate),
        "first_eviction_seconds": json_number(caching.first_eviction),
        "poa_before_eviction": json_number(caching.before),
        "poa_after_eviction": json_number(caching.after),
        **{name: None if game is None else json_number(getattr(game, name)) for name in seconds},
        "prompts": 0 if game is None else game.prompts,
        "objects": 0 if game is None else game.objects,
        "exact": game is not None and game.exact,
    }


def price_families(status: Status, prices: Sequence[Price]) -> Iterator[Metric]:
    """Yield the gauges `pigou_game_*` of known prices."""
    text = "Regime: 0 below, 1 transition, 2 saturated."
    yield gauge_family("pigou_game_saturation_state", text, status.regime.level)
    yield gauge_family("pigou_game_saturation_signal", "Signal of the detector.", status.signal)
    yield gauge_family(
        "pigou_game_router_temperature", "Softmax temperature of the choice.", status.temperature
    )
    parameters = [
        ((name,), float(value))
        for name, value in status.parameters.items()
        if isinstance(value, int | float)
    ]
    text = "Parameters of the routing policy."
    yield gauge_family("pigou_game_router_parameter", text, parameters, "name")
    for gauge in PRICES:
        samples = [((price.worker,), getattr(price, gauge.name)) for price in prices]
        known = [(worker, value) for worker, value in samples if not math.isnan(value)]
        yield gauge_family(gauge.metadata["name"], gauge.metadata["help"], known, "worker")
    if status.lengths is not None:
        text = "Kendall's tau of the last 256 predicted output lengths with those that came."
        yield gauge_family("pigou_length_rank_correlation", text, status.lengths.tau)
        text = "Predicted over generated output tokens, or the inverse if that is larger."
        cuts = zip((*map(str, ERRORS), "+Inf"), accumulate(status.lengths.buckets), strict=True)
        errors = HistogramMetricFamily("pigou_length_error_ratio", text)
        errors.add_metric((), list(cuts), status.lengths.error_sum)
        yield errors
    caching = status.caching
    if not math.isnan(caching.fleet_rho):
        text = "Active KV blocks of the fleet over its device blocks."
        yield gauge_family("pigou_game_rho", text, caching.fleet_rho)
    text = "Blocks that left a device for others, as KV events tell."
    yield counter_family("pigou_game_evicted_blocks", text, caching.evicted)
    if caching.placement is not None:
        text = "Seconds of prompts where blocks lie, over those where they would lie at best."
        yield gauge_family("pigou_game_poa_caching", text, caching.placement.poa)
    text = "Whether the Price of Anarchy of the last minute is known."
    yield gauge_family("pigou_game_poa_known", text, float(status.poa is not None))
    if status.poa is not None:
        yield from _poa_families(status.poa, status.workers)


def _poa_families(estimate: PoAEstimate, workers: Sequence[str]) -> Iterator[Metric]:
    parts: dict[str, Estimate] = {name: getattr(estimate.anarchy, name) for name in PARTS}
    what = "Price of Anarchy of the last minute, and the parts that multiply to it"
    for suffix, of, end in (
        ("", "value", "."), ("_low", "low", "; lower end of the interval."),
        ("_high", "high", "; upper end."),
    ):  # fmt: skip
        samples = [((name,), float(getattr(part, of))) for name, part in parts.items()]
        yield gauge_family(f"pigou_game_poa{suffix}", what + end, samples, "part")
    text = "The index of Georgiou 2026, Eq. 12."
    yield gauge_family("pigou_game_poa_legacy", text, estimate.legacy)
    split = estimate.split
    text = "Seconds that the best prefill/decode split would save a request; 0 for the present one."
    yield gauge_family("pigou_game_split_saves_seconds", text, split.saves if split else 0.0)
    moves = split.moves if split else ()
    text = "Whether the best prefill/decode split would change a worker's role."
    samples = [((worker,), float(worker in moves)) for worker in workers]
    yield gauge_family("pigou_game_split_moves", text, samples, "worker")


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "value": json_number(estimate.value),
        "low": json_number(estimate.low),
        "high": json_number(estimate.high),
    }


def json_number(value: float) -> float | None:
    """Return a number for JSON: null if not finite."""
    value = float(value)
    return value if math.isfinite(value) else None
