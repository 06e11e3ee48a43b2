"""Block hashes of simulated prompts: chains over the ids of a trace's blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import kernel
from pigou.request import BlockHashes
from pigou.sim.workload import Job

#: Scope of prompts that no other shares; scopes of workloads are other numbers.
_ALONE = 2**63
_MASK = 2**64 - 1


def block_hashes(job: Job, number: int, size: int) -> BlockHashes:
    """Return hashes of the full blocks of a job's prompt, shape (input // size, 2).

    A block's hash is that of all ids of the trace up to the one that holds its last token, and of
    its place. So prompts share the blocks of their common ids, and the ids of a trace are trusted.

    Args:
        job: whose blocks; one without ids shares nothing with others.
        number: of the request, which stands for its content where it has no ids.
        size: tokens in a block.
    """
    found = np.empty((job.input // size, 2), dtype=np.uint64)
    if job.blocks:
        ids = np.array(job.blocks, dtype=np.int64).view(np.uint64)
        _chained(ids, np.uint64(job.scope & _MASK), job.block, size, found)
    else:
        _chained(np.array([number], np.uint64), np.uint64(_ALONE), 1.0, size, found)
    return found


@kernel
def _chained(
    ids: NDArray[np.uint64], scope: np.uint64, block: float, size: int, found: NDArray[np.uint64]
) -> None:
    # SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
    one, two = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
    golden, other = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
    a, b, c = np.uint64(30), np.uint64(27), np.uint64(31)
    state = scope * golden + golden
    known = -1
    for i in range(len(found)):
        want = min(int(((i + 1) * size - 1) / block), len(ids) - 1)
        while known < want:
            known += 1
            state = state ^ (ids[known] + other)
            state = (state ^ (state >> a)) * one
            state = (state ^ (state >> b)) * two
            state = (state ^ (state >> c)) + golden
        for half in range(2):
            word = state + np.uint64(i + 1) * (golden if half else other)
            word = (word ^ (word >> a)) * one
            word = (word ^ (word >> b)) * two
            word = word ^ (word >> c)
            found[i, half] = word if word else np.uint64(1)
