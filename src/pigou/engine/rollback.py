"""Tokens of a running sequence that are taken back, and the blocks that held them."""

from __future__ import annotations

from pigou.engine.sequence import Sequence, State
from pigou.engine.state import EngineState


def truncate(state: EngineState, seq: Sequence, tokens: int) -> None:
    """Take back the last tokens of a sequence that decodes; its blocks return at once.

    Args:
        state: of the engine.
        seq: whose tokens; it stays where it is, with as many fewer.
        tokens: how many, at most those that it generated.

    Raises:
        ValueError: it generated fewer, does not decode, gave up entries since it computed them, or
            shares a block of which some are taken back. Nothing has changed then.
    """
    rows, size, row = state.rows, state.config.block_size, seq.row
    _check(state, seq, tokens)
    computed = int(rows.computed[row]) - tokens
    entries = computed - int(rows.dropped[row])
    full, held = entries // size, -(-entries // size)
    if held > full and full < rows.sealed[row]:  # its end will hold something else
        state.removed(state.pool.forget(rows.tables[row], full, held))
    state.cut_row(seq, held)
    rows.computed[row] = computed
    rows.length[row] -= tokens
    rows.sealed[row] = min(int(rows.sealed[row]), full)
    seq.hashes = seq.hashes[: max(seq.request.prompt, computed) // size]
    if not rows.compacted[row]:
        rows.known[row] = len(seq.hashes)
    if state.appraisals is not None:
        state.appraisals.spend(row)


def _check(state: EngineState, seq: Sequence, tokens: int) -> None:
    rows, size, row = state.rows, state.config.block_size, seq.row
    name = f"request {seq.request.id!r}"
    if seq.state is not State.RUNNING or rows.length[row] - rows.computed[row] != 1:
        raise ValueError(f"{name} does not decode; nothing can be taken back")
    computed = int(rows.computed[row])
    generated = int(rows.length[row]) - seq.request.prompt
    most = min(generated, computed - int(rows.compacted[row]))
    if not 0 <= tokens <= most:
        raise ValueError(
            f"{tokens} tokens of {name} are to be taken back; it generated {generated}, and "
            f"{computed - int(rows.compacted[row])} since it gave up entries: give 0 to {most}"
        )
    entries = computed - tokens - int(rows.dropped[row])
    part = rows.tables[row, entries // size : -(-entries // size)]
    if len(part) and entries // size < rows.sealed[row] and (state.pool.refs(part) > 1).any():
        raise ValueError(f"the block of {name} that {tokens} tokens are to be taken from is shared")
