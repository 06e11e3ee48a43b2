"""Proposers of draft tokens: what followed the same tokens before, or a smaller model.

A draft is accepted where the model's own draw is that token. A draw inverts the distribution at a
number of seed and position alone, so tokens are those of a run without drafts.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pigou.compiled import bare_kernel
from pigou.config import SpeculativeConfig
from pigou.request import Ints
from pigou.runtime.sequence import TokenSequence

_NO_TOKENS: Ints = np.empty(0, dtype=np.int32)


class Proposer(Protocol):
    """Proposes draft tokens for decoding sequences."""

    def offers(self, sequences: list[TokenSequence]) -> list[int]:
        """Return how many tokens could be proposed behind each sequence."""
        ...

    def propose(self, sequences: list[TokenSequence], counts: list[int]) -> list[Ints]:
        """Return as many tokens as counted behind each sequence, at most those offered."""
        ...

    def drop(self, request: str) -> None:
        """Forget a request; unknown ids are ignored."""
        ...


@bare_kernel
def look_up(tokens: Ints, length: int, shortest: int, longest: int, out: Ints) -> int:
    """Write what followed the longest earlier match of the last tokens, the latest of these.

    Behind the end of `tokens[:length]` it repeats itself. Returns the length of the match, 0 for
    one under `shortest`; matches are compared up to `longest` tokens.
    """
    matched, at = shortest - 1, -1
    for end in range(length - 2, shortest - 2, -1):
        same = 0
        while same < longest and same <= end and tokens[end - same] == tokens[length - 1 - same]:
            same += 1
        if same > matched:
            matched, at = same, end
            if same == longest:
                break
    if at < 0:
        return 0
    period = length - 1 - at
    for i in range(out.shape[0]):
        out[i] = tokens[at + 1 + i] if i < period else out[i - period]
    return matched


class NgramProposer:
    """Proposes what followed the last n tokens where they occurred before, prompt or output."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._drafts = config.num_speculative_tokens
        self._shortest, self._longest = config.ngram
        self._proposed: dict[str, tuple[int, Ints]] = {}  # length looked up at, and tokens

    def offers(self, sequences: list[TokenSequence]) -> list[int]:
        """Look sequences up."""
        return [len(self._look_up(sequence)) for sequence in sequences]

    def propose(self, sequences: list[TokenSequence], counts: list[int]) -> list[Ints]:
        """Return the tokens that were looked up."""
        pairs = zip(sequences, counts, strict=True)
        return [self._look_up(s)[:count] if count else _NO_TOKENS for s, count in pairs]

    def drop(self, request: str) -> None:
        """Forget a request's tokens."""
        self._proposed.pop(request, None)

    def _look_up(self, sequence: TokenSequence) -> Ints:
        length, tokens = self._proposed.get(sequence.request, (0, _NO_TOKENS))
        if length != sequence.length:
            tokens = np.empty(self._drafts, dtype=np.int32)
            if not look_up(sequence.buffer, sequence.length, self._shortest, self._longest, tokens):
                tokens = _NO_TOKENS
            self._proposed[sequence.request] = sequence.length, tokens
        return tokens
