"""Samples one token for each sequence of a batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.request import SamplingParams
from pigou.runtime.ops import Ops
from pigou.runtime.sequence import TokenSequence
from pigou.runtime.step_output import GrammarError, RankedLogprobs, described, is_contained
from pigou.runtime.tensor_io import upload

#: Clamp for logits.
_MAX_LOGIT = 1e30
_MASK = 2**64 - 1
#: Top tokens searched first for the nucleus; sorting the whole vocabulary is far slower.
_HEAD = 512
_OUT = float("-inf")


class Sampler:
    """Samples for a fixed list of sequences; a row's token never depends on other rows."""

    def __init__(self, sequences: list[TokenSequence], ops: Ops, device: torch.device) -> None:
        self._sequences = sequences
        self._ops = ops
        params = [sequence.params for sequence in sequences]
        self._adjusted = [i for i, p in enumerate(params) if adjusts(p)]
        self._reported = [i for i, p in enumerate(params) if p.logprobs is not None]
        self._random = [i for i, p in enumerate(params) if p.temperature > 0]
        self._device = device
        if self._random:
            self._prepare([params[i] for i in self._random])

    def __call__(self, logits: Tensor) -> tuple[Tensor, dict[int, RankedLogprobs]]:
        """Return tokens (n,) and requested logprobs by row; overwrites logits (n, vocab)."""
        raw = logits[self._index(self._reported)] if self._reported else None
        if self._adjusted:
            logits = logits.float()
        for row in self._adjusted:
            try:
                adjust(logits[row], self._sequences[row])
            except GrammarError as error:
                self._sequences[row].failure = str(error)
        if len(self._random) == len(self._sequences):
            tokens = self._draw(logits)
        else:
            tokens = self._ops.argmax(logits)
            if self._random:
                tokens[self._rows] = self._draw(logits[self._rows])
        return tokens, {} if raw is None else self._report(raw, tokens)

    def _prepare(self, params: list[SamplingParams]) -> None:
        def column(get: Callable[[SamplingParams], float], dtype: torch.dtype) -> Tensor:
            return upload(np.array([get(p) for p in params]), self._device).to(dtype)

        self._rows = self._index(self._random)
        self._largest_k = max(1, *(p.top_k for p in params))
        self._scale = column(lambda p: 1.0 / p.temperature, torch.float32).unsqueeze(-1)
        self._min_p = column(lambda p: p.min_p, torch.float32)
        self._top_k = column(lambda p: p.top_k, torch.int64)
        self._top_p = column(lambda p: p.top_p, torch.float64)
        self._cuts_min_p = any(p.min_p > 0 for p in params)
        self._cuts_top_k = any(p.top_k > 0 for p in params)
        self._cuts_top_p = any(p.top_p < 1 for p in params)

    def _draw(self, logits: Tensor) -> Tensor:
        # Extreme penalties overflow, and two infinities make the softmax NaN.
        logits = (logits.float() * self._scale).clamp_(max=_MAX_LOGIT)
        if self._cuts_min_p:
            cut_min_p(logits, self._min_p)
        if self._cuts_top_k:
            cut_top_k(logits, self._top_k, self._largest_k)
        if self._cuts_top_p:
            cut_top_p(logits, self._top_p)
        sequences = [self._sequences[i] for i in self._random]
        uniforms = np.array([uniform(s.params.seed, s.length) for s in sequences])
        return choose(logits.softmax(-1), upload(uniforms, self._device))

    def _index(self, rows: list[int]) -> Tensor:
        return upload(np.array(rows, dtype=np.int64), self._device)

    def _report(self, raw: Tensor, tokens: Tensor) -> dict[int, RankedLogprobs]:
        tops = [self._sequences[i].params.logprobs or 0 for i in self._reported]
        reports = report(raw, tokens[self._index(self._reported)], tops)
        return dict(zip(self._reported, reports, strict=True))


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) of seed and position (SplitMix64, Steele, Lea, Flood 2014)."""
    state = _mix(_mix(seed & _MASK) + position)
    return (state >> 12) * 2.0**-52


def choose(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Invert each row's CDF, (n, vocab), at `uniforms` (n,), float64; never of probability 0."""
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(-1) * sums[:, -1:]
    tokens = torch.searchsorted(sums, targets, right=True).squeeze(-1)
    return tokens.clamp_(max=probabilities.shape[-1] - 1)


