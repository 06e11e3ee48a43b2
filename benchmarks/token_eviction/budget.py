"""How many entries a share of the full cache is."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.token_eviction.task import Task


@dataclass(frozen=True)
class Budget:
    """Entries that attention may work on in each layer and KV head of a row."""

    share: float
    most: int  # entries, a multiple of the chunk
    after: int  # entries that a cut leaves: of a streamed row a chunk less, as the next one follows


def budget(task: Task, share: float) -> Budget:
    """Return a share of the full cache of a task, in whole chunks.

    Raises:
        ValueError: it is less than two chunks.
    """
    full = task.whole or task.length // task.chunk * task.chunk
    most = round(full * share / task.chunk) * task.chunk
    if most < 2 * task.chunk:
        raise ValueError(f"{share:.1%} of {full} entries is {most}; it must be {2 * task.chunk}")
    return Budget(share, most, most if task.whole else most - task.chunk)
