"""How many threads compute, and how they wait. Nothing is left to the libraries' guesses."""

from __future__ import annotations

import os
import sys

#: Variables that the libraries read once, when they are loaded.
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
#: A thread that has done its part looks out for more before it sleeps, for some ten microseconds
#: up to a tenth of a millisecond, by the processor: about as long as waking it would take. Longer
#: would take its core from the other processes.
_WAITING = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "PASSIVE"}


def environment(threads: int) -> dict[str, str]:
    """Return the variables for a process that computes with so many threads (at least 1)."""
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    return {**dict.fromkeys(_COUNTS, str(threads)), **_WAITING}


def prepare_environment(threads: int) -> None:
    """Set the variables of `environment` in this process.

    Raises:
        RuntimeError: torch is loaded already, and would not see them.
    """
    if "torch" in sys.modules:
        raise RuntimeError("prepare_environment must be called before torch is imported")
    os.environ.update(environment(threads))


def set_threads(threads: int) -> None:
    """Make torch compute with so many threads, one operation at a time."""
    import torch

    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    torch.set_num_threads(threads)
