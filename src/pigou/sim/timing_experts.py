"""Experts of a step: tokens of the slowest rank, experts that it reads, and the all-to-all.

A layer takes max over ranks of max(computing, reading) + 2 (L + B k h b / bandwidth).

| symbol | meaning |
|---|---|
| T | tokens of the step over all data-parallel ranks, each choosing k of E experts |
| q_e | probability that a token chooses expert e: k / E if all are alike |
| B, h, b | tokens of a GPU, width of the residual stream, bytes a number |
| L | latency of one all-to-all |

Ranks read sum_e 1 - (1 - q_e)^T experts of theirs, and draws of binomial counts give the maximum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pigou.config import ConfigError
from pigou.models.architecture import Architecture
from pigou.models.gpus import Gpu
from pigou.models.parallelism import ParallelConfig
from pigou.placement.expert_placement import (
    ExpertRanks,
    Slots,
    balance,
    imbalance,
    rank_loads,
)
from pigou.small_file import read_bytes
from pigou.windows.planner_window import ExpertWindow
from pigou.wire.errors import DECODING_ERRORS

Floats = NDArray[np.float64]
#: Seconds of an all-to-all's first byte, and share of a link's bandwidth that it reaches: chosen on
#: DeepEP's twelve rows of low-latency kernels (H800), of which they give 0.78 to 1.09 times.
ALL_TO_ALL_S, REACHED = 20e-6, 0.8
#: Tokens of a GPU beyond which kernels send a token once to a node, however many experts it has
#: there; DeepEP recommends its low-latency kernels below.
LOW_LATENCY_TOKENS = 256
#: Bytes of a number that comes back; those sent out are as wide as the products' inputs.
COMBINED_BYTES = 2.0
#: Draws of a step's routing, over all layers, for the slowest rank.
_DRAWS = 48
#: Numbers of tokens whose times are computed; linear between.
_TOKENS = np.unique(np.rint(2.0 ** np.arange(0.0, 18.5, 0.5)).astype(np.int64))
_MAX_EXPONENT = 10.0


def read_expert_loads(text: str, experts: int) -> Floats | None:
    """Read loads of experts, (layers, experts): `uniform`, `zipf:EXPONENT`, or a JSON file.

    A file has a number for each expert, or such a list for each layer. None if all are alike.
    """
    if text in ("", "uniform"):
        return None
    name, _, rest = text.partition(":")
    if name == "zipf":
        try:
            exponent = float(rest)
        except ValueError:
            exponent = np.nan
        if not 0.0 <= exponent <= _MAX_EXPONENT:
            raise ConfigError(
                f"expert_load is {text!r}; give an exponent of 0 to {_MAX_EXPONENT:g}"
            )
        order = np.random.default_rng(0).permutation(experts)  # ids say nothing of loads
        return np.asarray((order + 1.0)[None] ** -exponent, dtype=np.float64)
    if not text.endswith(".json"):
        raise ConfigError(f"expert_load is {text!r}; give uniform, zipf:EXPONENT, or a FILE.json")
    try:
        rows = msgspec.json.decode(read_bytes(Path(text)), type=list[Any])
        loads = np.atleast_2d(np.array(rows, dtype=np.float64))
    except (OSError, ValueError, TypeError, *DECODING_ERRORS) as error:
        raise ConfigError(
            f"expert_load is {text!r}, and has no lists of numbers: {error}"
        ) from None
    if loads.shape[1:] != (experts,) or not (np.isfinite(loads).all() and (loads >= 0).all()):
        raise ConfigError(
            f"expert_load is {text!r}; give {experts} loads of 0 or more, the model's experts, or "
            "as many for each layer"
        )
    if not loads.any(axis=1).all():
        raise ConfigError(f"expert_load is {text!r}; a layer has no load at all")
    return loads


def inclusion(loads: Floats, active: int) -> Floats:
    """Return the probability that a token chooses each expert: min(1, c w_e), `active` in sum."""
    chosen: Floats = np.minimum(active * loads / loads.sum(), 1.0)
    for _ in range(64):
        rest = chosen < 1.0
        left, share = active - float((~rest).sum()), float(loads[rest].sum())
        if share <= 0.0 or chosen.sum() >= active * (1.0 - 1e-12):
            break
        chosen = np.where(rest, np.minimum(loads * (left / share), 1.0), 1.0)
    return chosen


def activated(chosen: Floats, tokens: ArrayLike) -> Floats:
    """Return the mean distinct experts that `tokens` choose: sum_e 1 - (1 - q_e)^tokens."""
    chosen_by_none: Floats = (1.0 - chosen) ** np.asarray(tokens)[..., None]
    read: Floats = np.sum(1.0 - chosen_by_none, axis=-1)
    return read


def all_to_all_s(
    device: Gpu, split: ParallelConfig, tokens: float, active: int, size: float
) -> float:
    """Return the seconds in which each GPU sends `tokens` of `size` bytes to `active` experts each.

    GPUs of a link's domain take the link, others the network; both at once.
    """
    inside = min(device.link_gpus, split.gpus)
    nodes = split.gpus / inside
    near, far = active * (inside - 1) / split.gpus, active * (1.0 - 1.0 / nodes)
    if tokens > LOW_LATENCY_TOKENS:
        far = min(far, (nodes - 1.0) * (1.0 - (1.0 - 1.0 / nodes) ** active))
    sent = tokens * size / REACHED
    return ALL_TO_ALL_S + sent * max(near / device.link_bandwidth, far / device.network_bandwidth)


class ExpertTiming:
    """Seconds of the experts of all layers, by tokens of a step."""

    def __init__(
        self, model: Architecture, device: Gpu, split: ParallelConfig, loads: Floats | None,
        products: Floats, rates: tuple[float, float], *, eplb: bool = False,
    ) -> None:  # fmt: skip
        """Compute a table.

        `products`, (rows, 5): layers, their kind, FLOPs and bytes of input and output of a token,
        bytes of an expert; `rates`: seconds of a FLOP and of a byte.
        """
        every = np.ones((1, model.experts)) if loads is None else loads
        self.seconds = np.zeros(len(_TOKENS))
        self._ranks, self._uneven = split.gpus, -1.0
        self._move_s = model.expert_bytes / (
            device.link_bandwidth if split.gpus <= device.link_gpus else device.network_bandwidth
        )
        rng = np.random.default_rng(0)
        for weights in every:
            chosen = inclusion(weights, model.active)
            if split.ep:
                ranks = ExpertRanks(split.gpus, model.experts + split.redundant_experts)
                slots = _slots(weights, ranks, balanced=eplb)
                if (uneven := imbalance(rank_loads(slots, chosen, ranks.ranks))) > self._uneven:
                    self._uneven, self._chosen, self._placement = uneven, chosen, slots
                draws = -(-_DRAWS // len(every))
                tokens, read = _drawn(chosen, slots, ranks.ranks, draws, rng)
            else:
                tokens = (model.active * _TOKENS)[:, None, None].astype(np.float64)
                read = activated(chosen, _TOKENS)[:, None, None]
            for kind in np.unique(products[:, 1]):
                layer = np.zeros_like(tokens)
                rows = products[products[:, 1] == kind]
                for _, _, flops, moved, size in rows:
                    computing = flops * tokens * rates[0]
                    layer += np.maximum(computing, (size * read + moved * tokens) * rates[1])
                self.seconds += rows[0, 0] * layer.max(axis=2).mean(axis=1) / len(every)
        if split.dp > 1:
            layers = sum(products[products[:, 1] == k][0, 0] for k in np.unique(products[:, 1]))
            self.seconds += layers * np.array(
                [_exchange_s(model, device, split, t) for t in _TOKENS]
            )

    def __call__(self, tokens: int) -> float:
        """Return the seconds of a step's experts."""
        if tokens >= _TOKENS[-1]:
            return float(self.seconds[-1] * tokens / _TOKENS[-1])
        return float(np.interp(tokens, _TOKENS, self.seconds))

    def window(self, tokens: float, steps: int, seconds: float) -> ExpertWindow | None:
        """Return a worker's report of `steps` steps of `tokens` tokens each; None without EP."""
        if self._uneven < 0.0 or not steps:
            return None
        return ExpertWindow(
            loads=tuple((self._chosen * tokens * steps).tolist()),
            placement=tuple(self._placement.tolist()), ranks=self._ranks,
            busy=min(self(max(round(tokens), 1)) * steps / seconds, 1.0), move_s=self._move_s,
        )  # fmt: skip


