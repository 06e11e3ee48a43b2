"""A request as the executor keeps it: its token ids, and what sampling must remember."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pigou.kv.hashing import chain
from pigou.request import BlockHashes, Ints, no_hashes
from pigou.runtime.grammar import GrammarState
from pigou.runtime.outputs import TokenLogprobs
from pigou.sampling import SamplingParams


@dataclass(slots=True)
class Sequence:
    """Token ids of a request, prompt and output, and the state of its sampling.

    Attributes:
        request: its id.
        params: how its tokens are chosen.
        buffer: token ids; only the first `length` are known.
        length: tokens known.
        prompt: of those, tokens of the prompt; what follows was generated, here or elsewhere.
        ends: tokens that end the sequence.
        seed: key of the block hashes; empty to seal nothing.
        sealed: full blocks whose hashes the core knows.
        last: hash of the last sealed block, shape (1, 2), or (0, 2); None: not computed yet.
        grammar: state of the grammar, or None.
        prompt_logprobs: of the prompt's tokens, filled as they are computed; empty when not
            asked for or already reported.
    """

    request: str
    params: SamplingParams
    buffer: Ints
    length: int
    prompt: int
    ends: frozenset[int]
    seed: bytes
    sealed: int
    last: BlockHashes | None = None
    grammar: GrammarState | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def output(self) -> Ints:
        """Tokens generated so far, a view."""
        return self.buffer[self.prompt : self.length]

    @property
    def generated(self) -> int:
        """How many tokens were generated so far, here or elsewhere."""
        return self.length - self.prompt

    def append(self, token: int) -> bool:
        """Note a sampled token; return whether it ends the sequence."""
        if self.length == len(self.buffer):
            self.buffer = np.concatenate((self.buffer, np.empty_like(self.buffer)))
        self.buffer[self.length] = token
        self.length += 1
        done = token in self.ends
        if self.grammar is not None and not done:
            done = self.grammar.advance(token)
        return done

    def truncate(self, tokens: int, block_size: int) -> None:
        """Take back the last tokens; at most those that were generated."""
        self.length -= tokens
        full = (self.length - 1) // block_size
        if full < self.sealed:
            self.sealed, self.last = full, None

    def seal(self, computed: int, block_size: int) -> BlockHashes:
        """Hash the blocks that became full; returned once.

        Args:
            computed: tokens whose KV is in the cache.
            block_size: tokens in a block.

        Returns:
            Hashes of the blocks after those that the core knows, shape (n, 2).
        """
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
    request: str,
    tokens: Items[int] | NDArray[np.integer],
    params: SamplingParams,
    *,
    seed: bytes,
    resume: int,
    ends: frozenset[int],
    block_size: int,
    hashes: BlockHashes | None = None,
) -> Sequence:
    """Take up a request.

    Args:
        request: its id.
        tokens: ids of its prompt and, when it is resumed, of what was generated before.
        params: how its tokens are chosen.
        seed: key of the block hashes; empty to seal nothing.
        resume: how many of the last tokens were generated before.
        ends: the model's end tokens.
        block_size: tokens in a block.
        hashes: that the core was told; None stands for those of all full blocks.

    Raises:
        ValueError: there are no tokens, or fewer than were resumed.
    """
    given = len(tokens)
    if not 0 <= resume < given:
        raise ValueError(f"request {request!r}: {resume} of {given} tokens cannot be resumed")
    buffer = np.empty(given + params.max_tokens, dtype=np.int32)
    buffer[:given] = tokens
    stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | ends
    return Sequence(
        request=request,
        params=params,
        buffer=buffer,
        length=given,
        prompt=given - resume,
        ends=stops,
        seed=seed,
        sealed=given // block_size if hashes is None else len(hashes),
        last=None if hashes is None else hashes[-1:],
        prompt_logprobs=[None] * (given - resume if params.prompt_logprobs is not None else 0),
    )
