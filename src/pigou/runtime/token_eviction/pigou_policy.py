"""Eviction policies with a trained predictor: `pigou`, `paper` and `paper-lossy`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from pigou.config import ConfigError
from pigou.request import Ints
from pigou.runtime.token_eviction import predictor as kernels
from pigou.runtime.token_eviction.policy import (
    CacheEntries,
    EvictionContext,
    Floats,
    Folding,
    PredictedReturns,
    Returns,
    RowEntries,
    TokenPolicy,
)
from pigou.runtime.token_eviction.predictor import (
    CONTENT,
    FOLD,
    GENERIC,
    PAPER,
    RETURNS,
    SCALES,
    GenericReturns,
    PaperModel,
    ReturnModel,
    unrotate,
)

#: Bounds the score's factor by exp(61) at the largest sigma (`LOG_SIGMA_BOUNDS`).
MAX_ORDER = 6.0


class PigouParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `pigou`."""

    # exponent of the power mean (E R^order)^(1/order), -6 to 6: 0 is the median, 1 the mean, 2 the
    # RMS. Above 0, uncertainty favours keeping an entry, since eviction cannot be undone.
    # None: 2 in the first half of the layers, whose errors propagate, 3 in the rest, and 0.75 for
    # the generic predictor, whose sigma is less reliable.
    order: float | None = None

    def __post_init__(self) -> None:
        if self.order is not None and not abs(self.order) <= MAX_ORDER:
            raise ValueError(
                f"order is {self.order}; it must be from -{MAX_ORDER:g} to {MAX_ORDER:g}"
            )


