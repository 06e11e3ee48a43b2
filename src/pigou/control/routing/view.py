"""The fleet as policies see it: vectors with one entry per worker, and candidate pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.control.latency_model.estimates import Estimates
from pigou.control.state import PrefillBacklog
from pigou.request import Ints

Counts = NDArray[np.int64]
Shares = NDArray[np.float64]
Flags = NDArray[np.bool_]

_NOTHING: Counts = np.zeros(0, dtype=np.int64)
#: Fields that are no arrays of workers.
_SCALARS = ("fetches", "backlog", "now")


class RemoteFetches(msgspec.Struct, eq=False):
    """What each worker would fetch to compute the prompt, (workers,)."""

    source: Counts  # row of the worker that it fetches from; -1 where it does better without
    ready: Counts  # leading tokens that it would not compute: fetched, or its own in any tier
    host: Counts  # blocks of its own that it would bring back from host memory
    storage: Counts  # the same from disk and object storage
    seconds: Shares  # that fetching takes, 0 where it does not
    saves: Shares  # seconds that fetching saves, its own taken off; 0 where it does not


class FleetView(msgspec.Struct, eq=False):
    """Load of each worker, shape (workers,); read-only, valid for one decision."""

    ids: tuple[str, ...]  # names of the workers, in order
    prefills: Flags  # whether prompts may be sent here for another worker to decode
    decodes: Flags  # whether streams may run here
    prefill_requests: Counts  # prompts that are to be computed, or are being computed
    prefill_tokens: Counts  # their tokens that are not cached there
    prefill_pairs: Counts  # pairs of those with the tokens before them
    decode_requests: Counts  # streams that run, or are about to
    decode_tokens: Counts  # their tokens, prompt and output
    served: Counts  # requests that were ever sent here to decode
    running: Shares  # requests that the worker says it runs
    waiting: Shares  # requests that the worker says wait there
    kv_usage: Shares  # share of its KV blocks in use, 0 to 1, as the worker says
    overlap: Counts  # leading blocks of this request's prompt that the worker holds, in any tier
    device: Counts  # those of them that are in device memory
    host: Counts  # those that are only in host memory, or below
    storage: Counts  # those that are only on disk, or in an object store
    recomputed_share: Shares  # blocks evicted there and computed again, for each that is stored
    block_size: Counts  # tokens in a block
    blocks: Counts  # KV blocks that it has, 0 when unknown
    estimates: Estimates  # what was learned of each worker's speed
    output: float  # tokens that this request is expected to generate
    # number of its cache's layout; workers of one may fetch from each other, 0 from none.
    layout: Counts = _NOTHING
    # number of its deployment's version; KV moves between workers of one alone.
    version: Counts = _NOTHING
    # what each worker would fetch from another's cache; None where nobody does.
    fetches: RemoteFetches | None = None
    # which of each worker's prompts is under way, and since when; None where unknown.
    backlog: PrefillBacklog | None = None
    now: int = 0  # nanoseconds
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
        for name, annotation in cls.__annotations__.items():
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

    @property
    def active_blocks(self) -> Counts:
        """KV blocks in use by streams of each worker, (workers,)."""
        blocks: Counts = -(-self.decode_tokens // self.block_size)
        return blocks


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

    prefill: Ints  # index of the worker that computes the prompt; -1 where `decode` does
    decode: Ints  # index of the worker that streams

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
