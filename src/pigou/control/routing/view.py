"""The fleet as policies see it: vectors with one entry per worker, and candidate pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.control.latency_model.estimates import Estimates
from pigou.control.lengths import Prediction
from pigou.control.state import Columns, PrefillBacklog
from pigou.request import Counts, Flags, Ints, Shares

_NOTHING: Counts = np.zeros(0, dtype=np.int64)
#: Fields that are no arrays of workers.
_SCALARS = ("fetches", "adapters", "backlog", "now", "lengths")


class RemoteFetches(msgspec.Struct, eq=False):
    """What each worker would fetch to compute the prompt, (workers,)."""

    source: Counts  # row of the worker to fetch from; -1 for no fetch
    ready: Counts  # leading tokens without prefill: fetched, or cached in any tier
    host: Counts  # own blocks to load from host memory
    storage: Counts  # own blocks to load from disk and object storage
    seconds: Shares  # duration of the fetch, 0 for none
    saves: Shares  # net seconds saved by the fetch, 0 for none


class AdapterPrices(msgspec.Struct, eq=False):
    """Seconds of each worker to load the request's LoRA adapter, (workers,)."""

    load_s: Shares  # until the request may start; 0 where it is loaded
    displaced_s: Shares  # expected seconds to load again what it evicts


class FleetView(Columns, eq=False):
    """Load and cache of each worker, shape (workers,); read-only, valid for one decision."""

    ids: tuple[str, ...]  # names of the workers, in order
    overlap: Counts  # leading blocks of the prompt cached in any tier
    device: Counts  # overlap blocks on the device
    host: Counts  # overlap blocks in host memory at best
    storage: Counts  # overlap blocks on disk or in an object store at best
    recomputed_share: Shares  # evicted and recomputed blocks per stored block
    estimates: Estimates  # learned speeds
    output: float  # expected output tokens
    # remote KV fetches of each worker; None if no worker fetches.
    fetches: RemoteFetches | None = None
    adapters: AdapterPrices | None = None  # None without an adapter
    # each worker's prompt under way, and its start; None if unknown.
    backlog: PrefillBacklog | None = None
    now: int = 0  # nanoseconds
    lengths: Prediction | None = None  # the request's output; None for the mean of all
    _counted: Counts | None = None
    _prompt: int = 0
    _cached: Counts = _NOTHING
    _max_cached: int = 0

    def cached(self, prompt: int) -> Counts:
        """Return the cached tokens of a prompt on each worker, one left to compute."""
        if self._counted is not self.overlap or prompt != self._prompt:
            self._count(prompt)
        return self._cached

    def resident(self, prompt: int) -> Counts:
        """Return the tokens of a prompt on each worker's device, (workers,)."""
        tokens: Counts = np.minimum(self.device * self.block_size, max(0, prompt - 1))
        return tokens

    def resident_on(self, row: int, prompt: int) -> int:
        """Return the tokens of a prompt on the device of worker `row`."""
        return min(self.device.item(row) * self.block_size.item(row), max(0, prompt - 1))

    def max_cached(self, prompt: int) -> int:
        """Return the maximum of cached tokens of a prompt over workers."""
        if self._counted is not self.overlap or prompt != self._prompt:
            self._count(prompt)
        return self._max_cached

    def _count(self, prompt: int) -> None:
        self._counted, self._prompt = self.overlap, prompt
        self._cached = np.empty(len(self.overlap), dtype=np.int64)
        self._max_cached = cached_tokens(self.overlap, self.block_size, prompt, self._cached)

    @classmethod
    def of(cls, workers: int, **columns: Any) -> Self:
        """Return an idle fleet's view with the given columns; blocks of 16 tokens by default."""
        values: dict[str, Any] = {
            "ids": tuple(f"w{row}" for row in range(workers)),
            "prefills": np.ones(workers, dtype=np.bool_),
            "decodes": np.ones(workers, dtype=np.bool_),
            "block_size": np.full(workers, 16, dtype=np.int64),
            "estimates": Estimates.prior(workers),
            "output": 1.0,
        }
        for name, annotation in {**Columns.__annotations__, **cls.__annotations__}.items():
            kind = np.float64 if annotation == "Shares" else np.int64
            if name in columns:
                value = columns.pop(name)
                values[name] = np.asarray(value, dtype=kind) if isinstance(value, list) else value
            elif name not in values and not name.startswith("_") and name not in _SCALARS:
                values[name] = np.zeros(workers, dtype=kind)
        if columns:
            raise TypeError(f"FleetView has no column {', '.join(sorted(columns))}")
        if not values["device"].any() and not values["host"].any() and not values["storage"].any():
            values["device"] = values["overlap"]
        return cls(**values)


@bare_kernel
def cached_tokens(
    overlap: NDArray[np.int64], block_size: NDArray[np.int64], prompt: int, out: NDArray[np.int64]
) -> int:
    """Write the cached tokens of a prompt per worker; return the maximum."""
    limit = max(0, prompt - 1)
    max_tokens = 0
    for i in range(overlap.shape[0]):
        out[i] = min(overlap[i] * block_size[i], limit)
        max_tokens = max(max_tokens, out[i])
    return max_tokens


@dataclass(frozen=True, slots=True)
class Candidates:
    """Pairs to choose from, (candidates,) each; shared by many decisions."""

    prefill: Ints  # row of the prefill worker; -1 for local prefill
    decode: Ints  # row of the decode worker

    def __len__(self) -> int:
        return int(self.decode.size)

    @property
    def local(self) -> Flags:
        """True where prefill is local, (candidates,)."""
        local: Flags = self.prefill < 0
        return local

    @property
    def computes(self) -> Ints:
        """Index of the worker that computes the prompt, (candidates,)."""
        rows: Ints = np.where(self.local, self.decode, self.prefill)
        return rows
