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
#: Lines of a head's side data: positions (as int32 bits), the policy's fields from the first on,
#: which is the mass where attention is watched, and the field behind it.
POSITION_LINE = 0
FIRST_FIELD_LINE = MASS_LINE = 1
AFTER_MASS_LINE = 2

#: Returns by entry, shape (layers, kv_heads, entries), or (entries,) for whole tokens.
Returns = NDArray[np.floating]
Floats = NDArray[np.float32]


class NoTokenPolicyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy without parameters."""


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """What a policy knows of where it works."""

    config: EvictionConfig
    model: ModelConfig
    folder: Path  # of the model's files
    turns: Tensor  # rotary table by position (`pigou.runtime.models.rotary_embedding.rotary_table`)


@dataclass(frozen=True, slots=True)
class Folding:
    """How the mass that entries gathered is taken into their other fields, and cleared.

    It happens before the query at each position that differs from the prompt's length by a
    multiple of `interval`, in prompts as in what follows.
    """

    interval: int  # queries from one time to the next, at least 1
    # field k behind the mass becomes `decays[k]` times itself, plus the mass.
    decays: tuple[float, ...] = ()
    # where above 0, the field behind the mass becomes the clock instead, if the mass is at least
    # this multiple of an even share.
    notable: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheEntries:
    """The cache entries of one row, as a policy sees them."""

    data: Floats  # positions (as int32 bits), then fields, shape (layers, kv_heads, 1 + fields, n)
    names: tuple[str, ...]
    next: int  # position of the row's next token
    since: int  # queries since the last fold
    clock: int  # steps that the executor has done
    request: str  # id of the row's request

    @property
    def positions(self) -> Ints:
        """Original position of each entry, shape (layers, kv_heads, n)."""
        return self.data.view(np.int32)[:, :, POSITION_LINE]

    @property
    def age(self) -> Ints:
        """Tokens since each entry's own, at least 1, shape (layers, kv_heads, n)."""
        ages: Ints = self.next - self.positions
        return ages

    def field(self, name: str) -> Floats:
        """Return a field, a view, shape (layers, kv_heads, n)."""
        return self.data[:, :, FIRST_FIELD_LINE + self.names.index(name)]


class RowEntries(NamedTuple):
    """The cache entries of one row, where they lie in a CPU's memory."""

    # the cache, shape (blocks, layers, 2, kv_heads, head_dim * size), bfloat16 as uint16.
    kv: NDArray[Any]
    numbers: Floats  # side data (`EntryStats.numbers`)
    table: Ints  # block ids of the row
    entries: int
    following: int  # position of its next token
    since: int  # queries since the last fold
    stop: int  # position from which on entries may not go yet


class PredictedReturns(NamedTuple):
    """What a row's entries will return."""

    scores: Returns  # as `TokenPolicy.score` has them; layers and KV heads may be one axis
    positions: Ints  # of the entries in each layer and KV head, whose axes may be one, too


class TokenPolicy:
    """Tells what a cache entry will still return; entries of the lowest return go first.

    It is made as `Policy(setting, params)`, where `params` is of the type `Params`. Returns are
    compared among all requests, and added up over the entries of a block: one unit for all.
    """

    #: The type of its parameters, a frozen `msgspec.Struct` with defaults.
    Params: type[msgspec.Struct] = NoTokenPolicyParams
    #: Numbers kept for each entry. The first is "mass" where attention is to be watched: the
    #: probabilities that the queries of its KV head gave it since the last fold.
    fields: tuple[str, ...] = ()
    #: How the mass is taken into the fields behind it; None: it adds up.
    folding: Folding | None = None
    #: Fields that are set to the clock when an entry is made.
    stamped: tuple[str, ...] = ()
    #: Whether entries can be scored by `predict`, and summed up by `summarize`.
    compiled: bool = False
    #: Successive fields that `birth` yields; NaN before.
    summary_fields: tuple[str, ...] = ()
    #: Successive fields that `from_logits` yields; NaN where a token was not computed here.
    logit_fields: tuple[str, ...] = ()
    #: Whether tokens that are worth their price again are computed again; whole tokens only.
    recomputes: bool = False
    #: What computing a token again costs, in the unit of returns (delta of Token-PD, Eq. 2).
    penalty: float = 0.0

    def __init__(self, setting: EvictionContext, params: msgspec.Struct) -> None:
        self.setting = setting
        self.params = params

    def score(self, entries: CacheEntries) -> Returns:
        """Return what each entry will return, finite.

        Shape (layers, kv_heads, n); or (n,), if tokens go whole, in all layers and heads.
        """
        raise NotImplementedError

    def scores(self, rows: Sequence[CacheEntries]) -> list[Returns]:
        """Return the `score` of each of several rows; a policy may compute them together."""
        return [self.score(entries) for entries in rows]

    def predict(self, row: RowEntries) -> PredictedReturns:
        """Return the `score` of a row's entries by compiled kernels, which read them in place.

        Where `compiled`, in place of `birth` and `score`. Scores of entries that may not go yet
        mean nothing.
        """
        raise NotImplementedError

    def summarize(self, row: RowEntries) -> None:
        """Put what `birth` yields into the side data of a row, as `predict` does.

        Before entries move: new ones lie side by side as long as they have not.
        """

    def birth(self, keys: Tensor, values: Tensor, positions: Ints) -> Tensor:
        """Return the `summary_fields` of new entries, shape (layers, kv_heads, n, fields).

        `keys`, rotated, and `values` are float32, (layers, kv_heads, n, head_dim).
        """
        raise NotImplementedError

    def from_logits(self, logits: Tensor) -> Tensor:
        """Return the `logit_fields` of tokens, shape (n, fields), in the step that stores them.

        `logits` are those of the tokens after them, shape (n, vocab).
        """
        raise NotImplementedError


def load(name: str, setting: EvictionContext) -> TokenPolicy:
    """Return a policy by its name in the entry point group `pigou.token_eviction`.

    Raises ConfigError: there is none of that name, or a parameter is unknown or does not fit.
    """
    return make(named(GROUP, name, "eviction.policy"), setting, name)


def make(kind: Any, setting: EvictionContext, name: str = "") -> TokenPolicy:
    """Return a new policy of this class, with the parameters of the setting's configuration.

    Raises ConfigError: a parameter is not there, or its value does not fit.
    """
    values = dict(setting.config.params)
    try:
        params = msgspec.convert(values, kind.Params, strict=False)
        policy: TokenPolicy = kind(setting, params)
    except (msgspec.ValidationError, ValueError) as error:
        reason = wrong(error, kind.Params, values)
        raise ConfigError(f"token eviction {name or kind.__name__}: {reason}") from None
    return policy
