"""Predicts the return of a cache entry: mean and standard deviation of its logarithm."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pigou.request import Ints
from pigou.runtime.attention.kv_cache import KEYS, VALUES
from pigou.runtime.simd import LANES, exponential, fast, logarithm, product, widen
from pigou.runtime.token_eviction.policy import AFTER_MASS_LINE, MASS_LINE, POSITION_LINE, Floats

#: Time scales of attention mass, in tokens.
SCALES = (float("inf"), 256.0, 32.0)
FOLD = 32  # queries between decays of these sums
#: Exponent of the output change in a return. Divergence is quadratic in a query's output change,
#: but small evictions add up before squaring.
POWER = 1.5
CONTENT = 2  # summary numbers of an entry's key and value
FLOOR = 1e-4  # lower bound on sums, for finite logarithms
#: Bounds of log sigma; power means stay finite up to sigma 4.5.
LOG_SIGMA_BOUNDS = (-4.0, math.log(4.5))
#: Files in a model's folder; not safetensors, which would count as model weights.
RETURNS, PAPER = "returns.npz", "returns-paper.npz"
#: Columns of `GenericReturns.birth`.
KEY_NORM, VALUE_NORM = 0, 1
Stored = NDArray[Any]
_FLOAT_BYTES = 4
#: Hidden units computed together; their number is a multiple.
UNITS = 4
#: Entries scored at once, so that hidden units stay in cache.
WIDE = 4 * LANES
#: Output rows of the second network.
_MEAN, _LOG_SIGMA = 0, 1


def features(content: Tensor, masses: Tensor, age: Tensor) -> Tensor:
    """Return scoring features, (..., CONTENT + scales + 1, n); the long last axis is faster.

    `content` is (..., n, CONTENT), `masses` (..., n, scales), `age` (..., n).
    """
    logs = torch.log(masses.mT + FLOOR)
    return torch.cat((content.mT, logs, torch.log1p(age).unsqueeze(-2)), dim=-2)


def unrotate(keys: Tensor, turns: Tensor) -> Tensor:
    """Undo RoPE on keys (..., n, head_dim), amplitude aside; `turns` from `rotary_table`."""
    cos, sin = turns.chunk(2, dim=-1)
    first, second = keys.chunk(2, dim=-1)
    scale = cos.square() + sin.square()
    turned = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    return turned / torch.cat((scale, scale), dim=-1).sqrt()


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Base of dataclasses of tensors; an npz archive holds them by name."""

    stored_dtype: ClassVar[torch.dtype] = torch.float32

    def save(self, path: Path) -> None:
        """Write the weights."""
        names = [field.name for field in fields(self)]
        arrays = {name: getattr(self, name).to(self.stored_dtype).numpy() for name in names}
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load weights written by `save`, as float32."""
        with np.load(path, allow_pickle=False) as arrays:
            names = [field.name for field in fields(cls)]
            return cls(**{name: torch.from_numpy(arrays[name]).float() for name in names})


@dataclass(frozen=True, slots=True)
class ReturnModel(StoredWeights):
    """Two small networks per layer and KV head, batched over Z = layers * kv_heads.

    `birth` summarizes an entry's key and value once; `value` scores it by that summary, its
    attention mass and age. The return averages two terms, discounted over future queries: the
    attention output's change if the entry alone is dropped, to the power `POWER`, and the squared
    error that it saves once others are dropped (docs/internals/token-eviction.md). It is modelled
    as log-normal.
    """

    birth_in: Tensor  # shape (Z, 2 * head_dim, hidden)
    birth_bias: Tensor  # shape (Z, 1, hidden)
    birth_out: Tensor  # shape (Z, hidden, CONTENT)
    value_in: Tensor  # shape (Z, CONTENT + scales + 1, hidden)
    value_bias: Tensor  # shape (Z, 1, hidden)
    value_out: Tensor  # to mean and log sigma, shape (Z, hidden, 2)
    value_last: Tensor  # shape (Z, 1, 2)

    def birth(self, keys: Tensor, values: Tensor) -> Tensor:
        """Summarize keys and values, (layers, kv_heads, n, head_dim), as (..., n, CONTENT)."""
        x = torch.cat((keys, values), dim=-1).float().flatten(0, 1)
        hidden = F.silu(torch.baddbmm(self.birth_bias, x, self.birth_in))
        return torch.bmm(hidden, self.birth_out).view(*keys.shape[:3], CONTENT)

    def value(self, content: Tensor, masses: Tensor, age: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the log return, (layers, kv_heads, n)."""
        x = features(content, masses, age).flatten(0, 1)
        hidden = F.silu(torch.baddbmm(self.value_bias.mT, self.value_in.mT, x), inplace=True)
        out = torch.baddbmm(self.value_last.mT, self.value_out.mT, hidden)
        mean, log = out.view(*age.shape[:-1], 2, -1).unbind(-2)
        return mean, log.clamp(*LOG_SIGMA_BOUNDS).exp()


