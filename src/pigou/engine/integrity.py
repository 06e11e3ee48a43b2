"""The laws of the engine's state, checked against one another."""

from __future__ import annotations

import numpy as np

from pigou.engine.sequence import Sequence, State
from pigou.engine.state import EngineState
from pigou.kv.integrity import IntegrityError
from pigou.request import Ints


def check_state(state: EngineState) -> None:
    """Check blocks, rows, queue and host memory.

    Raises:
        IntegrityError: names the first law that does not hold, and where.
    """
    _check_rows(state)
    _check_queue(state)
    state.pool.check(_references(state))
    if state.tiering is not None:
        state.tiering.check()
    state.host.check(np.concatenate([seq.host for seq in state.queue] or [_none()]))


def _none() -> Ints:
    return np.empty(0, dtype=np.int32)


def _references(state: EngineState) -> Ints:
    """Count who refers to each block: rows, holds, unanswered loads, copies."""
    rows = state.rows
    parts = [rows.tables[s.row, : rows.blocks[s.row]] for s in rows.owner if s is not None]
    parts += [kept.blocks for kept in (*state.held.values(), *state.draining.values())]
    parts += state.tiering.kept if state.tiering is not None else []
    parts.append(np.array([seq.source for seq in state.copying], dtype=np.int32))
    counts = np.bincount(np.concatenate(parts), minlength=state.pool.blocks)
    return counts.astype(np.int32)


def _check_rows(state: EngineState) -> None:
    rows, size = state.rows, state.config.block_size
    running = set(state.running.tolist())
    if len(running) != len(state.running):
        raise IntegrityError(f"a row runs twice: {state.running.tolist()}")
    for row, seq in enumerate(rows.owner):
        if seq is None:
            _require(row not in running and rows.length[row] == 0, "an empty row runs", row)
            continue
        _require(seq.row == row, "a sequence knows its row", row)
        _require(state.sequences.get(seq.request.id) is seq, "who has a row is in flight", row)
        _require((row in running) == (seq.state is State.RUNNING), "who runs is in order", row)
        _require(seq.state is not State.WAITING, "who waits has no row", row)
        _require(0 <= rows.computed[row] < rows.length[row], "one token is left to compute", row)
        _require(rows.length[row] < rows.limit[row], "who is at its limit has left", row)
        entries = rows.computed[row] - rows.dropped[row]
        _require(rows.blocks[row] * size >= entries, "blocks hold what there is", row)
        if rows.compacted[row]:
            _check_compacted(state, row, int(entries))
        else:
            _require(rows.known[row] == len(seq.hashes), "known hashes are counted", row)
            _require(rows.dropped[row] == 0, "who gave up entries is compacted", row)


def _check_compacted(state: EngineState, row: int, entries: int) -> None:
    """Check that a row that gave up entries cannot be found by what it holds, nor share it."""
    rows, size, pool = state.rows, state.config.block_size, state.pool
    config = state.config.eviction
    _require(config is not None, "entries are given up by a policy", row)
    assert config is not None
    blocks, sealed = int(rows.blocks[row]), int(rows.sealed[row])
    _require(rows.compacted[row] <= rows.computed[row], "who was compacted had computed", row)
    _require(rows.dropped[row] % size == 0, "whole blocks of entries are given up", row)
    _require(entries >= config.least, "who gives up entries keeps the least", row)
    _require(blocks <= -(-(entries + 1) // size), "who gave up entries holds no more", row)
    _require(rows.known[row] == 0, "who gave up entries offers none", row)
    own = rows.tables[row, sealed:blocks]
    _require(not pool.keys[own].any(), "what was compacted has no hash", row)
    _require((pool.refs(own) == 1).all(), "what was compacted is nobody else's", row)


def _check_queue(state: EngineState) -> None:
    for seq in state.sequences.values():
        waits = seq.state is State.WAITING
        _require(waits == (seq in state.queue), "who waits is in the queue", seq)
        _require(waits == (seq.row < 0), "who waits has no row", seq)
        _require(waits or not len(seq.host), "who runs has nothing on the host", seq)
        if waits and seq.dropped:
            held = -(-(seq.computed - seq.dropped) // state.config.block_size)
            _require(len(seq.host) == held, "what is left of who waits is on the host", seq)
    if len(state.queue) + state.rows.used != len(state.sequences):
        raise IntegrityError(
            f"{len(state.queue)} wait and {state.rows.used} have rows, "
            f"of {len(state.sequences)} sequences"
        )


def _require(holds: bool | np.bool_, law: str, where: int | Sequence) -> None:
    if not holds:
        place = f"row {where}" if isinstance(where, int) else f"request {where.request.id!r}"
        raise IntegrityError(f"{law}: not so for {place}")