def _slots(weights: Floats, ranks: ExpertRanks, *, balanced: bool) -> Slots:
    """Return the expert of each slot: in order, or balanced where there are copies or EPLB."""
    if balanced or ranks.slots > len(weights):
        return balance(weights, ranks)
    return np.arange(ranks.slots)


def _drawn(
    chosen: Floats, slots: Slots, ranks: int, draws: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Return tokens and read experts of each rank, (numbers of tokens, draws, ranks) both."""
    rate = (chosen / np.bincount(slots, minlength=len(chosen)))[slots]
    counts = rng.binomial(_TOKENS[:, None, None], rate, (len(_TOKENS), draws, len(slots)))
    by_rank = counts.reshape(*counts.shape[:2], ranks, -1)
    return by_rank.sum(axis=3).astype(np.float64), (by_rank > 0).sum(axis=3).astype(np.float64)


def _exchange_s(model: Architecture, device: Gpu, split: ParallelConfig, tokens: float) -> float:
    """Return the seconds in which the experts of a layer receive tokens, and send them back."""
    sent = 1.0 if model.main.compute == "fp8" else COMBINED_BYTES
    sizes = [model.hidden * width for width in (sent, COMBINED_BYTES)]
    if split.ep:
        own = tokens / split.gpus
        return sum(all_to_all_s(device, split, own, model.active, size) for size in sizes)
    # Parts of experts need all tokens: gather, then sum and scatter.
    bandwidth = device.link_bandwidth if split.gpus <= device.link_gpus else (
        device.network_bandwidth
    )  # fmt: skip
    others = tokens * (1.0 - 1.0 / split.gpus) / (bandwidth * REACHED)
    return sum(ALL_TO_ALL_S + others * size for size in sizes)
