"""TokenSequence: a request's token ids and sampling state in the executor."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pigou.kv.hashing import chain
from pigou.request import BlockHashes, Ints, SamplingParams, no_hashes
from pigou.runtime.step_output import GrammarError, RankedLogprobs
from pigou.runtime.structured_output import GrammarState

_NO_TOKENS = np.empty(0, dtype=np.int64)
_FIRST = 64


@dataclass(slots=True)
class TokenSequence:
    """Token ids of a request, prompt and output, and its sampling state."""

    request: str
    params: SamplingParams
    buffer: Ints  # token ids; the first `length` are valid
    length: int
    prompt: int  # prompt tokens; the rest is output, generated here or elsewhere
    end_tokens: frozenset[int]
    seed: bytes  # key of the block hashes; empty for no hashing
    sealed: int  # full blocks whose hashes the core knows
    # hash of the last sealed block, shape (1, 2) or (0, 2); None if not computed yet.
    last: BlockHashes | None = None
    grammar: GrammarState | None = None
    # computed prompt tokens' logprobs; empty if not requested or already reported.
    prompt_logprobs: list[RankedLogprobs | None] = field(default_factory=list)
    pooled: NDArray[np.float32] | None = None  # sum of the prompt's hidden states so far
    failure: str | None = None  # why it failed
    adapter: str = ""  # LoRA adapter; empty for none
    _output_counts: TokenCounts | None = None
    _all_counts: TokenCounts | None = None
    _bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    _end_token_ids: NDArray[np.int64] | None = None

    @property
    def output(self) -> Ints:
        """View of the output tokens so far."""
        return self.buffer[self.prompt : self.length]

    @property
    def generated(self) -> int:
        """Output tokens so far, generated here or elsewhere."""
        return self.length - self.prompt

    @property
    def output_counts(self) -> TokenCounts:
        """Counts of the output tokens."""
        if self._output_counts is None:
            self._output_counts = TokenCounts(self.output.tolist())
        return self._output_counts

    @property
    def all_counts(self) -> TokenCounts:
        """Counts of prompt and output tokens."""
        if self._all_counts is None:
            self._all_counts = TokenCounts(self.buffer[: self.length].tolist())
        return self._all_counts

    @property
    def bias(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids of `logit_bias` and their biases."""
        if self._bias is None:
            given = self.params.logit_bias
            ids = np.array(list(given), dtype=np.int64)
            self._bias = ids, np.array(list(given.values()), dtype=np.float32)
        return self._bias

    @property
    def banned(self) -> NDArray[np.int64]:
        """End tokens forbidden until `min_tokens`; empty afterwards."""
        if self.generated >= self.params.min_tokens:
            return _NO_TOKENS
        if self._end_token_ids is None:
            self._end_token_ids = np.array(sorted(self.end_tokens), dtype=np.int64)
        return self._end_token_ids

    def append(self, token: int) -> bool:
        """Append a sampled token; True if it ends the sequence, or its grammar failed."""
        if self.length == len(self.buffer):
            self.buffer = np.concatenate((self.buffer, np.empty_like(self.buffer)))
        self.buffer[self.length] = token
        self.length += 1
        for counts in (self._output_counts, self._all_counts):
            if counts is not None:
                counts.add(token)
        done = token in self.end_tokens
        if self.grammar is not None and not done:
            try:
                done = self.grammar.advance(token)
            except GrammarError as error:
                self.failure, done = str(error), True
        return done

    def after(self, tokens: int) -> TokenSequence:
        """Return the sequence with `tokens` more, whichever they are; for sampling alone."""
        return replace(self, length=self.length + tokens)

    def truncate(self, tokens: int, block_size: int) -> None:
        """Remove the last `tokens` output tokens."""
        self.length -= tokens
        self._output_counts = self._all_counts = None
        full = (self.length - 1) // block_size
        if full < self.sealed:
            self.sealed, self.last = full, None

    def hash_full_blocks(self, computed: int, block_size: int) -> BlockHashes:
        """Return the hashes, (n, 2), of full blocks not yet reported."""
        full = computed // block_size
        if full <= self.sealed or not self.seed:
            return no_hashes()
        if self.last is None:
            known = chain(self.buffer[: self.sealed * block_size], block_size, self.seed)
            self.last = known[-1:]
        new = self.buffer[self.sealed * block_size : full * block_size]
        hashes = chain(new, block_size, self.seed, self.last)
        self.sealed, self.last = full, hashes[-1:]
        return hashes


def make_sequence(
    request: str, tokens: Items[int] | NDArray[np.integer], params: SamplingParams, *, seed: bytes,
    resume: int, end_tokens: frozenset[int], block_size: int, hashes: BlockHashes | None = None,
) -> TokenSequence:  # fmt: skip
    """Create a sequence (see `TorchExecutor.add`); raises ValueError without enough tokens."""
    given = len(tokens)
    if not 0 <= resume < given:
        raise ValueError(f"request {request!r}: {resume} of {given} tokens cannot be resumed")
    buffer = np.empty(given + params.max_tokens, dtype=np.int32)
    buffer[:given] = tokens
    stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | end_tokens
    return TokenSequence(
        request=request, params=params, buffer=buffer, length=given, prompt=given - resume,
        end_tokens=stops, seed=seed, sealed=given // block_size if hashes is None else len(hashes),
        last=None if hashes is None else hashes[-1:],
        prompt_logprobs=[None] * (given - resume if params.prompt_logprobs is not None else 0),
    )  # fmt: skip


class TokenCounts:
    """Counts the distinct tokens of a growing list; adding is O(1), reading O(distinct tokens)."""

    __slots__ = ("_counts", "_ids", "_indices")

    def __init__(self, tokens: Iterable[int]) -> None:
        self._indices: dict[int, int] = {}
        self._ids = np.empty(_FIRST, dtype=np.int64)
        self._counts = np.zeros(_FIRST, dtype=np.int64)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more token."""
        index = self._indices.setdefault(token, len(self._indices))
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[index] = token
        self._counts[index] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """View of the distinct tokens, by first occurrence."""
        return self._ids[: len(self._indices)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """View of the count of each of `ids`."""
        return self._counts[: len(self._indices)]
