"""Proposers of draft tokens: what followed the same tokens before, or a smaller model.

A draft is accepted where the model's own draw is that token. A draw inverts the distribution at a
number of seed and position alone, so tokens are those of a run without drafts.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from pigou.compiled import bare_kernel
from pigou.config import EngineConfig, SpeculativeConfig
from pigou.engine.core import EngineCore
from pigou.kv.hashing import chain
from pigou.models import ModelError
from pigou.request import Ints, Request
from pigou.runtime.models.load import LoadedModel, load
from pigou.runtime.sequence import TokenSequence
from pigou.runtime.step_output import StepOutput
from pigou.text.model_files import read_object

#: Key of the draft model's block hashes.
_SEED = b"draft"
_NO_TOKENS: Ints = np.empty(0, dtype=np.int32)


@bare_kernel
def look_up(tokens: Ints, length: int, min_n: int, max_n: int, out: Ints) -> int:
    """Write what followed the longest earlier match of the last tokens, the latest of these.

    Behind the end of `tokens[:length]` it repeats itself. Returns the length of the match, 0 for
    one under `min_n`; matches are compared up to `max_n` tokens.
    """
    matched, at = min_n - 1, -1
    for end in range(length - 2, min_n - 2, -1):
        same = 0
        while same < max_n and same <= end and tokens[end - same] == tokens[length - 1 - same]:
            same += 1
        if same > matched:
            matched, at = same, end
            if same == max_n:
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
        self._min_n, self._max_n = config.ngram
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
            if not look_up(sequence.buffer, sequence.length, self._min_n, self._max_n, tokens):
                tokens = _NO_TOKENS
            self._proposed[sequence.request] = sequence.length, tokens
        return tokens


class DraftModel:
    """Proposes what a smaller model draws at the same numbers of seed and position.

    It is an engine of its own, with a KV cache of as many tokens. Its sequences are cut back to
    what the target accepted; one that fell behind is computed anew, from its prefix cache.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, drafts: int) -> None:
        """Build the engine with the target's limits; raises ModelError."""
        max_tokens = min(config.max_model_len + drafts + 2, model.config.context)
        blocks = max(config.blocks, -(-max_tokens // config.block_size))
        config = msgspec.structs.replace(
            config, blocks=blocks, host_blocks=0, max_model_len=max_tokens, max_waiting=0,
            max_repeat=drafts + 1, num_speculative_tokens=0, max_loras=0, order="fcfs",
            max_background_tokens=0, prefix_caching=True, repeat_chunks=False,
        )  # fmt: skip
        self._core = EngineCore(config)
        cache = model.cache(blocks, config.block_size)
        self.decoder, self.cache_bytes = model.decoder, blocks * cache.layout.block_bytes
        self._executor = model.executor(cache, self._core.tables, max_tokens)
        self._drafts = drafts

    def offers(self, sequences: list[TokenSequence]) -> list[int]:
        """Offer drafts as far as the draft model's context goes."""
        room = self._core.config.max_model_len - 2
        return [max(min(self._drafts, room - sequence.length), 0) for sequence in sequences]

    def propose(self, sequences: list[TokenSequence], counts: list[int]) -> list[Ints]:
        """Generate drafts together; one that cannot be had in time is made up, and rejected."""
        drafting = [s for s, count in zip(sequences, counts, strict=True) if count]
        begun = [s.length for s in drafting if not self._cut_back(s) and self._begin(s)]
        # One token more than is drafted, so that the last has its KV if all are accepted.
        wanted = max(counts) + 1
        for _ in range(2 + len(begun) + sum(begun) // self._core.config.max_batched_tokens):
            lacking = max((wanted - len(self._ahead(s)) for s in drafting), default=0)
            if lacking <= 0 or not self._advance(lacking):
                break
        return [
            self._filled(s, count) if count else _NO_TOKENS
            for s, count in zip(sequences, counts, strict=True)
        ]

    def drop(self, request: str) -> None:
        """End a request's sequence."""
        self._core.abort(request)
        self._executor.drop(request)

    def _cut_back(self, sequence: TokenSequence) -> bool:
        """Cut a sequence back to the target's tokens; False if it has not computed them all."""
        name, length = sequence.request, sequence.length
        if name not in self._core:
            return False
        tokens = self._executor.tokens(name)
        known = np.array_equal(tokens[: length - 1], sequence.buffer[: length - 1])
        if not known or len(tokens) < length:
            return False
        try:
            self._core.truncate(name, len(tokens) - length)
        except ValueError:  # preempted, or a block is shared
            return False
        self._executor.truncate(name, len(tokens) - length, sequence.buffer.item(length - 1))
        return True

    def _begin(self, sequence: TokenSequence) -> bool:
        """Queue the target's tokens, in place of what was known of them."""
        self.drop(sequence.request)
        length = sequence.length
        params = replace(
            sequence.params, max_tokens=self._core.config.max_model_len - length, min_tokens=0,
            grammar=None, logprobs=None, prompt_logprobs=None, stop_token_ids=frozenset(),
            ignore_eos=True,
        )  # fmt: skip
        tokens = sequence.buffer[:length]
        self._executor.add(sequence.request, tokens, params, _SEED, sequence.generated)
        hashes = chain(tokens, self._core.config.block_size, _SEED)
        self._core.add(Request(sequence.request, length, params.max_tokens, hashes))
        return True

    def _advance(self, steps: int) -> bool:
        """Execute a plan of at most `steps` steps; False if there is nothing to do."""
        left = steps

        def goes_on(_: StepOutput) -> bool:
            nonlocal left
            left -= 1
            return left > 0

        plan = self._core.schedule(0)
        for finished in self._core.apply(plan, self._executor.execute(plan, goes_on)).finished:
            self._executor.drop(finished.request)
        return bool(plan)

    def _ahead(self, sequence: TokenSequence) -> Ints:
        """Return the tokens drawn behind the target's."""
        known = sequence.request in self._core
        return self._executor.tokens(sequence.request)[sequence.length :] if known else _NO_TOKENS

    def _filled(self, sequence: TokenSequence, count: int) -> Ints:
        tokens = self._ahead(sequence)[:count]
        return np.concatenate((tokens, np.zeros(count - len(tokens), dtype=np.int32)))


def make_proposer(
    config: SpeculativeConfig, target: LoadedModel, engine: EngineConfig
) -> NgramProposer | DraftModel:
    """Build the proposer of a configuration; raises ModelError if the draft model does not fit."""
    if config.method == "ngram":
        return NgramProposer(config)
    draft = load(config.model, device=str(target.device))
    ours, theirs = (read_object(m.folder / "tokenizer.json") for m in (draft, target))
    same = ours.get("model", {}).get("vocab") == theirs.get("model", {}).get("vocab")
    if not same or draft.config.vocab != target.config.vocab:
        raise ModelError(
            f"the draft model {config.model} has another vocabulary ({draft.config.vocab} tokens) "
            f"than {target.name} ({target.config.vocab}); give one of the same family"
        )
    return DraftModel(draft, engine, config.num_speculative_tokens)
