"""Samples of traces: a part of the sessions, a window of time, another size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pigou.config import ConfigError
from pigou.workload.trace import Trace, ordered


def window(trace: Trace, begin: float, end: float) -> Trace:
    """Return the sessions that start in [begin, end) seconds, moved to 0.

    Raises:
        ConfigError: none does.
    """
    kept = [each for each in trace.sessions if begin <= each.start < end]
    if not kept:
        last = trace.sessions[-1].start
        raise ConfigError(f"no session starts in [{begin:g}, {end:g}); the last does at {last:g} s")
    return ordered(trace.block, kept)


def some(trace: Trace, sessions: int, rng: np.random.Generator) -> Trace:
    """Return so many of the sessions, drawn without replacement, at their own times.

    Raises:
        ConfigError: there are not as many.
    """
    if not 1 <= sessions <= len(trace.sessions):
        raise ConfigError(f"sessions is {sessions}; it must be in [1, {len(trace.sessions)}]")
    chosen = np.sort(rng.choice(len(trace.sessions), sessions, replace=False))
    return replace(trace, sessions=tuple(trace.sessions[i] for i in chosen.tolist()))
