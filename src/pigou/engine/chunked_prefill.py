"""Chunked prefill: how many tokens of which prompts a step computes.

The token budget goes to decodes, then to chunks of running prompts in queue order, then to new
sequences. With priorities, prompts wait for those of a lower number, and background prompts share
`max_background_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable

from pigou.engine.lanes import LONG
from pigou.engine.schedule_builder import ScheduleBuilder
from pigou.engine.sequence import Sequence
from pigou.engine.state import EngineState


def prefill_room(builder: ScheduleBuilder, seq: Sequence) -> int:
    """Return how many tokens of a prompt this step can still compute."""
    room = builder.budget
    if builder.lane is not None and builder.lane.of(seq) == LONG:
        room = min(room, builder.long_tokens)
    return room if not builder.ranked else min(room, _ranked_room(builder, seq))


def _ranked_room(builder: ScheduleBuilder, seq: Sequence) -> int:
    priority = seq.request.priority
    room = builder.budget if priority <= 0 else min(builder.budget, builder.background)
    if builder.top_priority is not None and priority > builder.top_priority:
        room = 0
    builder.steady &= room > 0 or builder.budget == 0
    return room


def add_chunk(builder: ScheduleBuilder, seq: Sequence, remaining: int) -> None:
    """Add a chunk of a prompt's remaining tokens, as large as the budget allows."""
    count = min(remaining, prefill_room(builder, seq))
    if builder.lane is not None and builder.lane.of(seq) == LONG:
        allowed = builder.long_tokens
        chunk = builder.lane.chunk(allowed, seq.length - remaining)
        count = min(count, chunk)
        builder.long_tokens -= allowed if count == chunk else count
    builder.batch.add(seq.row, count)
    builder.budget -= count
    if builder.ranked:
        builder.top_priority = seq.request.priority
        builder.background -= count if builder.top_priority > 0 else 0


def still_prefilling(state: EngineState) -> list[Sequence]:
    """Return the running sequences with more than one token to compute."""
    return [seq for seq in state.prefilling if state.rows.remaining(seq.row) > 1]


def continue_prefills(
    state: EngineState, builder: ScheduleBuilder, admit_before: Callable[[int], None]
) -> None:
    """Add the next chunks of running prompts, in queue order.

    `admit_before` admits waiting sequences of a lower priority number before each prompt.
    """
    if not state.prefilling:
        return
    remaining = {seq: state.rows.remaining(seq.row) for seq in state.prefilling}
    unfinished = (seq for seq in state.prefilling if remaining[seq] > 1)
    state.prefilling = sorted(unfinished, key=lambda seq: seq.key)
    lane = builder.lane
    if lane is not None:  # their tokens are reserved: short prompts take the rest
        ranked = state.ranked
        state.prefilling.sort(key=lambda seq: (seq.key[0] if ranked else 0, -lane.of(seq)))
    for seq in state.prefilling[:]:
        if state.ranked and not builder.preempted:
            admit_before(seq.request.priority)
        if prefill_room(builder, seq) == 0:
            if builder.lane is not None and builder.budget:
                continue
            break
        add_chunk(builder, seq, remaining[seq])