def power_orders(given: float | None, layers: int, kv_heads: int, trained: bool) -> Floats:
    """Return the power mean's order, shape (layers, kv_heads)."""
    orders: Floats = np.full((layers, kv_heads), 0.75 if given is None else given, np.float32)
    if given is None and trained:
        orders[: layers // 2], orders[layers // 2 :] = 2.0, 3.0
    return orders


class Pigou(TokenPolicy):
    """Keeps the entries whose eviction would change the attention output most.

    Features: two summary numbers of an entry's key and value, attention mass at three time scales,
    and age. `ReturnModel` predicts mu and sigma of the log of the discounted output change. Score:
    its power mean, exp(mu + order sigma^2 / 2); that is Token-PD's Eq. 4 on the logarithm with
    lambda = -order / 2. Models without a trained predictor use `GenericReturns`.
    """

    Params = PigouParams
    fields = ("mass", "mass_all", "mass_slow", "mass_fast", "content_0", "content_1")
    folding = Folding(FOLD, tuple(math.exp(-FOLD / scale) for scale in SCALES))
    summary_fields = ("content_0", "content_1")

    def __init__(self, setting: EvictionContext, params: msgspec.Struct) -> None:
        super().__init__(setting, params)
        path = setting.folder / RETURNS
        self.model = ReturnModel.load(path) if path.exists() else GenericReturns.load(GENERIC)
        self.scales = torch.tensor(SCALES)
        self.compiled = isinstance(self.model, ReturnModel)
        shape = setting.model.layers, setting.model.kv_heads
        self.order = power_orders(cast(PigouParams, params).order, *shape, self.compiled)

    def predict(self, row: RowEntries) -> PredictedReturns:
        """Score in place by kernels; equals `score` within rounding."""
        self.summarize(row)
        return self._kernels.predict(row, self.order)

    def summarize(self, row: RowEntries) -> None:
        """Summarize a row's new entries."""
        self._kernels.summarize(row, 1 + self.fields.index("content_0"))

    @cached_property
    def _kernels(self) -> CompiledReturns:
        assert isinstance(self.model, ReturnModel), "there are kernels for no other"
        return CompiledReturns(self.model, self.setting.turns)

    def birth(self, keys: Tensor, values: Tensor, positions: Ints) -> Tensor:
        """Summarize entries by key and value."""
        turns = self.setting.turns[torch.from_numpy(positions.astype(np.int64))]
        return self.model.birth(unrotate(keys, turns), values)

    def score(self, entries: CacheEntries) -> Returns:
        """Return the power mean of the discounted output change."""
        return self._returns(*self._features(entries))

    def scores(self, rows: Sequence[CacheEntries]) -> list[Returns]:
        """Score several rows, in one batch if entries are scored independently."""
        if not isinstance(self.model, ReturnModel) or not rows:
            return super().scores(rows)
        parts = [self._features(entries) for entries in rows]
        content, masses, age = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        stops = np.cumsum([entries.data.shape[3] for entries in rows])
        return np.split(self._returns(content, masses, age), stops[:-1], axis=2)

    def _features(self, entries: CacheEntries) -> tuple[Tensor, Tensor, Tensor]:
        data = torch.from_numpy(entries.data)
        first = 1 + entries.names.index("mass")
        mass, older = data[:, :, first], data[:, :, first + 1 : first + 4].movedim(2, -1)
        masses = older * torch.exp(-entries.since / self.scales) + mass.unsqueeze(-1)
        line = 1 + entries.names.index("content_0")
        content = data[:, :, line : line + CONTENT].movedim(2, -1).nan_to_num()
        return content, masses, torch.from_numpy(entries.age.astype(np.float32))

    def _returns(self, content: Tensor, masses: Tensor, age: Tensor) -> Returns:
        mean, sigma = self.model.value(content, masses, age)
        half = torch.from_numpy(self.order / 2).unsqueeze(-1)
        return cast(Returns, torch.exp(mean + half * sigma.square()).numpy())


class LossyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `paper-lossy`."""

    # variance weight lambda (Token-PD, Eq. 4).
    risk: float = msgspec.field(default=0.1, name="lambda")


class PaperParams(LossyParams, frozen=True, forbid_unknown_fields=True):
    """Parameters of `paper`."""

    # cost of recomputing a token, in returns, >= 0 (Token-PD, Eq. 2).
    delta: float = 0.001

    def __post_init__(self) -> None:
        if self.delta < 0:
            raise ValueError(f"delta is {self.delta}; it must be 0 or above")


class PaperLossy(TokenPolicy):
    """Token-PD's predictor on whole tokens: R - lambda sigma^2 (seed token-pd, Eq. 4).

    Predicts from the next-token logits of the step that stores a token; never recomputes.
    """

    Params = LossyParams
    fields = ("return", "variance")
    logit_fields = ("return", "variance")

    def __init__(self, setting: EvictionContext, params: msgspec.Struct) -> None:
        super().__init__(setting, params)
        self.risk = cast(LossyParams, params).risk
        path = setting.folder / PAPER
        if not path.exists():
            raise ConfigError(
                f"token eviction paper: {path} is missing; "
                f"python tools/train_returns.py train --model {setting.folder} writes it"
            )
        self.model = PaperModel.load(path)
        if self.model.into.shape[0] != setting.model.vocab:
            raise ConfigError(
                f"token eviction paper: {path} is for {self.model.into.shape[0]} tokens, "
                f"but the model has {setting.model.vocab}; train it again"
            )

    def from_logits(self, logits: Tensor) -> Tensor:
        """Predict R and sigma^2 of tokens."""
        return torch.stack(self.model.birth(logits), dim=-1)

    def score(self, entries: CacheEntries) -> Returns:
        """Return R - lambda sigma^2."""
        excess = entries.field("return") - self.risk * entries.field("variance")
        return cast(Returns, excess[0, 0])


class Paper(PaperLossy):
    """Token-PD's predictor; recomputes a token once its excess return is positive again."""

    Params = PaperParams
    recomputes = True

    def __init__(self, setting: EvictionContext, params: msgspec.Struct) -> None:
        super().__init__(setting, params)
        self.penalty = cast(PaperParams, params).delta


class CompiledReturns:
    """Summarizes and scores in place on the CPU, equal to `ReturnModel` within rounding."""

    def __init__(self, model: ReturnModel, turns: Tensor) -> None:
        amplitude = turns[0].square().sum() / (turns.shape[1] // 2)
        self._turns: Floats = turns.numpy()
        self._scale = float(amplitude.rsqrt())
        self._birth = _weights(model.birth_in, model.birth_bias, model.birth_out)
        self._value = _weights(model.value_in, model.value_bias, model.value_out)
        self._last: Floats = model.value_last[:, 0].contiguous().numpy()

    def summarize(self, row: RowEntries, line: int) -> None:
        """Summarize a row's new entries into side data lines from `line` on."""
        stats = _stats(row)
        model = self._turns, self._scale, self._birth
        kernels.summarize(row.kv, row.scales, stats, row.stop, line, *model)

    def predict(self, row: RowEntries, order: Floats) -> PredictedReturns:
        """Score a row's entries at power mean `order`, shape (layers, kv_heads)."""
        numbers = row.numbers
        scores: Floats = np.empty((numbers.shape[1] * numbers.shape[2], row.entries), np.float32)
        positions: Ints = np.empty(scores.shape, np.int32)
        fades = np.array([math.exp(-row.since / scale) for scale in SCALES], np.float32)
        stats, orders = _stats(row), order.ravel()
        kernels.predict(stats, fades, self._value, self._last, orders, scores, positions)
        return PredictedReturns(scores, positions)


def _stats(row: RowEntries) -> kernels.RowStats:
    ids = row.numbers.view(np.int32)
    return kernels.RowStats(row.numbers, ids, row.table, row.entries, row.following)


def _weights(into: Tensor, bias: Tensor, out: Tensor) -> kernels.NetworkWeights:
    more = -into.shape[2] % kernels.UNITS
    wide = [np.pad(part.numpy(), ((0, 0), (0, 0), (0, more))) for part in (into, bias)]
    tall = np.pad(out.numpy(), ((0, 0), (0, more), (0, 0)))
    first, last = (np.ascontiguousarray(part.swapaxes(1, 2)) for part in (wide[0], tall))
    return kernels.NetworkWeights(first, np.ascontiguousarray(wide[1][:, 0]), last)
