"""What a run kept, step by step, and what keeping it was worth: for the regret of Token-PD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.token_pd.load import Item
from benchmarks.token_pd.optimum import Recorded
from pigou.engine.plan import Plan
from pigou.runtime.local_engine import LocalEngine

Ints = NDArray[np.int32]


@dataclass
class Step:
    """One step: of each request that ran on, tokens computed and the positions that it kept."""

    # by request, tokens whose entries were there at some time.
    computed: dict[str, int] = field(default_factory=dict)
    # by request, original positions, shape (layers, kv_heads, entries).
    kept: dict[str, Ints] = field(default_factory=dict)
    used: int = 0  # blocks in use
    price: float = 0.0  # the core's price of a block
    running: int = 0  # requests in the batch


class Recorder:
    """Watches a run (`benchmarks.token_pd.run.Watch`); `positions` may be left out for speed."""

    def __init__(self, positions: bool = True) -> None:
        self.steps: list[Step] = []
        self._positions = positions
        self._rows: dict[int, str] = {}

    def __call__(self, engine: LocalEngine, plan: Plan) -> None:
        """Note what is there after a step."""
        core = engine.core
        for started in plan.started:
            self._rows[started.row] = started.request
        step = Step(
            used=core.config.blocks - core.free_blocks, price=core.price, running=core.computing
        )
        evictor = engine.executor.evictor
        for row, start, count in zip(
            plan.rows.tolist() if self._positions else (),
            plan.starts.tolist(), plan.counts.tolist(), strict=False,
        ):  # fmt: skip
            request = self._rows[row]
            if request not in core:
                continue
            step.computed[request] = start + count
            if evictor is None:
                layout = engine.cache.layout
                every = np.arange(start + count, dtype=np.int32)
                kept = np.broadcast_to(every, (layout.layers, layout.kv_heads, len(every)))
            else:
                kept = evictor.positions(core.tables[row], int(evictor.entries[row])).copy()
            step.kept[request] = kept
        self.steps.append(step)


def future_shares(model: Path, items: Sequence[Item]) -> list[NDArray[np.float32]]:
    """Return what the full cache's queries to come give each token: Token-PD's return R.

    R of token j after t tokens is the mean, over the queries from t on to the request's end, of
    the attention that lands on j: section 3's "expected fraction of future query attention mass
    before the request terminates", with the future known.

    Returns:
        For each item shape (layers, kv_heads, length + 1, length): R after t tokens, of each
        position, means over the query heads of a KV head; 0 after the last query.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    heads = network.config.num_key_value_heads
    return [_shares(network, heads, np.concatenate((item.prompt, item.forced))) for item in items]


@torch.inference_mode()
def _shares(network: torch.nn.Module, heads: int, ids: Ints) -> NDArray[np.float32]:
    found = network(torch.from_numpy(ids.astype(np.int64))[None], output_attentions=True)
    weights = torch.stack([each[0] for each in found.attentions])
    layers, _, length, _ = weights.shape
    grouped = weights.view(layers, heads, -1, length, length).mean(2)
    return shares(grouped.numpy())


def shares(attention: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean attention of the queries from each on.

    Args:
        attention: of query i on position j, shape (..., length, length).

    Returns:
        Shape (..., length + 1, length): row t is the mean over queries t and later; the last is 0.
    """
    length = attention.shape[-1]
    rest = np.flip(np.cumsum(np.flip(attention, -2), -2), -2)
    counts = np.arange(length, 0, -1, dtype=np.float32)[:, None]
    found = np.zeros((*attention.shape[:-2], length + 1, length), dtype=np.float32)
    found[..., :length, :] = rest / counts
    return found


def lay_out(
    steps: Sequence[Step],
    requests: Sequence[str],
    returns: Sequence[NDArray[np.float32]],
    layer: int,
    head: int,
) -> Recorded:
    """Put a run's steps side by side, for one layer and KV head.

    Args:
        requests: ids.
        returns: of each request, from `future_shares`.
        layer: index.
        head: index.
    """
    sizes = [each.shape[-1] for each in returns]
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    shape = (len(steps), int(offsets[-1]))
    worth, kept, there = np.zeros(shape), np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    places = {request: i for i, request in enumerate(requests)}
    for t, step in enumerate(steps):
        for request, computed in step.computed.items():
            i = places[request]
            begin = int(offsets[i])
            count = min(computed, sizes[i])
            there[t, begin : begin + count] = True
            worth[t, begin : begin + count] = returns[i][layer, head, count, :count]
            positions = step.kept[request][layer, head]
            kept[t, begin + positions[positions < count]] = True
    return Recorded(worth, kept, there)