def _mix(key: int) -> int:
    state = (key + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def cut_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Mask, in place, tokens less than `min_p` times as likely as the top (arXiv 2407.01082)."""
    threshold = logits.amax(-1) + min_p.log()
    logits.masked_fill_(logits < threshold.unsqueeze(-1), _OUT)


def cut_top_k(logits: Tensor, top_k: Tensor, largest: int) -> None:
    """Keep, in place, the `top_k` (n,) most probable tokens and ties; 0 to disable."""
    vocab = logits.shape[-1]
    ks = torch.where(top_k == 0, vocab, top_k.clamp(max=vocab))
    largest = min(largest, vocab)
    values = logits.topk(largest, dim=-1).values
    threshold = values.gather(-1, (ks.clamp(max=largest) - 1).unsqueeze(-1))
    threshold.masked_fill_((top_k == 0).unsqueeze(-1), _OUT)
    logits.masked_fill_(logits < threshold, _OUT)


def cut_top_p(logits: Tensor, top_p: Tensor) -> None:
    """Keep, in place, the nucleus of `top_p` (n,) and ties (arXiv 1904.09751); 1 to disable."""
    total = logits.logsumexp(-1, keepdim=True)
    values = logits.topk(min(_HEAD, logits.shape[-1]), dim=-1).values
    sums = (values - total).exp().cumsum(-1, dtype=torch.float64)
    short = bool(((sums[:, -1] < top_p) & (top_p < 1.0)).any())
    if short and values.shape[-1] < logits.shape[-1]:
        values = logits.sort(-1, descending=True).values
        sums = (values - total).exp().cumsum(-1, dtype=torch.float64)
    count = (sums < top_p.unsqueeze(-1)).sum(-1, keepdim=True)
    threshold = values.gather(-1, count.clamp(max=values.shape[-1] - 1))
    threshold.masked_fill_((top_p >= 1.0).unsqueeze(-1), _OUT)
    logits.masked_fill_(logits < threshold, _OUT)


def report(logits: Tensor, tokens: Tensor, tops: list[int]) -> list[RankedLogprobs]:
    """Report tokens (n,) and the most probable ones, by raw logits (n, vocab)."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1))
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(min(max(tops), logits.shape[-1]), dim=-1)
    columns = zip(
        tokens.tolist(), chosen.squeeze(-1).tolist(), ranks.tolist(), ids.cpu().numpy(),
        values.cpu().numpy(), tops, strict=True,
    )  # fmt: skip
    return [
        RankedLogprobs(token, logprob, rank, top[:k].copy(), top_logprobs[:k].copy())
        for token, logprob, rank, top, top_logprobs, k in columns
    ]


MakeSampler = Callable[[list[TokenSequence], Ops, torch.device], Sampler]


class IsolatedSampler:
    """Samples like `Sampler`; an error in one row fails only that row."""

    def __init__(
        self, make: MakeSampler, sequences: list[TokenSequence], ops: Ops, device: torch.device
    ) -> None:
        self._make, self._ops, self._device = make, ops, device
        self._sequences = sequences
        self._together: Sampler | None = None
        try:
            self._together = make(sequences, ops, device)
        except BaseException as error:
            if not is_contained(error):
                raise

    def __call__(
        self, logits: Callable[[Tensor], Tensor], hidden: Tensor
    ) -> tuple[Tensor, dict[int, RankedLogprobs], dict[int, str]]:
        """Return tokens (n,), 0 on failure, and logprobs and failures by row."""
        if self._together is not None:
            try:
                return *self._together(logits(hidden)), {}
            except BaseException as error:
                if not is_contained(error):
                    raise
        return self._one_by_one(logits(hidden))

    def _one_by_one(
        self, logits: Tensor
    ) -> tuple[Tensor, dict[int, RankedLogprobs], dict[int, str]]:
        tokens = torch.zeros(len(self._sequences), dtype=torch.int64, device=self._device)
        reports: dict[int, RankedLogprobs] = {}
        failed: dict[int, str] = {}
        for row, sequence in enumerate(self._sequences):
            try:
                sampler = self._make([sequence], self._ops, self._device)
                chosen, report = sampler(logits[row : row + 1].clone())
            except BaseException as error:
                if not is_contained(error):
                    raise
                failed[row] = described(error)
            else:
                tokens[row] = chosen[0]
                if 0 in report:
                    reports[row] = report[0]
        return tokens, reports, failed


def adjusts(params: SamplingParams) -> bool:
    """True if these parameters can change logits."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.grammar is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def adjust(logits: Tensor, sequence: TokenSequence) -> None:
    """Apply penalties, bias, `min_tokens` and grammar, in this order, to logits (vocab,).

    If the last two leave no token, end tokens are allowed. Raises GrammarError.
    """
    params = sequence.params
    if params.repetition_penalty != 1.0:
        _penalize_repetition(logits, sequence)
    if params.frequency_penalty or params.presence_penalty:
        seen = sequence.output_counts
        cost = seen.counts * params.frequency_penalty + params.presence_penalty
        logits[_on(logits, seen.ids)] -= upload(cost, logits.device).to(logits.dtype)
    if params.logit_bias:
        tokens, bias = sequence.bias
        logits[_on(logits, tokens)] += upload(bias, logits.device).to(logits.dtype)
    _forbid(logits, sequence)


def _penalize_repetition(logits: Tensor, sequence: TokenSequence) -> None:
    # Divides positive and multiplies negative logits (arXiv 1909.05858, Eq. 2).
    penalty = sequence.params.repetition_penalty
    seen = _on(logits, sequence.all_counts.ids)
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _forbid(logits: Tensor, sequence: TokenSequence) -> None:
    banned = sequence.banned
    if sequence.grammar is None:
        if len(banned):
            logits[_on(logits, banned)] = _OUT
        return
    allowed = sequence.grammar.allowed()
    if len(banned):
        unbanned = allowed.copy()
        unbanned[banned] = False
        allowed = unbanned if unbanned.any() else allowed
    logits.masked_fill_(~upload(allowed, logits.device), _OUT)


def _on(logits: Tensor, tokens: NDArray[np.integer]) -> Tensor:
    return upload(tokens.astype(np.int64), logits.device)
