"""The interface of timing models: how long a step of a worker takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.engine.plan import Plan
from pigou.request import Ints, Nanos


class StepShape(msgspec.Struct):
    """What one step computes; entry i is one sequence."""

    counts: Ints  # tokens that it computes, shape (n,); 1 for a decode
    kv_lens: Ints  # its cache entries before the step, shape (n,)
    samples: np.ndarray  # whether it yields a token, shape (n,)
    # key of the random variation of the (first) step; None for the mean time.
    step_key: StepKey | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the whole step."""
        return int(self.counts.sum())


class Timing(Protocol):
    """Seconds of computation, as integer nanoseconds."""

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the time of each of `repeat` steps, shape (repeat,), at least 1 ns each.

        The array is new, and the caller's to write to.

        Step i is the same batch i steps later: with i times its `counts` more cache entries. The
        vector equals, to the last digit, what `repeat` calls for one step each would return.
        """
        ...


@bare_kernel
def accumulate(times: Nanos, start: int) -> None:
    """Turn durations of steps into their end times, in place; the first begins at `start`."""
    end = start
    for i in range(times.shape[0]):
        end += times[i]
        times[i] = end


_MASK = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class StepKey(NamedTuple):
    """Key of the random variation of a worker's step, and of the steps after it."""

    key: int
    step: int  # steps that it computed before
    age: int  # decode-only steps of the same sequences right before

    def uniforms(self, repeat: int) -> NDArray[np.float64]:
        """Return a number in [0, 1) for each of `repeat` steps, shape (repeat,).

        Each depends on the key and its step alone: SplitMix64's output function (Steele, Lea,
        Flood 2014), once for each; the top 52 bits.
        """
        start = (_mix(self.key & _MASK) + self.step) & _MASK
        state = np.uint64(start) + np.arange(repeat, dtype=np.uint64) + np.uint64(_STRIDE)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
        state ^= state >> np.uint64(31)
        return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52


class StepKeys:
    """Makes the keys of one worker's plans, however many steps a plan has."""

    def __init__(self, seed: int, number: int) -> None:
        self._key = _mix(_mix(seed & _MASK) + number)
        self._rows: Ints | None = None
        self._since = 0

    def of(self, plan: Plan, step: int) -> StepKey:
        """Return the key of a plan's first step, before which the worker computed `step` steps."""
        rows = plan.rows
        if plan.started or plan.preempted or int(plan.counts.max()) > 1:
            self._rows = None
            return StepKey(self._key, step, 0)
        if self._rows is None or not np.array_equal(self._rows, rows):
            self._since = step
        self._rows = rows
        return StepKey(self._key, step, step - self._since)


def varies(timing: Any) -> bool:
    """Whether a timing model has random variation, and needs step keys."""
    return bool(getattr(timing, "varies", False))


def _mix(key: int) -> int:
    state = (key + _STRIDE) & _MASK
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)


@dataclass(frozen=True, slots=True)
class Slowed:
    """A timing model whose steps all take `factor` times as long."""

    timing: Timing
    factor: float

    @property
    def varies(self) -> bool:
        """Whether it has random variation."""
        return varies(self.timing)

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        nanos = self.timing.durations(batch, repeat) * self.factor
        slowed: Nanos = np.maximum(1, np.rint(nanos)).astype(np.int64)
        return slowed


def step_end_times(
    timing: Timing, now: int, plan: Plan, repeat: int, step_key: StepKey | None = None
) -> Nanos:
    """Return when each of a plan's steps ends, nanoseconds, (repeat,)."""
    end_times = timing.durations(
        StepShape(plan.counts, plan.kv_lens, plan.samples, step_key), repeat
    )
    accumulate(end_times, now)
    return end_times
