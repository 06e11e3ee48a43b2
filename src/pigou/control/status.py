"""What the control plane tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.control.cache_monitor import CacheStatus
from pigou.control.latency_model.estimates import Estimates
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.control.saturation.regime import Regime


@dataclass(frozen=True, slots=True)
class Status:
    """The present prices and parameters.

    Attributes:
        policy: name of the routing policy.
        controller: name of what sets its parameters; "static" leaves them alone.
        regime: as the detector says.
        signal: what the detector looks at: smoothed TTFT P99, or its own statistic.
        temperature: of the choice.
        parameters: of the policy, by name.
        assessment: the Price of Anarchy of the last minute; None while it is unknown.
        unknown: why it is; empty where it is known.
        caching: how full memory is, what was evicted, and the Price of Anarchy of the placement.
        workers: ids, in the order of the arrays.
        tolls: seconds that one more stream on each worker would cost those there, (workers,).
        memory: seconds of prefill that a token of KV on each worker pushes out, (workers,).
        estimates: of their speed.
        output: tokens that a request is expected to generate.
    """

    policy: str
    controller: str
    regime: Regime
    signal: float
    temperature: float
    parameters: dict[str, float]
    poa: PoAEstimate | None
    caching: CacheStatus
    workers: tuple[str, ...]
    tolls: NDArray[np.float64]
    memory: NDArray[np.float64]
    estimates: Estimates
    output: float
    unknown: str = ""