@dataclass(frozen=True, slots=True)
class PaperModel(StoredWeights):
    """Token-PD's predictor, one hidden layer of 256 units (seed token-pd, sections 4 and 5).

    R is the share of future queries' attention on the token, the mean over layers and heads. The
    paper leaves the variance open; here it is a second output.
    """

    into: Tensor  # shape (vocab, 256)
    bias: Tensor  # shape (256,)
    out: Tensor  # to the logit of R and to log sigma^2, shape (256, 2)
    last: Tensor  # shape (2,)
    stored_dtype: ClassVar[torch.dtype] = torch.float16

    def birth(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Predict R in [0, 1] and sigma^2, (n,), from next-token logits (n, vocab)."""
        hidden = torch.relu(torch.addmm(self.bias, logits.float(), self.into))
        mean, log_variance = torch.addmm(self.last, hidden, self.out).unbind(-1)
        return mean.sigmoid(), log_variance.clamp(-40.0, 0.0).exp()


#: Trained on the bundled model and two of random weights by `tools/train_returns.py generic`.
GENERIC = Path(__file__).with_name("generic.npz")


def relative(now: Tensor) -> Tensor:
    """Center features (..., entries, inputs) over the entries, except age."""
    middle = now.mean(-2, keepdim=True)
    middle[..., -1] = 0
    return now - middle


@dataclass(frozen=True, slots=True)
class GenericReturns(StoredWeights):
    """One small network for all models, layers and heads; the interface of `ReturnModel`.

    Features are relative to the other entries; the unit is a value norm to the power `POWER`.
    """

    value_in: Tensor  # shape (2 + scales + 1, hidden)
    value_bias: Tensor  # shape (hidden,)
    value_out: Tensor  # to mean and log sigma, shape (hidden, 2)
    value_last: Tensor  # shape (2,)

    @staticmethod
    def birth(keys: Tensor, values: Tensor) -> Tensor:
        """Return log norms of key and value, shape (..., n, 2)."""
        norms = torch.stack((keys.float().norm(dim=-1), values.float().norm(dim=-1)), dim=-1)
        return norms.clamp_min(1e-6).log()

    def value(self, content: Tensor, masses: Tensor, age: Tensor) -> tuple[Tensor, Tensor]:
        """Score entries relative to those of the same layer and head."""
        now = features(content, masses, age).mT
        hidden = F.silu(relative(now) @ self.value_in + self.value_bias)
        mean, log_sigma = (hidden @ self.value_out + self.value_last).unbind(-1)
        size = content[..., VALUE_NORM].mean(-1, keepdim=True)
        return mean + POWER * size, log_sigma.clamp(*LOG_SIGMA_BOUNDS).exp()


class RowStats(NamedTuple):
    """Side data of one row's entries, in place."""

    numbers: Floats  # `EntryStats.numbers`
    ids: Ints  # the same memory as int32
    table: Ints  # block ids of the row
    entries: int
    following: int  # position of the next token


class NetworkWeights(NamedTuple):
    """Weights of a one-hidden-layer network, by layer * kv_heads + KV head."""

    into: Floats  # shape (layers * kv_heads, units, inputs)
    bias: Floats  # shape (layers * kv_heads, units)
    out: Floats  # shape (layers * kv_heads, outputs, units)


@fast
def hide(weights: Floats, bias: Floats, x: Floats, hidden: Floats) -> None:
    """Compute silu(weights x + bias) into `hidden` (units, columns), for x (depth, columns)."""
    units, depth = weights.shape
    columns = x.shape[1]
    for unit in range(units):
        hidden[unit] = bias[unit]
    for unit in range(0, units, UNITS):
        for at in range(0, columns, LANES):
            product(
                weights.ctypes.data + unit * depth * _FLOAT_BYTES, depth,
                x.ctypes.data + at * _FLOAT_BYTES, columns,
                hidden.ctypes.data + (unit * columns + at) * _FLOAT_BYTES, columns, depth, x, UNITS,
            )  # fmt: skip
    flat = hidden.reshape(-1)
    for i in range(len(flat)):
        flat[i] = flat[i] / (np.float32(1.0) + exponential(-flat[i]))


@fast
def show(weights: Floats, hidden: Floats, out: Floats) -> None:
    """Add weights @ hidden to `out`; columns as in `hide`, two output rows."""
    units, columns = hidden.shape
    for at in range(0, columns, LANES):
        product(
            weights.ctypes.data, units, hidden.ctypes.data + at * _FLOAT_BYTES, columns,
            out.ctypes.data + at * _FLOAT_BYTES, columns, units, hidden, 2,
        )  # fmt: skip


@fast
def turn_back(keys: Floats, cos: Floats, sin: Floats) -> None:
    """Undo rotation of keys (head_dim, LANES); `cos` and `sin` have head_dim / 2 rows."""
    half = len(cos)
    first, second = keys[:half].reshape(-1), keys[half:].reshape(-1)
    c, s = cos.reshape(-1), sin.reshape(-1)
    for i in range(len(c)):
        a, b = first[i], second[i]
        first[i] = a * c[i] + b * s[i]
        second[i] = b * c[i] - a * s[i]


@fast
def load(keys: Stored, values: Stored, start: int, size: int, x: Floats) -> None:
    """Load keys and values of LANES entries of a head's block into x (2 * head_dim, LANES)."""
    width = len(x) // 2
    for d in range(width):
        line = keys[d * size + start : d * size + start + LANES]
        for lane in range(LANES):
            x[d, lane] = widen(line[lane])
    for lane in range(LANES):
        value = values[(start + lane) * width : (start + lane + 1) * width]
        for d in range(width):
            x[width + d, lane] = widen(value[d])


@fast
def summarize(
    kv: Stored, scales: Stored, row: RowStats, stop: int, line: int, turns: Floats, scale: float,
    weights: NetworkWeights,
) -> None:  # fmt: skip
    """Summarize new entries (`ReturnModel.birth`) while slots match across layers and heads."""
    numbers, ids, table, entries, _ = row
    into, bias, out = weights
    _, layers, heads, _, size = numbers.shape
    width = turns.shape[1]
    half, unit = width // 2, np.float32(scale)
    x = np.empty((2 * width, LANES), np.float32)
    cos, sin = np.empty((half, LANES), np.float32), np.empty((half, LANES), np.float32)
    hidden = np.empty((into.shape[1], LANES), np.float32)
    content = np.empty((CONTENT, LANES), np.float32)
    new = np.empty(LANES, np.bool_)
    for first in range(0, entries, LANES):
        block, start, count = table[first // size], first % size, min(LANES, entries - first)
        some = False
        for lane in range(count):
            new[lane] = np.isnan(numbers[block, 0, 0, line, start + lane])
            soon = count == LANES or ids[block, 0, 0, POSITION_LINE, start + lane] < stop
            some = some or (new[lane] and soon)
        if not some:
            continue
        for lane in range(count):
            turn = turns[ids[block, 0, 0, POSITION_LINE, start + lane]]
            for d in range(half):
                cos[d, lane], sin[d, lane] = turn[d] * unit, turn[half + d] * unit
        for task in range(layers * heads):
            at, head = task // heads, task % heads
            load(kv[block, at, KEYS, head], kv[block, at, VALUES, head], start, size, x)
            if len(scales):
                for d in range(2 * width):
                    for lane in range(LANES):
                        x[d, lane] *= widen(scales[block, at, d // width, head, start + lane])
            turn_back(x[:width], cos, sin)
            hide(into[task], bias[task], x, hidden)
            content[:] = np.float32(0.0)
            show(out[task], hidden, content)
            lines = numbers[block, at, head]
            for lane in range(count):
                if new[lane]:
                    for k in range(CONTENT):
                        lines[line + k, start + lane] = content[k, lane]


@fast
def load_features(
    lines: Floats, positions: Ints, start: int, following: int, fades: Floats, x: Floats, at: int
) -> None:
    """Load LANES entries' features into columns of x from `at` on, before logarithms."""
    scales = len(fades)
    content_line = AFTER_MASS_LINE + scales
    mass = lines[MASS_LINE, start : start + LANES]
    for k in range(CONTENT):
        content, row = lines[content_line + k, start : start + LANES], x[k, at : at + LANES]
        for lane in range(LANES):
            row[lane] = np.float32(0.0) if np.isnan(content[lane]) else content[lane]
    for k in range(scales):
        older = lines[AFTER_MASS_LINE + k, start : start + LANES]
        row = x[CONTENT + k, at : at + LANES]
        for lane in range(LANES):
            row[lane] = older[lane] * fades[k] + mass[lane] + np.float32(FLOOR)
    row = x[CONTENT + scales, at : at + LANES]
    for lane in range(LANES):
        row[lane] = np.float32(following + 1 - positions[start + lane])


@fast
def predict(
    row: RowStats, fades: Floats, weights: NetworkWeights, last: Floats, order: Floats,
    scores: Floats, positions: Ints,
) -> None:  # fmt: skip
    """Score a sequence's entries (`ReturnModel.value`): exp(mean + order sigma^2 / 2).

    `fades` (scales,) are the decays of each mass sum since the last fold; `last` (layers *
    kv_heads, 2) the output bias; `order` (layers * kv_heads,). Writes `scores` and `positions`,
    (layers * kv_heads, >= entries).
    """
    numbers, ids, table, entries, following = row
    into, bias, out = weights
    _, layers, heads, _, size = numbers.shape
    x = np.ones((into.shape[2], WIDE), np.float32)
    hidden = np.empty((into.shape[1], WIDE), np.float32)
    outputs = np.empty((2, WIDE), np.float32)
    low, high = np.float32(LOG_SIGMA_BOUNDS[0]), np.float32(LOG_SIGMA_BOUNDS[1])
    for task in range(layers * heads):
        layer, head = task // heads, task % heads
        half = np.float32(0.5) * order[task]
        for first in range(0, entries, WIDE):
            count = min(WIDE, entries - first)
            for at in range(0, count, LANES):
                block, start = table[(first + at) // size], (first + at) % size
                line = ids[block, layer, head, POSITION_LINE]
                load_features(numbers[block, layer, head], line, start, following, fades, x, at)
                for lane in range(min(LANES, count - at)):
                    positions[task, first + at + lane] = line[start + lane]
            logs = x[CONTENT:].reshape(-1)
            for i in range(len(logs)):
                logs[i] = logarithm(logs[i])
            hide(into[task], bias[task], x, hidden)
            for k in range(2):
                outputs[k] = last[task, k]
            show(out[task], hidden, outputs)
            mean, log_sigma = outputs[_MEAN], outputs[_LOG_SIGMA]
            for i in range(WIDE):
                sigma = exponential(min(max(log_sigma[i], low), high))
                value = mean[i] + half * sigma * sigma
                endless = value + np.float32(np.inf)  # propagates infinities and NaN
                mean[i] = exponential(value) if value < np.float32(87.0) else endless
            scores[task, first : first + count] = mean[:count]
