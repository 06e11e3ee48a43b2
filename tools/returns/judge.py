"""Policies compared by masks: recall, with the question asked after eviction, and perplexity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from pigou.runtime.models.decoder import Decoder
from pigou_lab.recall import recall_items
from returns.policies import Policy, keep
from returns.probe import Probe

SHARES = (0.75, 0.5, 0.25, 0.125)
STEP = 32  # tokens between evictions in a stream
ORACLE = 256  # queries that the oracle looks ahead

Table = dict[tuple[str, float], float]


def fork(probe: Probe, masks: Tensor, more: int) -> Probe:
    """Copies of a single sequence to be asked, each with other slots alive.

    `masks` has shape (L, copies, H, length). What the sequence left behind is not copied.
    """
    copies, length = masks.shape[1], probe.length
    twin = Probe(probe.decoder, copies, length + more)
    for name in ("turned", "values"):
        getattr(twin, name)[:, :, :, :length] = getattr(probe, name)[:, :, :, :length]
    twin.alive[..., :length] = masks
    twin.length = length
    return twin


def ahead(probe: Probe, ids: Tensor) -> Tensor:
    """Attention that each entry receives from the tokens `ids` (1, n) with the full cache."""
    twin = fork(probe, probe.alive[..., : probe.length], ids.shape[1])
    twin.feed(ids)
    return twin.masses[..., : probe.length, 0]


@torch.inference_mode()
def recall(
    decoder: Decoder,
    tokenizer: Tokenizer,
    text: str,
    policies: Mapping[str, Policy],
    *,
    pairs: int,
    distance: int,
    count: int,
    seed: int = 0,
    shares: Sequence[float] = SHARES,
) -> Table:
    """Share of questions answered, by policy and share of entries kept.

    The prompt is read with the full cache, entries are given up once, then the question is asked.
    """

    def tokens(line: str) -> int:
        return len(tokenizer.encode(line).ids)

    newline = tokenizer.encode("\n").ids
    table: Table = {("full", 1.0): 0.0}
    for item in recall_items(text, tokens, pairs=pairs, distance=distance, count=count, seed=seed):
        prompt = tokenizer.encode(item.prompt).ids
        asked = torch.tensor([prompt[-2:] + tokenizer.encode(f" {item.answer}").ids])
        expect = torch.tensor([*asked[0, 2:].tolist(), *newline])
        probe = Probe(decoder, 1, len(prompt) - 2)
        probe.feed(torch.tensor([prompt[:-2]]))
        scores = {name: policy(probe) for name, policy in policies.items()}
        scores["oracle"] = ahead(probe, asked)
        names = [(name, share) for name in scores for share in shares]
        masks = [keep(probe, scores[name], int(share * probe.length)) for name, share in names]
        names.append(("full", 1.0))
        masks.append(probe.alive[..., : probe.length])
        twin = fork(probe, torch.cat(masks, dim=1), asked.shape[1])
        said = twin.feed(asked.expand(len(names), -1))[:, 1:].argmax(-1)
        for name, right in zip(names, (said == expect).all(-1).tolist(), strict=True):
            table[name] = table.get(name, 0.0) + right / count
    return table


@torch.inference_mode()
def stream(decoder: Decoder, ids: Tensor, policy: Policy | None, budget: int) -> Tensor:
    """Loss of each next token, teacher-forced, never more than `budget` entries in the cache.

    Args:
        ids: shape (B, T).
        policy: what decides; None keeps all.
        budget: most entries of a sequence in a layer and head.

    Returns:
        Shape (B, T - 1), nats.
    """
    length = ids.shape[1]
    probe = Probe(decoder, ids.shape[0], length)
    losses = []
    for start in range(0, length, STEP):
        end = min(start + STEP, length)
        if policy is not None and end > budget:
            kept = keep(probe, policy(probe), budget - (end - start))
            probe.alive[..., :start] = kept
        logits = probe.feed(ids[:, start:end])
        target = ids[:, start + 1 : end + 1]
        losses.append(F.cross_entropy(logits[:, : target.shape[1]].mT, target, reduction="none"))
    return torch.cat(losses, dim=1)


class Oracle:
    """The attention of the next `ORACLE` tokens, from a run with the full cache."""

    def __init__(self, decoder: Decoder, ids: Tensor) -> None:
        probe = Probe(decoder, *ids.shape)
        received = []
        for start in range(0, ids.shape[1], STEP):
            probe.masses.zero_()
            probe.feed(ids[:, start : start + STEP])
            received.append(probe.masses[..., 0].clone())
        self.received = received

    def __call__(self, probe: Probe) -> Tensor:
        """What the steps to come give each slot."""
        first = probe.length // STEP
        coming = self.received[first : first + ORACLE // STEP]
        return torch.stack(coming)[..., : probe.length].sum(0)


def windows(tokenizer: Tokenizer, text: str, length: int, count: int) -> Tensor:
    """Stretches of a text, evenly apart, each after the begin token, shape (count, length)."""
    ids = tokenizer.encode(text).ids
    gap = (len(ids) - length) // max(count - 1, 1)
    begin = tokenizer.token_to_id("<|begin|>") or 0
    return torch.tensor([[begin, *ids[i * gap : i * gap + length - 1]] for i in range(count)])
