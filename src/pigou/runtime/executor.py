"""TorchExecutor: executes an EngineCore's plans with a real model."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.config import ConfigError
from pigou.engine.plan import Finish, Plan, Result
from pigou.request import BlockHashes, FinishReason, Ints, SamplingParams
from pigou.runtime.attention.batch import StepBatch, make_batch
from pigou.runtime.attention.kv_cache import KVCache
from pigou.runtime.attention.paged_attention import PagedAttention
from pigou.runtime.lora import LoRABank
from pigou.runtime.models.decoder import DecoderModel
from pigou.runtime.ops import Ops
from pigou.runtime.sampling import IsolatedSampler, Sampler, adjusts, report
from pigou.runtime.sequence import TokenSequence, make_sequence
from pigou.runtime.step_output import RankedLogprobs, StepOutput, described, is_contained
from pigou.runtime.structured_output import Grammars, GrammarState
from pigou.runtime.tensor_io import upload
from pigou.runtime.token_eviction.evictor import Evictor, TokenRecomputation

#: Tokens whose logits are held at once.
_AT_ONCE = 256

OnStep = Callable[[StepOutput], bool]


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


class TorchExecutor:
    """Executes plans on the token ids of requests, and samples. Not thread-safe."""

    def __init__(
        self, *, model: DecoderModel, cache: KVCache, tables: Ints, attention: PagedAttention,
        grammars: Callable[[], Grammars], end_tokens: frozenset[int],
        evictor: Evictor | None = None, lora: LoRABank | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:  # fmt: skip
        """Bind a model to a cache and a core; `evictor` None evicts no entries."""
        self.model = model
        self.lora = lora
        self.cache = cache
        self.tables = tables
        self._attention = attention
        self._make_grammars = grammars
        self._grammars: Grammars | None = None
        self._end_tokens = end_tokens
        self._clock = clock
        self.evictor = evictor
        self._recomputation: TokenRecomputation | None = None
        if evictor is not None:
            attention.watch = evictor.watch if evictor.watches else None
            if evictor.policy.recomputes and lora is not None:
                raise ConfigError("eviction.policy recomputes without adapters; leave one out")
            if evictor.policy.recomputes:
                self._recomputation = TokenRecomputation(model, cache, evictor, attention.turns)
        self._device = cache.data.device
        self.steps_ahead = self._device.type == "cuda"
        self.sampler: Callable[[list[TokenSequence], Ops, torch.device], Sampler] = Sampler
        self.proposer: Proposer | None = None
        self._decoding: dict[int, TokenSequence] = {}  # rows of the last plan that go on
        self._sequences: dict[str, TokenSequence] = {}
        self._rows: dict[int, TokenSequence] = {}

    @property
    def path(self) -> str:
        """What computes attention and decode steps, for logs: a slow path is not to go unseen."""
        sizes = getattr(self.model, "sizes", None)
        graphs = f"; decode graphs of up to {sizes[-1]} streams" if sizes else ""
        return f"{self._attention.kernels}{graphs}"

    def set_beat(self, beat: Callable[[], None]) -> None:
        """Call `beat` before each layer of a step."""
        self._attention.beat = beat

    def add(
        self, request: str, tokens: Items[int] | NDArray[np.integer], params: SamplingParams,
        seed: bytes, resume: int = 0, *, hashes: BlockHashes | None = None,
        grammar: GrammarState | None = None, adapter: str = "",
    ) -> None:  # fmt: skip
        """Add a request before it is planned; raises GrammarError or ValueError if invalid.

        `seed` keys the block hashes (empty for none), `hashes` are those the core knows (None for
        all full blocks), `grammar` is the state after the resumed tokens (None to compile it).
        """
        if request in self._sequences:
            raise ValueError(f"request {request!r} is here already")
        self._check(tokens, params)
        sequence = make_sequence(
            request, tokens, params, seed=seed, resume=resume, end_tokens=self._end_tokens,
            block_size=self.cache.layout.block_size, hashes=hashes,
        )  # fmt: skip
        if params.grammar is not None:
            sequence.grammar = grammar
            if grammar is None:
                output = sequence.output.tolist()
                sequence.grammar = self.grammars().start(params.grammar, output)
        sequence.adapter = adapter
        self._sequences[request] = sequence

    def drop(self, request: str) -> None:
        """Drop a request; unknown ids are ignored."""
        self._sequences.pop(request, None)
        if self.evictor is not None:
            self.evictor.forget(request)
        if self.proposer is not None:
            self.proposer.drop(request)

    def truncate(self, request: str, tokens: int, last: int | None = None) -> None:
        """Remove a request's last tokens, between plans; raises ValueError if impossible.

        `last` replaces the last one left, which is not computed yet.
        """
        sequence = self._sequences[request]
        row = next((row for row, other in self._rows.items() if other is sequence), None)
        if row is None:
            raise ValueError(f"request {request!r} has no row")
        if sequence.grammar is not None:
            raise ValueError(f"request {request!r} has a grammar, which cannot be taken back")
        if not 0 <= tokens <= sequence.generated:
            raise ValueError(f"request {request!r} generated {sequence.generated} tokens")
        if self.evictor is not None:
            self.evictor.truncate(row, tokens)
        sequence.truncate(tokens, self.cache.layout.block_size)
        if last is not None:
            sequence.buffer[sequence.length - 1] = last

    def tokens(self, request: str) -> Ints:
        """Return a copy of a request's token ids, prompt and output."""
        sequence = self._sequences[request]
        return sequence.buffer[: sequence.length].copy()

    def grammars(self) -> Grammars:
        """Return the tokenizer's grammars; raises GrammarError without tokenizer or end token."""
        if self._grammars is None:
            self._grammars = self._make_grammars()
        return self._grammars

    def drafts(self) -> Ints | None:
        """Return the draft tokens that rows of the last plan offer, (max_seqs,); None for none."""
        rows = [row for row, s in self._decoding.items() if self._sequences.get(s.request) is s]
        if self.proposer is None or not rows:
            return None
        offers: Ints = np.zeros(len(self.tables), dtype=np.int32)
        offers[rows] = self.proposer.offers([self._decoding[row] for row in rows])
        return offers

    def execute(self, plan: Plan, on_step: OnStep | None = None) -> Result:
        """Run moves, then steps until a sequence ends; raises ValueError on a row mismatch."""
        for started in plan.started:
            self._rows[started.row] = self._sequences[started.request]
            if self.lora is not None:
                self.lora.take_row(started.row, self._rows[started.row].adapter)
        if self.evictor is not None:
            with torch.inference_mode():
                self.evictor.begin_plan(plan, self._rows)
        self.cache.move(plan.swap_out, plan.copies, plan.swap_in)
        if self._recomputation is not None and plan.recomputations:
            self._recomputation(
                plan.recomputations, {r.row: self._rows[r.row].buffer for r in plan.recomputations}
            )
        if not plan:
            return Result()
        sequences = [self._rows[row] for row in plan.rows.tolist()]
        result = Result()
        with torch.inference_mode():
            if len(plan.drafts):
                ended, durations = self._verify(plan, sequences, on_step, result)
            elif self.steps_ahead and self._is_plain(plan, sequences):
                ended, durations = self._steps_ahead(plan, sequences, on_step)
            else:
                ended, durations = self._steps(plan, sequences, on_step)
        result.steps = steps = len(durations)
        result.finished = [Finish(entry, reason, steps) for entry, reason in ended.items()]
        result.full_block_hashes = self._cache_full_blocks(plan, sequences, result)
        result.durations = np.array(durations, dtype=np.int64)
        if self.evictor is not None:
            with torch.inference_mode():
                result.lost_returns, result.regained_returns = self.evictor.end_plan(plan, steps)
        return result

    def _steps(
        self, plan: Plan, sequences: list[TokenSequence], on_step: OnStep | None
    ) -> tuple[dict[int, FinishReason], list[int]]:
        batch = self._lay_out(plan, sequences)
        sampling = [sequences[entry] for entry in batch.entries.tolist()]
        sampler = IsolatedSampler(self.sampler, sampling, self.model.ops, self._device)
        reporting = [s for s in sequences if s.prompt_logprobs or s.params.pooling]
        wanted = upload(batch.last[batch.entries], self._device)
        needs_logits = self.evictor is not None and bool(self.evictor.policy.logit_fields)
        if self.lora is not None:
            self.lora.begin(batch.rows, batch.last[batch.entries])
        durations: list[int] = []
        began = self._clock()
        while True:
            if self.evictor is not None:
                self.evictor.begin_step(batch)
            self._attention.begin(batch)
            output = StepOutput.of_none(len(plan.rows))
            # If every token samples, they are the plan's single tokens, in order.
            some = None if reporting or needs_logits or len(wanted) == batch.size else wanted
            hidden = self.model.hidden(batch.tokens, self._attention, some)
            if reporting:
                self._report_prompts(plan, sequences, batch, hidden, output)
                reporting = []
            if needs_logits:
                self._pass_logits(batch, hidden)
            if len(hidden) != len(wanted):
                hidden = hidden[wanted]
            if sampling:
                chosen, reports, failed = sampler(self.model.logits, hidden)
                output.logprobs = {int(batch.entries[i]): r for i, r in reports.items()}
                output.broken |= {int(batch.entries[i]): why for i, why in failed.items()}
                self._note(batch.entries.tolist(), sampling, chosen.tolist(), output)
            durations.append(self._clock() - began)
            goes_on = on_step is None or on_step(output)
            began = self._clock()
            ended = _ended(output)
            last = len(durations) == plan.repeat or began >= plan.horizon
            if self.proposer is not None:
                going = [entry for entry in batch.entries.tolist() if entry not in ended]
                self._decoding = {int(plan.rows[entry]): sequences[entry] for entry in going}
                if plan.drafts_pay and (offers := self.drafts()) is not None:
                    last |= bool(offers.any())
            if ended or last or not goes_on:
                return ended, durations
            batch.advance(chosen.to(batch.tokens.dtype))

    def _is_plain(self, plan: Plan, sequences: list[TokenSequence]) -> bool:
        """True if rows only decode, and no draw depends on tokens that the host has yet to read."""
        careful = (adjusts(s.params) or s.params.logprobs is not None for s in sequences)
        unwatched = self.evictor is None and self.proposer is None
        decodes = bool((plan.counts == 1).all() and plan.samples.all())
        return plan.repeat > 1 and unwatched and decodes and not any(careful)

    def _steps_ahead(
        self, plan: Plan, sequences: list[TokenSequence], on_step: OnStep | None
    ) -> tuple[dict[int, FinishReason], list[int]]:
        """Run `_steps` with the next step queued on the device while a step's tokens are read.

        The step after an end is queued in vain; its cache entries are written again or freed.
        """
        batch = self._lay_out(plan, sequences)
        entries = batch.entries.tolist()
        if self.lora is not None:
            self.lora.begin(batch.rows, batch.last[batch.entries])
        durations: list[int] = []
        began = self._clock()
        queued = self._queue_step(batch, sequences)
        while True:
            (chosen, failed, read), at = queued, len(durations) + 1
            more = at < plan.repeat and self._clock() < plan.horizon
            if more:
                batch.advance(chosen.to(batch.tokens.dtype))
                queued = self._queue_step(batch, [s.after(1) for s in sequences])
            output = StepOutput.of_none(len(plan.rows))
            output.broken |= failed
            self._note(entries, sequences, read(), output)
            durations.append(self._clock() - began)
            goes_on = on_step is None or on_step(output)
            began = self._clock()
            ended = _ended(output)
            if ended or not more or not goes_on:
                return ended, durations

    def _queue_step(
        self, batch: StepBatch, sequences: list[TokenSequence]
    ) -> tuple[Tensor, dict[int, str], Callable[[], list[int]]]:
        """Queue a decode step; return its tokens (n,), failures, and a function that reads them."""
        self._attention.begin(batch)
        hidden = self.model.hidden(batch.tokens, self._attention, None)
        sampler = IsolatedSampler(self.sampler, sequences, self.model.ops, self._device)
        chosen, _, failed = sampler(self.model.logits, hidden)
        if not chosen.is_cuda:
            return chosen, failed, chosen.tolist
        host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
        host.copy_(chosen, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> list[int]:
            copied.synchronize()
            tokens: list[int] = host.tolist()
            return tokens

        return chosen, failed, read

    def _verify(
        self, plan: Plan, sequences: list[TokenSequence], on_step: OnStep | None, result: Result
    ) -> tuple[dict[int, FinishReason], list[int]]:
        """Compute each entry's last token and drafts; sample until a draw is not the draft.

        Parameters that depend on the output so far see it grow token by token.
        """
        assert self.proposer is not None
        began = self._clock()
        drafts = self.proposer.propose(sequences, plan.drafts.tolist())
        result.drafting = self._clock() - began
        tokens = [
            np.concatenate((s.buffer[s.length - 1 : s.length], some))
            for s, some in zip(sequences, drafts, strict=True)
        ]
        batch = make_batch(plan, tokens, self._device)
        if self.lora is not None:
            self.lora.begin(batch.rows, np.arange(batch.size))
        self._attention.begin(batch)
        logits = self.model.logits(self.model.hidden(batch.tokens, self._attention, None))
        firsts = (batch.last - plan.drafts).tolist()
        ahead = [
            (entry, depth)
            for entry, sequence in enumerate(sequences)
            if not adjusts(sequence.params)
            for depth in range(len(drafts[entry]) + 1)
        ]
        at_once = dict(zip(ahead, self._sample(
            [sequences[entry].after(depth) for entry, depth in ahead],
            logits, [firsts[entry] + depth for entry, depth in ahead],
        ), strict=True))  # fmt: skip
        result.accepted = np.full(len(plan.rows), -1, dtype=np.int32)
        outputs: list[StepOutput] = []
        ended: dict[int, FinishReason] = {}
        going = list(range(len(plan.rows)))
        while going:
            depth = len(outputs)
            careful = [entry for entry in going if adjusts(sequences[entry].params)]
            drawn = dict(zip(careful, self._sample(
                [sequences[entry] for entry in careful], logits,
                [firsts[entry] + depth for entry in careful],
            ), strict=True))  # fmt: skip
            drawn |= {entry: at_once[entry, depth] for entry in going if entry not in drawn}
            output = StepOutput.of_none(len(plan.rows))
            output.logprobs = {e: r for e in going if (r := drawn[e][1]) is not None}
            output.broken = {e: why for e in going if (why := drawn[e][2]) is not None}
            self._note(going, [sequences[e] for e in going], [drawn[e][0] for e in going], output)
            outputs.append(output)
            result.accepted[going] += 1
            ended |= _ended(output)
            going = [
                entry
                for entry in going
                if entry not in ended
                and depth < len(drafts[entry])
                and output.tokens[entry] == drafts[entry][depth]
            ]
        self._decoding = {
            int(row): sequences[e] for e, row in enumerate(plan.rows) if e not in ended
        }
        durations = [self._clock() - began]
        if on_step is not None:
            for output in outputs:
                on_step(output)
        return ended, durations

    def _sample(
        self, sequences: list[TokenSequence], logits: Tensor, rows: list[int]
    ) -> list[tuple[int, RankedLogprobs | None, str | None]]:
        """Return a token for each sequence by its row of logits, its logprobs, and its failure."""
        if not sequences:
            return []
        sampler = IsolatedSampler(self.sampler, sequences, self.model.ops, self._device)
        index = upload(np.array(rows, dtype=np.int64), self._device)
        chosen, reports, failed = sampler(lambda at: logits[at], index)
        return [(t, reports.get(i), failed.get(i)) for i, t in enumerate(chosen.tolist())]

    def _pass_logits(self, batch: StepBatch, hidden: Tensor) -> None:
        """Pass all tokens' logits to the eviction policy, in parts to bound memory."""
        assert self.evictor is not None
        for at in range(0, batch.size, _AT_ONCE):
            logits = self.model.logits(hidden[at : at + _AT_ONCE])
            locations = np.ascontiguousarray(batch.locations[:, at : at + _AT_ONCE])
            self.evictor.end_step(locations, logits)

    def _lay_out(self, plan: Plan, sequences: list[TokenSequence]) -> StepBatch:
        spans = zip(sequences, plan.starts.tolist(), plan.counts.tolist(), strict=True)
        return make_batch(plan, [s.buffer[at : at + n] for s, at, n in spans], self._device)

    def _note(
        self, entries: list[int], sampling: list[TokenSequence], tokens: list[int],
        output: StepOutput,
    ) -> None:  # fmt: skip
        """Append sampled tokens to their sequences."""
        for entry, sequence, token in zip(entries, sampling, tokens, strict=True):
            if entry in output.broken:
                output.finished[entry] = True
                continue
            output.tokens[entry] = token
            try:
                if sequence.failure is None and sequence.append(token):
                    output.finished[entry] = True
            except BaseException as error:
                if not is_contained(error):
                    raise
                output.broken[entry] = described(error)
            if sequence.failure is not None:
                output.failed[entry] = sequence.failure
            if entry in output.broken or sequence.failure is not None:
                output.finished[entry], output.tokens[entry] = True, -1
                output.logprobs.pop(entry, None)
        if self._grammars is not None and self._grammars.budget is not None:
            self._grammars.budget.begin_step()

    def _report_prompts(
        self, plan: Plan, sequences: list[TokenSequence], batch: StepBatch, hidden: Tensor,
        output: StepOutput,
    ) -> None:  # fmt: skip
        for entry, sequence in enumerate(sequences):
            start, count = int(plan.starts[entry]), int(plan.counts[entry])
            first = int(batch.last[entry]) - count + 1
            if sequence.params.pooling:
                whole = sequence.params.pooling == "mean"
                states = hidden[first if whole else first + count - 1 : first + count]
                part: NDArray[np.float32] = states.float().sum(0).cpu().numpy()
                before = sequence.pooled if whole and start else None
                sequence.pooled = part if before is None else before + part
                if plan.samples[entry]:
                    divisor = np.float32(sequence.prompt if whole else 1)
                    output.pooled[entry] = sequence.pooled / divisor
            if not sequence.prompt_logprobs:
                continue
            known = max(min(start + count, sequence.prompt - 1) - start, 0)
            if known:
                states = hidden[first : first + known]
                given = sequence.buffer[start + 1 : start + 1 + known]
                try:
                    reports = self._report_prompt(states, given, sequence.params)
                except Exception as error:
                    if not is_contained(error):
                        raise
                    output.broken[entry], output.finished[entry] = described(error), True
                    sequence.prompt_logprobs = []
                    continue
                sequence.prompt_logprobs[start + 1 : start + 1 + known] = reports
            if plan.samples[entry]:
                output.prompt_logprobs[entry] = sequence.prompt_logprobs
                sequence.prompt_logprobs = []

    def _report_prompt(
        self, states: Tensor, tokens: Ints, params: SamplingParams
    ) -> list[RankedLogprobs]:
        ids = upload(tokens.astype(np.int64), self._device)
        reports = []
        for some, part in zip(states.split(_AT_ONCE), ids.split(_AT_ONCE), strict=True):
            tops = [params.prompt_logprobs or 0] * len(part)
            reports += report(self.model.logits(some), part, tops)
        return reports

    def _cache_full_blocks(
        self, plan: Plan, sequences: list[TokenSequence], result: Result
    ) -> dict[int, BlockHashes]:
        """Hash blocks that became full, unless entries were evicted from them."""
        computed = plan.kv_lens + plan.counts + (result.steps - 1)
        if len(plan.drafts):
            computed += result.accepted - plan.drafts
        whole = plan.kv_lens == plan.starts
        size = self.cache.layout.block_size
        full = computed // size
        sealed = {}
        for entry, sequence in enumerate(sequences):
            if whole[entry] and full[entry] > sequence.sealed:
                hashes = sequence.hash_full_blocks(int(computed[entry]), size)
                if len(hashes):
                    sealed[int(plan.rows[entry])] = hashes
        return sealed

    def _check(self, tokens: Items[int] | NDArray[np.integer], params: SamplingParams) -> None:
        vocab = self.model.config.vocab
        named = {
            "a prompt token": np.asarray(tokens),
            "a token of logit_bias": np.array(list(params.logit_bias), dtype=np.int64),
            "a token of stop_token_ids": np.array(list(params.stop_token_ids), dtype=np.int64),
        }
        for name, ids in named.items():
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
                wrong = ids[(ids < 0) | (ids >= vocab)][0]
                raise ValueError(f"{name} is {wrong}; it must be in [0, {vocab})")


def _ended(output: StepOutput) -> dict[int, FinishReason]:
    ended = dict.fromkeys(np.flatnonzero(output.finished).tolist(), FinishReason.STOP)
    return ended | dict.fromkeys([*output.failed, *output.broken], FinishReason.ERROR)
