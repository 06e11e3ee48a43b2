"""Rows of `--requests FILE`: each request of a run in Pigou's trace format, with its result.

A live run and a simulated one write the same rows, and each replays the other's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pigou.request import SECOND
from pigou.sim.request_run import RequestRun
from pigou.sim.result import SimulationResult
from pigou.sim.workload import ClosedLoop, OpenLoop, RequestSpec, block_hashes
from pigou.workload.prompts import PromptJob
from pigou.workload.token_counter import SentRequest, Stream
from pigou.workload.trace_formats import RequestResult, TraceRow, short

#: Tokens of a block where prompts have none of their own, or of different sizes.
_BLOCK = 16


def sent_rows(
    jobs: Sequence[PromptJob], outcomes: Sequence[SentRequest], began: int
) -> list[TraceRow]:
    """Return the requests that a load client sent, in the order of their intended times.

    Prompts of token ids have blocks where another begins with the same one; those of text none.
    """
    sent = sorted(zip(jobs, outcomes, strict=True), key=lambda pair: pair[1].intended)
    ids: dict[tuple[int, ...], int] = {}
    blocks = [_prompt_blocks(job, ids) for job, _ in sent]
    firsts = Counter(own[0] for own in blocks if own)
    return [
        _sent_row(job, outcome, began, own if own and firsts[own[0]] > 1 else [])
        for (job, outcome), own in zip(sent, blocks, strict=True)
    ]


def _prompt_blocks(job: PromptJob, ids: dict[tuple[int, ...], int]) -> list[int]:
    """Return ids of the prompt's full blocks; each id stands for all tokens up to its end."""
    if isinstance(job.prompt, str):
        return []
    blocks: list[int] = []
    for end in range(_BLOCK, len(job.prompt) + 1, _BLOCK):
        key = (blocks[-1] if blocks else -1, *job.prompt[end - _BLOCK : end])
        blocks.append(ids.setdefault(key, len(ids)))
    return blocks


def _sent_row(job: PromptJob, sent: SentRequest, began: int, blocks: list[int]) -> TraceRow:
    stream = sent.result
    length = len(job.prompt.split() if isinstance(job.prompt, str) else job.prompt)

    def seconds(at: int) -> float:
        return (at - began) / SECOND

    intended_s, sent_s = seconds(sent.intended), seconds(sent.sent)
    if isinstance(stream, Stream):
        result = RequestResult(
            outcome="done", intended_s=intended_s, sent_s=sent_s,
            first_token_s=seconds(stream.first), last_token_s=seconds(stream.last),
            output_tokens=stream.tokens, cached_tokens=stream.cached_tokens,
        )  # fmt: skip
        if isinstance(job.prompt, str):
            length = stream.prompt_tokens or length
    else:
        result = RequestResult(
            outcome="failed", intended_s=intended_s, sent_s=sent_s, reason=stream.reason
        )
    return TraceRow(
        arrival_s=intended_s if job.think_s is None else None, think_s=job.think_s,
        input=length, output=job.output, hash_ids=blocks, block=_BLOCK if blocks else None,
        tenant=job.tenant, session=job.session, result=result,
    )  # fmt: skip


def simulated_rows(
    result: SimulationResult, workload: OpenLoop | ClosedLoop, run: str = ""
) -> Iterator[TraceRow]:
    """Yield the requests of a simulation in the order of their intended times."""
    turns: dict[int, tuple[str, bool]] = {}
    if isinstance(workload, OpenLoop):
        for number, session in enumerate(workload.sessions):
            if len(session.requests) > 1:
                for index, spec in enumerate(session.requests):
                    turns[id(spec)] = f"session-{number}", index > 0
    sizes = {one.spec.block_tokens for one in result.runs if one.spec.block_ids}
    block = sizes.pop() if len(sizes) == 1 else float(_BLOCK)
    ids: dict[tuple[int, ...], int] = {}
    for one in result.runs:
        spec = one.spec
        name, follows = turns.get(id(spec), ("", False))
        blocks = _spec_blocks(spec, one.number, block, ids)
        outcome = _simulated(one, result.begin_ns)
        yield TraceRow(
            arrival_s=None if follows else outcome.intended_s,
            think_s=spec.think_ns / SECOND if follows else None,
            input=spec.prompt_tokens, output=spec.output_tokens, hash_ids=blocks,
            block=short(block) if blocks else None, tenant=spec.tenant, session=name, run=run,
            result=outcome,
        )  # fmt: skip


def _spec_blocks(
    spec: RequestSpec, number: int, block: float, ids: dict[tuple[int, ...], int]
) -> list[int]:
    if not spec.block_ids:
        return []
    if spec.block_tokens == block:
        keys = [(spec.hash_scope, one) for one in spec.block_ids]
    else:
        hashes = block_hashes(spec, number, round(block))
        keys = [(int(low), int(high)) for low, high in hashes]
    return [ids.setdefault(key, len(ids)) for key in keys]


def _simulated(run: RequestRun, begin_ns: int) -> RequestResult:
    def seconds(at_ns: int) -> float | None:
        return (at_ns - begin_ns) / SECOND if at_ns else None

    return RequestResult(
        outcome=run.outcome.value, intended_s=(run.intended_ns - begin_ns) / SECOND,
        sent_s=seconds(run.sent_ns), first_token_s=seconds(run.first_token_ns),
        last_token_s=seconds(run.last_token_ns), output_tokens=run.output_tokens,
        cached_tokens=run.cached_tokens, prefill_worker=run.prefill_worker,
        decode_worker=run.decode_worker, reason=run.reason,
    )  # fmt: skip
