"""NVIDIA kvpress: `PigouPress` cuts a prompt's cache by the predictor of `--eviction pigou`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from kvpress import ScorerPress
from kvpress.utils import compute_n_kept, get_prerope_query_states
from torch import Tensor

from pigou.runtime.models.rotary_embedding import rotate
from pigou.runtime.token_eviction import predictor as predictors
from pigou.runtime.token_eviction.pigou_policy import power_orders

SEAM = "kvpress 0.5"


@dataclass
class PigouPress(ScorerPress):  # type: ignore[misc]
    """Keeps the entries of a prompt that a Pigou worker would (`pigou_policy.Pigou`)."""

    compression_ratio: float = 0.0
    predictor: str = ""  # folder with the model's `returns.npz`; empty: the generic predictor
    order: float | None = None  # power mean's order (`PigouParams.order`)
    sinks: int = 4  # first entries, always kept
    recent: int = 32  # last entries, always kept

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.recent < 1:
            raise ValueError(f"sinks is {self.sinks}, recent {self.recent}; give 0 and 1 or more")
        path = Path(self.predictor) / predictors.RETURNS if self.predictor else predictors.GENERIC
        if not path.exists():
            raise ValueError(f"predictor: {path} is missing; tools/train_returns.py writes it")
        kind = predictors.ReturnModel if self.predictor else predictors.GenericReturns
        self._model = kind.load(path)

    def compress(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the kept keys and values in order of position."""
        entries = keys.shape[2]
        keep = max(compute_n_kept(entries, self.compression_ratio), self.sinks + self.recent)
        if keep >= entries:
            return keys, values
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        order = scores.topk(keep, dim=-1).indices.sort(dim=-1).values.unsqueeze(-1)
        order = order.expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, order).contiguous(), values.gather(2, order).contiguous()

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict[str, Any],  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        """Return the logarithm of each entry's predicted return, (rows, kv_heads, n)."""
        count, heads, layer = keys.shape[2], keys.shape[1], module.layer_idx
        if hidden_states.shape[1] != count:
            raise ValueError("PigouPress cuts whole prompts: no DecodingPress, no prompt in chunks")
        cos, sin = (part[..., : keys.shape[3] // 2] for part in kwargs["position_embeddings"])
        turns = torch.cat((cos, sin), dim=-1).float().unsqueeze(1)
        queries = rotate(get_prerope_query_states(module, hidden_states).float(), turns)
        masses = attention_masses(queries * module.scaling, keys.float())
        trained = isinstance(self._model, predictors.ReturnModel)
        own = slice(layer * heads, (layer + 1) * heads) if trained else slice(None)
        weights = (getattr(self._model, field.name)[own] for field in fields(self._model))
        model = type(self._model)(*(part.to(keys.device) for part in weights))
        orders = power_orders(self.order, module.config.num_hidden_layers, heads, trained)
        age = torch.arange(count, 0, -1, device=keys.device).float().expand(1, heads, count)
        content = predictors.unrotate(keys.float(), turns)
        scores = []
        for row in (slice(at, at + 1) for at in range(len(keys))):
            summary = model.birth(content[row], values[row].float())
            mean, sigma = model.value(summary, masses[row], age)
            scores.append(mean + float(orders[layer, 0]) / 2 * sigma.square())
        returns = torch.cat(scores)
        returns[..., : self.sinks] = returns[..., -self.recent :] = torch.inf
        return returns


def attention_masses(queries: Tensor, keys: Tensor) -> Tensor:
    """Return each entry's decayed sums of causal attention, (rows, kv_heads, n, scales).

    Queries (rows, heads, n, head_dim) decay by groups from the prompt's end, as a worker folds.
    """
    rows, heads, count, _ = keys.shape
    scales = torch.tensor(predictors.SCALES, device=keys.device)
    masses = torch.zeros((rows, heads, count, len(scales)), device=keys.device)
    grouped, fold = queries.unflatten(1, (heads, -1)), predictors.FOLD
    for group, end in enumerate(range(count, 0, -fold)):
        logits = grouped[..., max(0, end - fold) : end, :] @ keys[:, :, None, :end].mT
        future = torch.ones_like(logits, dtype=torch.bool).triu(end - min(fold, end) + 1)
        seen = logits.masked_fill(future, -torch.inf).softmax(dim=-1).sum(dim=(2, 3))
        masses[:, :, :end] += seen.unsqueeze(-1) * torch.exp(-group * fold / scales)
    return masses
