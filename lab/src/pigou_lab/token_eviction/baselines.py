"""Policies of the literature, and the two ends of the scale: chance, and knowledge."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import msgspec
import numpy as np

from pigou.config import ConfigError
from pigou.runtime.token_eviction.entry_stats import pool
from pigou.runtime.token_eviction.policy import (
    CacheEntries,
    EvictionContext,
    Folding,
    Returns,
    TokenPolicy,
)

#: Orders tokens of one step behind the step itself; contexts are shorter.
_WITHIN = 2.0**20


class Fifo(TokenPolicy):
    """First in, first out over all sequences, by whole tokens: the paper's FIFO."""

    fields = ("entered",)
    stamped = ("entered",)

    def score(self, entries: CacheEntries) -> Returns:
        """Return a token's storing step, then its position."""
        entered = entries.field("entered")[0, 0].astype(np.float64)
        scores: Returns = entered * _WITHIN + entries.positions[0, 0]
        return scores


class Streaming(TokenPolicy):
    """Keeps each request's first and last tokens (StreamingLLM, 2309.17453): score 1 / age."""

    def score(self, entries: CacheEntries) -> Returns:
        """Return 1 / age."""
        scores: Returns = 1.0 / entries.age[0, 0]
        return scores


class LruParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `Lru`."""

    # attention, as a multiple of an even share over all entries, that counts as use.
    notable: float = 1.0
    interval: int = 8  # queries over which it is taken

    def __post_init__(self) -> None:
        _above("notable", self.notable)
        _above("interval", self.interval)


class Lru(TokenPolicy):
    """Evicts the least recently attended entry: at least `notable` times an even share."""

    Params = LruParams
    fields = ("mass", "used")
    stamped = ("used",)

    def __init__(self, setting: EvictionContext, params: LruParams) -> None:
        super().__init__(setting, params)
        self.folding = Folding(params.interval, notable=params.notable)

    def score(self, entries: CacheEntries) -> Returns:
        """Return the step of the last use, and within it the position."""
        used = entries.field("used").astype(np.float64)
        scores: Returns = used * _WITHIN + entries.positions
        return scores


class H2O(TokenPolicy):
    """Keeps heavy hitters by cumulative attention, per layer and KV head (H2O, 2306.14048)."""

    fields = ("mass",)

    def score(self, entries: CacheEntries) -> Returns:
        """Return the accumulated attention."""
        return entries.field("mass")


class SnapKVParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `SnapKV`."""

    window: int = 32  # last queries whose attention counts
    pool: int = 5  # width of the average over neighbouring positions, odd

    def __post_init__(self) -> None:
        _above("window", self.window)
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool is {self.pool}; it must be odd, at least 1")


class SnapKV(TokenPolicy):
    """Keeps what the last `window` queries attended to (SnapKV, 2404.14469), pooled."""

    Params = SnapKVParams
    fields = ("mass", "before")

    def __init__(self, setting: EvictionContext, params: SnapKVParams) -> None:
        super().__init__(setting, params)
        self.window, self.pool = params.window, params.pool
        self.folding = Folding(params.window, decays=(0.0,))

    def score(self, entries: CacheEntries) -> Returns:
        """Return the attention of the last `window` queries, averaged over neighbours."""
        rest = np.float32(1.0 - min(entries.since, self.window) / self.window)
        mass = entries.field("mass") + rest * entries.field("before")
        scores = np.empty_like(mass)
        pool(mass, entries.positions, entries.next, self.pool, scores)
        return scores


class RandomParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `Random`."""

    seed: int = 0


class Random(TokenPolicy):
    """Chance: in each layer and head another number, drawn anew at each scoring."""

    Params = RandomParams

    def __init__(self, setting: EvictionContext, params: RandomParams) -> None:
        super().__init__(setting, params)
        self._seed = params.seed

    def score(self, entries: CacheEntries) -> Returns:
        """Return numbers from 0 to 1, the same for the same seed, request and length."""
        seed = (self._seed, crc32(entries.request.encode()), entries.next)
        return np.random.default_rng(seed).random(entries.positions.shape)


class Oracle(TokenPolicy):
    """Known future returns: set `scorer` before the first scoring."""

    #: From entries to returns, as `TokenPolicy.score`.
    scorer: Callable[[CacheEntries], Returns] | None = None

    def score(self, entries: CacheEntries) -> Returns:
        """Return the scores of `scorer`; raises ConfigError if none is set."""
        if self.scorer is None:
            raise ConfigError("eviction.policy is 'oracle', which knows nothing until it is told")
        return self.scorer(entries)


def _above(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be above 0")
