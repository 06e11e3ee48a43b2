"""The decoder-only transformer that all families are."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.models import ModelError
from pigou.runtime.attention import PagedAttention
from pigou.runtime.config import ModelConfig
from pigou.runtime.linear import Linear
from pigou.runtime.models.layer import Layer, load_layer
from pigou.runtime.ops import Ops
from pigou.runtime.weights import Weights

log = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(slots=True)
class Decoder:
    """A model's weights, and how tokens pass through them.

    Attributes:
        config: sizes and switches.
        embedding: shape (vocab, hidden).
        layers: in order.
        norm: weight of the last norm, shape (hidden,).
        head: from hidden states to logits.
        ops: element-wise operations.
    """

    config: ModelConfig
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear
    ops: Ops

    def hidden(self, tokens: Tensor, attention: PagedAttention, wanted: Tensor | None) -> Tensor:
        """Compute hidden states.

        Args:
            tokens: ids, shape (tokens,).
            attention: after `begin` of the step that they belong to.
            wanted: which tokens' states are asked for, shape (n,), int64; None for all. Of the
                others, the last layer computes nothing but keys and values.

        Returns:
            Normed hidden states, shape (n, hidden).
        """
        x = F.embedding(tokens, self.embedding)
        residual = torch.zeros_like(x)
        beat = attention.beat
        for layer in self.layers[:-1]:
            x = layer(x, residual, attention, self.ops)
            if beat is not None:
                beat()
        attended = self.layers[-1].attend(x, residual, attention, self.ops)
        if wanted is not None:
            attended, residual = attended[wanted], residual[wanted]
        if not len(attended):
            return residual
        x = self.layers[-1].feed(attended, residual, self.ops)
        return self.ops.add_norm(x, residual, self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits, shape (n, vocab), for hidden states of shape (n, hidden)."""
        return self.head(hidden)


def load_decoder(config: ModelConfig, weights: Weights, ops: Ops) -> Decoder:
    """Take all of a model's tensors.

    Raises:
        ModelError: one is missing or has another shape.
    """
    embedding, head = _ends(config, weights)
    return Decoder(
        config=config,
        embedding=embedding,
        layers=[load_layer(index, config, weights) for index in range(config.layers)],
        norm=weights.take("model.norm.weight", config.hidden),
        head=Linear(head),
        ops=ops,
    )


def _ends(config: ModelConfig, weights: Weights) -> tuple[Tensor, Tensor]:
    """Take the embedding and the output layer; where both are there, both count.

    A checkpoint whose two tensors differ has two, whatever `tie_word_embeddings` says, and where
    a tied one has a single tensor it may be either: transformers does the same.
    """
    shape = config.vocab, config.hidden
    if config.tied and _EMBEDDING not in weights and _HEAD in weights:
        head = weights.take(_HEAD, *shape)
        return head, head
    embedding = weights.take(_EMBEDDING, *shape)
    if _HEAD not in weights and config.tied:
        return embedding, embedding
    if _HEAD not in weights:
        raise ModelError(
            f"tensor {_HEAD!r} is missing; where the output layer is the embedding, config.json "
            "must have tie_word_embeddings: true"
        )
    head = weights.take(_HEAD, *shape)
    if not config.tied:
        return embedding, head
    if torch.equal(embedding, head):
        return embedding, embedding
    log.warning(
        "%s differs from %s, so it is used, though config.json has tie_word_embeddings: true; "
        "set that to false",
        _HEAD,
        _EMBEDDING,
    )
    return embedding, head
