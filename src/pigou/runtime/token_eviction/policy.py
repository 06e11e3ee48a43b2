"""The interface of token eviction policies, and their registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pigou.config import ConfigError, EvictionConfig, wrong
from pigou.registry import named
from pigou.request import Ints
from pigou.runtime.models.model_config import ModelConfig

GROUP = "pigou.token_eviction"
#: Lines of a head's side data: positions (int32 bits), then the policy's fields; the first is the
#: mass if attention is watched, followed by the field that it folds into.
POSITION_LINE = 0
FIRST_FIELD_LINE = MASS_LINE = 1
AFTER_MASS_LINE = 2

#: Returns by entry, shape (layers, kv_heads, entries), or (entries,) for whole tokens.
Returns = NDArray[np.floating]
Floats = NDArray[np.float32]


class NoTokenPolicyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a policy without any."""


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """Model and configuration that a policy is built for."""

    config: EvictionConfig
    model: ModelConfig
    folder: Path  # model files
    turns: Tensor  # rotary table by position (`pigou.runtime.models.rotary_embedding.rotary_table`)


@dataclass(frozen=True, slots=True)
class Folding:
    """Folds mass into other fields and clears it, every `interval` queries from prompt end."""

    interval: int  # queries between folds, at least 1
    # field k after the mass becomes `decays[k]` * field k + mass.
    decays: tuple[float, ...] = ()
    # if above 0, the field after the mass is set to the clock instead, once the mass reaches this
    # multiple of a uniform share.
    notable: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheEntries:
    """The cache entries of one row, gathered."""

    data: Floats  # positions (as int32 bits), then fields, shape (layers, kv_heads, 1 + fields, n)
    names: tuple[str, ...]
    next: int  # position of the row's next token
    since: int  # queries since the last fold
    clock: int  # executor steps so far
    request: str  # request id

    @property
    def positions(self) -> Ints:
        """Original position of each entry, shape (layers, kv_heads, n)."""
        return self.data.view(np.int32)[:, :, POSITION_LINE]

    @property
    def age(self) -> Ints:
        """Tokens since each entry's own, >= 1, shape (layers, kv_heads, n)."""
        ages: Ints = self.next - self.positions
        return ages

    def field(self, name: str) -> Floats:
        """Return a view of a field, shape (layers, kv_heads, n)."""
        return self.data[:, :, FIRST_FIELD_LINE + self.names.index(name)]


class RowEntries(NamedTuple):
    """The cache entries of one row, in place in CPU memory."""

    # the cache, shape (blocks, layers, 2, kv_heads, head_dim * size), as `widen` reads them.
    kv: NDArray[Any]
    scales: NDArray[Any]  # bfloat16 as uint16 (`KVCache.scales`)
    numbers: Floats  # side data (`EntryStats.numbers`)
    table: Ints  # block ids of the row
    entries: int
    following: int  # position of its next token
    since: int  # queries since the last fold
    stop: int  # first protected position


class PredictedReturns(NamedTuple):
    """Predicted returns of a row's entries."""

    scores: Returns  # as from `TokenPolicy.score`; layers and KV heads may share an axis
    positions: Ints  # entry positions per layer and KV head; these may share an axis


class TokenPolicy:
    """Predicts the return of cache entries, in one unit for all requests; the lowest go first."""

    #: Parameter type: a frozen `msgspec.Struct` with defaults.
    Params: type[msgspec.Struct] = NoTokenPolicyParams
    #: Numbers stored per entry. A first field "mass" enables attention tracking: the sum of
    #: probabilities from its KV head's queries since the last fold.
    fields: tuple[str, ...] = ()
    #: How mass is folded into the next fields; None accumulates.
    folding: Folding | None = None
    #: Fields set to the clock on entry creation.
    stamped: tuple[str, ...] = ()
    #: Whether `predict` and `summarize` are implemented.
    compiled: bool = False
    #: Contiguous fields set by `birth`; NaN before.
    summary_fields: tuple[str, ...] = ()
    #: Contiguous fields set by `from_logits`; NaN if the token was not computed here.
    logit_fields: tuple[str, ...] = ()
    #: Whether tokens are recomputed once worth their price; whole tokens only.
    recomputes: bool = False
    #: Cost of recomputing a token, in returns (delta of Token-PD, Eq. 2).
    penalty: float = 0.0

    def __init__(self, setting: EvictionContext, params: msgspec.Struct) -> None:
        self.setting = setting
        self.params = params

    def score(self, entries: CacheEntries) -> Returns:
        """Return finite scores, (layers, kv_heads, n), or (n,) to evict whole tokens."""
        raise NotImplementedError

    def scores(self, rows: Sequence[CacheEntries]) -> list[Returns]:
        """Score several rows; override to batch them."""
        return [self.score(entries) for entries in rows]

    def predict(self, row: RowEntries) -> PredictedReturns:
        """Score in place by kernels, if `compiled`, instead of `birth` and `score`."""
        raise NotImplementedError

    def summarize(self, row: RowEntries) -> None:
        """Store the `birth` fields of a row's new entries, before compaction moves any."""

    def birth(self, keys: Tensor, values: Tensor, positions: Ints) -> Tensor:
        """Return `summary_fields` of new entries' rotated keys and values, (..., n, fields)."""
        raise NotImplementedError

    def from_logits(self, logits: Tensor) -> Tensor:
        """Return `logit_fields` of tokens, (n, fields), given next-token logits (n, vocab)."""
        raise NotImplementedError


def load(name: str, setting: EvictionContext) -> TokenPolicy:
    """Load a policy by its entry point `pigou.token_eviction`; raises ConfigError if invalid."""
    return make(named(GROUP, name, "eviction.policy"), setting, name)


def make(kind: Any, setting: EvictionContext, name: str = "") -> TokenPolicy:
    """Instantiate a policy with its configured parameters; raises ConfigError if one is invalid."""
    values = dict(setting.config.params)
    try:
        params = msgspec.convert(values, kind.Params, strict=False)
        policy: TokenPolicy = kind(setting, params)
    except (msgspec.ValidationError, ValueError) as error:
        reason = wrong(error, kind.Params, values)
        raise ConfigError(f"token eviction {name or kind.__name__}: {reason}") from None
    return policy
