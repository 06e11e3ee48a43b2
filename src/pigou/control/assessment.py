"""What the Price of Anarchy is computed from, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.control.latency_model.estimates import Estimates
from pigou.games.price_of_anarchy import PriceOfAnarchy


class Record(msgspec.Struct, frozen=True):
    """One request, times in nanoseconds; `prefill` is "" where `decode` computed the prompt."""

    arrived: int
    routed: int
    handed: int
    ended: int
    prefill: str
    decode: str
    uncached: int
    pairs: int
    generated: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an assessment is made of: values of one moment, so that it can be made elsewhere.

    Attributes:
        records: requests that ended, and then those that still run.
        scored: which of them count, (records,); the others only load the workers.
        workers: ids, by row.
        prefill: rows whose role is prefill alone.
        estimates: of the workers' speed.
    """

    records: tuple[Record, ...]
    scored: NDArray[np.bool_]
    workers: tuple[str, ...]
    prefill: tuple[int, ...]
    estimates: Estimates


@dataclass(frozen=True, slots=True)
class Split:
    """The split of the workers between prefill and decode that costs the requests least.

    Attributes:
        prefill: ids of the workers that only prefill under it.
        decode: ids of the others.
        moves: ids of those whose role would change.
        saves: seconds that it would save a request, in the mean.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    moves: tuple[str, ...]
    saves: float


@dataclass(frozen=True, slots=True)
class Assessment:
    """The Price of Anarchy of a window.

    Attributes:
        anarchy: calibrated (`pigou.games.price_of_anarchy.calibrated`).
        legacy: the paper's index (`LegacyEstimator`); neither a bound nor an estimate.
        requests: that were scored.
        by_worker: observed over best seconds of the requests that each worker computed a part of.
        split: a better split than the present one; None where there is none.
    """

    anarchy: PriceOfAnarchy
    legacy: float
    requests: int
    by_worker: Mapping[str, float] = field(default_factory=dict)
    split: Split | None = None
