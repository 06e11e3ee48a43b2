"""The report of `train_returns.py judge`: every policy, at every share of the entries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pigou.runtime.models.decoder import Decoder
from pigou.runtime.token_eviction.predictor import PAPER, RETURNS, PaperModel, ReturnModel
from returns import judge
from returns.judge import SHARES
from returns.policies import Learned, Paper, Policy, baselines
from tiny.corpus import Split

LENGTH = 1024  # tokens of a window


class Bench:
    """A model, the held-out texts, and the policies."""

    def __init__(
        self,
        decoder: Decoder,
        words: Tokenizer,
        split: Split,
        weights: Path,
        orders: Sequence[float],
    ) -> None:
        self.decoder, self.words, self.text = decoder, words, split.play
        self.agents = "\n".join(split.held_out.documents[1:])
        self.shares: Sequence[float] = SHARES
        self.policies: dict[str, Policy] = baselines()
        if (weights / PAPER).exists():
            self.policies["paper"] = Paper(PaperModel.load(weights / PAPER))
        if (weights / RETURNS).exists():
            model = ReturnModel.load(weights / RETURNS)
            for order in orders:
                self.policies[f"pigou, order {order:g}"] = Learned(model, order)

    def restrict(self, names: Sequence[str]) -> None:
        """Keep the policies whose name begins so; all, where none is named."""
        chosen = {k: p for k, p in self.policies.items() if k.startswith(tuple(names))}
        self.policies = chosen if names else self.policies

    def recall(self, pairs: int, distance: int, count: int) -> Iterator[str]:
        """Lines: share of `count` questions answered, and its standard error at the worst."""
        table = judge.recall(
            self.decoder,
            self.words,
            self.text,
            self.policies,
            pairs=pairs,
            distance=distance,
            count=count,
            shares=self.shares,
        )
        noise = 0.5 / math.sqrt(count)
        yield (
            f"recall, {pairs} pairs {distance} tokens back: {count} questions (±{noise:.1%}),"
            f" full cache {table['full', 1.0]:.1%}"
        )
        for name in [*self.policies, "oracle"]:
            yield f"{name:24s}" + "".join(f"{table[name, share]:>14.1%}" for share in self.shares)

    def perplexity(self, count: int) -> Iterator[str]:
        """Lines: perplexity of `count` windows streamed under the cap, a quarter of them agents'
        messages, and the standard error of its ratio to that of the full cache.
        """
        if not count:
            return
        few = count // 4
        ids = judge.windows(self.words, self.text, LENGTH, count - few)
        if few:
            ids = torch.cat((ids, judge.windows(self.words, self.agents, LENGTH, few)))
        full = judge.stream(self.decoder, ids, None, LENGTH).mean(1)
        whole = float(full.mean().exp())
        yield f"perplexity of {count} windows of {LENGTH} tokens; full cache {whole:.3f}"
        policies: dict[str, Policy] = {**self.policies, "oracle": judge.Oracle(self.decoder, ids)}
        for name, policy in policies.items():
            losses = [
                judge.stream(self.decoder, ids, policy, int(share * LENGTH)).mean(1)
                for share in self.shares
            ]
            yield f"{name:24s}" + "".join(_ratio(loss, full) for loss in losses)


def _ratio(losses: Tensor, full: Tensor) -> str:
    """Perplexity and the standard error of its ratio to the full cache's, paired by window."""
    error = float((losses - full).std()) / math.sqrt(len(full)) if len(full) > 1 else math.nan
    return f"{float(losses.mean().exp()):.2f} ±{error:.1%}".rjust(14)
