"""Compiles, or loads from their cache, the kernels that the first requests would wait for."""

from __future__ import annotations

import numpy as np

from pigou.engine.plan import Plan, Started
from pigou.runtime.executor import TorchExecutor
from pigou.runtime.spread import always_spread
from pigou.sampling import SamplingParams

#: Length of the sequence that it computes.
WARM_UP_TOKENS = 4
_REQUEST = "warm-up"


def warm_up(executor: TorchExecutor) -> None:
    """Compute a few tokens of nothing in block 0, before the core's first plan."""
    _run(executor)
    with always_spread():
        _run(executor)


def _run(executor: TorchExecutor) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    executor.add(_REQUEST, [0, 0], params, b"")
    executor.execute(_plan(start=0, count=2))
    executor.execute(_plan(start=2, count=1))
    executor.drop(_REQUEST)


def _plan(start: int, count: int) -> Plan:
    starts = np.array([start], dtype=np.int32)
    return Plan(
        rows=np.zeros(1, dtype=np.int32),
        starts=starts,
        counts=np.array([count], dtype=np.int32),
        kv_lens=starts.copy(),
        samples=np.ones(1, dtype=np.bool_),
        started=[Started(_REQUEST, 0, 0)] if start == 0 else [],
    )
