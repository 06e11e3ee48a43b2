"""Reuse model: hazards of reuse by age, learned from sampled blocks."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from pigou.config import check_bounds
from pigou.request import SECOND

Table = NDArray[np.float64]

#: Bins of age: [0, FIRST_S), then edges that grow by GROWTH.
FIRST_S = 0.5
GROWTH = 2.0
BINS = 20
#: Nanoseconds within which repeated uses count once: requests of one burst, and offers of one
#: chain block by block.
AT_ONCE = SECOND // 2
_EDGES = FIRST_S * GROWTH ** np.arange(BINS)
_WIDTHS = np.diff(_EDGES, prepend=0.0)
_SCALE = 1.0 / (FIRST_S * SECOND)
#: Classes by uses: 1, 2, 3, 4, 5-6, 7-9, 10-15, 16 and more.
_CLASS = [0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6]
CLASSES = 8
#: Upper bound of hazards, so that survival is never 0.
_MAX_HAZARD = 0.98


def age_bin(age: int) -> int:
    """Return the bin of an age in nanoseconds."""
    ratio = age * _SCALE
    return 0 if ratio < 1.0 else min(BINS - 1, math.frexp(ratio)[1])


def use_class(uses: int) -> int:
    """Return the class of a number of uses, at least 1."""
    return _CLASS[uses] if uses < 16 else CLASSES - 1


class ReuseModel:
    """Rate of reuse by number of uses (class c) and age (bin k), from d reuses among n lifetimes.

        q(c, k) = (d + prior * q(c - 1, k)) / (n + prior)
        rate(c, k) = max over j of P(used by the end of j) / E[seconds held until then]

    q is the hazard (Kaplan and Meier 1958, with shrinkage), rate a Gittins index (Gittins 1979;
    Beckmann et al., NSDI '18). One in `sample` keys is followed; `decay` discounts old counts.
    """

    def __init__(self, sample: int, prior: float, decay: float, followed: int) -> None:
        if sample < 1 or sample & (sample - 1) or sample > 256:
            raise ValueError(f"sample is {sample}; it must be a power of 2 up to 256")
        check_bounds("prior", prior, gt=0)
        check_bounds("decay", decay, gt=0, le=1)
        check_bounds("followed", followed, gt=0)
        #: A block is sampled if its key's last byte has none of these bits.
        self.mask = sample - 1
        self._prior, self._decay, self._limit = prior, decay, followed
        #: Key to (time of the last use, uses), in LRU order.
        self._seen: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._reused: Table = np.zeros((CLASSES, BINS))
        self._ended: Table = np.zeros((CLASSES, BINS))
        self._uses = 0
        self._due = 256
        self.version = 0  # number of refreshes
        #: By class and bin, 1/s.
        self.rates: list[list[float]] = [[1.0] * BINS for _ in range(CLASSES)]

    def use(self, key: bytes, now: int) -> None:
        """Record a use of a block; repeats within `AT_ONCE` count once."""
        if key[-1] & self.mask:
            return
        before = self._seen.pop(key, None)
        uses = 1
        if before is not None and now - before[0] < AT_ONCE:
            uses = before[1]
        elif before is not None:
            cell = use_class(before[1]), age_bin(now - before[0])
            self._reused[cell] += 1
            self._ended[cell] += 1
            uses = before[1] + 1
        self._seen[key] = (now, uses)
        if len(self._seen) > self._limit:
            _, (last, uses) = self._seen.popitem(last=False)
            self._ended[use_class(uses), age_bin(now - last)] += 1
        self._uses += 1
        if self._uses >= self._due:
            self.refresh(now)

    def refresh(self, now: int) -> None:
        """Compute the rates from the counts until now."""
        hazards = self.hazards(now)
        self.rates = _rates(hazards).tolist()
        self._reused *= self._decay
        self._ended *= self._decay
        self._due = self._uses + max(1000, len(self._seen) // 4)
        self.version += 1

    def hazards(self, now: int) -> Table:
        """Return q, shape (classes, bins): share of blocks reused within a bin."""
        ended = self._ended + self._going(now)
        broken_off = ended - self._reused
        reached = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - 0.5 * broken_off
        below: Table = np.minimum(
            self._reused.sum(axis=0) / np.maximum(reached.sum(axis=0), 1e-9), _MAX_HAZARD
        )
        hazards = np.empty((CLASSES, BINS))
        for uses in range(CLASSES):
            below = (self._reused[uses] + self._prior * below) / (reached[uses] + self._prior)
            hazards[uses] = below = np.minimum(below, _MAX_HAZARD)
        return hazards

    def _going(self, now: int) -> Table:
        """Count unfinished lifetimes by class and current bin."""
        last, uses = np.array(list(self._seen.values()), dtype=np.int64).reshape(-1, 2).T
        ages = (now - last) * _SCALE
        bins = np.where(ages < 1.0, 0, np.minimum(np.frexp(np.maximum(ages, 1.0))[1], BINS - 1))
        classes = np.array([*_CLASS, CLASSES - 1])[np.minimum(uses, len(_CLASS))]
        flat = np.bincount(classes * BINS + bins, minlength=CLASSES * BINS)
        return flat.reshape(CLASSES, BINS).astype(np.float64)


def _rates(hazards: Table) -> Table:
    best = np.zeros((CLASSES, BINS))
    for first in range(BINS - 1):
        alive, held = np.ones(CLASSES), np.zeros(CLASSES)
        for last in range(first, BINS - 1):
            hazard = hazards[:, last]
            held = held + alive * _WIDTHS[last] * (1.0 - 0.5 * hazard)
            alive = alive * (1.0 - hazard)
            best[:, first] = np.maximum(best[:, first], (1.0 - alive) / held)
    best[:, BINS - 1] = best[:, BINS - 2]
    return best
