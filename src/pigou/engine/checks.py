"""Checks of requests and results, and invariants of the engine's state."""

from __future__ import annotations

import numpy as np

from pigou.engine.plan import Plan, Result
from pigou.engine.sequence import NO_BLOCKS, Sequence, SequenceState
from pigou.engine.state import EngineState
from pigou.kv.block import IntegrityError
from pigou.kv.block_pool_checks import check_pool
from pigou.request import Ints, Request


class RequestTooLarge(ValueError):
    """The request does not fit even on an empty engine."""


class QueueFull(RuntimeError):
    """`EngineConfig.max_waiting` requests already wait."""


class DuplicateRequest(ValueError):
    """The request's id is in flight, pinned, or has an unanswered load."""


class UnknownLoad(KeyError):
    """The request has no load under way."""


class OutOfTurn(RuntimeError):
    """`schedule` and `apply` must alternate."""


def check_request(state: EngineState, request: Request) -> None:
    """Raise ValueError, RequestTooLarge, DuplicateRequest or QueueFull for a bad request."""
    config = state.config
    for name in ("prompt", "max_tokens"):
        if getattr(request, name) < 1:
            raise ValueError(f"{name} is {getattr(request, name)}; it must be at least 1")
    check_hashes(request)
    tokens = request.prompt + request.max_tokens
    if tokens > config.max_model_len:
        raise RequestTooLarge(
            f"prompt {request.prompt} + max_tokens {request.max_tokens} = {tokens} tokens; "
            f"max_model_len is {config.max_model_len}"
        )
    blocks = -(-(tokens - 1) // config.block_size)
    if blocks > config.blocks:
        raise RequestTooLarge(
            f"prompt {request.prompt} + max_tokens {request.max_tokens} need {blocks} blocks "
            f"of {config.block_size} tokens; there are {config.blocks}"
        )
    check_id(state, request)
    if config.max_waiting and len(state.queue) >= config.max_waiting:
        raise QueueFull(f"{len(state.queue)} requests wait; max_waiting is the limit")


def check_id(state: EngineState, request: Request) -> None:
    """Raise a DuplicateRequest if a request's id is in use."""
    name = request.id
    if name in state.sequences or name in state.pinned or name in state.draining:
        raise DuplicateRequest(f"request id {request.id!r} is in use")


def check_hashes(request: Request) -> None:
    """Raise a ValueError if a request's hashes have a wrong shape or type."""
    if request.hashes.ndim != 2 or request.hashes.shape[1] != 2:
        raise ValueError(f"hashes have shape {request.hashes.shape}; it must be (blocks, 2)")
    if request.hashes.dtype != np.uint64:
        raise ValueError(f"hashes are {request.hashes.dtype}; they must be uint64")


def check_result(plan: Plan, result: Result) -> None:
    """Raise a ValueError if a result has a wrong number of steps or an unknown entry."""
    if not 1 <= result.steps <= plan.repeat:
        raise ValueError(f"{result.steps} steps were done; it must be 1 to {plan.repeat}")
    if len(plan.drafts) and (
        result.accepted.shape != plan.drafts.shape
        or ((result.accepted < 0) | (result.accepted > plan.drafts)).any()
    ):
        raise ValueError(
            f"drafts {result.accepted.tolist()} were accepted, of {plan.drafts.tolist()}"
        )
    for finish in result.finished:
        if not 0 <= finish.entry < len(plan.rows):
            raise ValueError(f"entry {finish.entry} finished; the plan has {len(plan.rows)}")
        if not 1 <= finish.steps <= result.steps:
            raise ValueError(f"entry finished after {finish.steps} of {result.steps} steps")


def check_state(state: EngineState) -> None:
    """Raise an IntegrityError unless blocks, rows, queue and host memory are consistent."""
    _check_rows(state)
    _check_queue(state)
    check_pool(state.pool, _references(state))
    if state.offload is not None:
        state.offload.check()
    state.host.check(np.concatenate([seq.host_blocks for seq in state.queue] or [NO_BLOCKS]))


def _references(state: EngineState) -> Ints:
    """Count references to each block: rows, pins, loads and copies."""
    rows = state.rows
    parts = [rows.tables[s.row, : rows.blocks[s.row]] for s in rows.owner if s is not None]
    parts += [pinned.blocks for pinned in (*state.pinned.values(), *state.draining.values())]
    parts += state.offload.pinned if state.offload is not None else []
    parts.append(np.array([seq.copy_source for seq in state.copying], dtype=np.int32))
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
        _require(
            (row in running) == (seq.state is SequenceState.RUNNING), "who runs is in order", row
        )
        _require(seq.state is not SequenceState.WAITING, "who waits has no row", row)
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
    """Check that a compacted row shares no block and is not cached."""
    rows, size, pool = state.rows, state.config.block_size, state.pool
    config = state.config.eviction
    _require(config is not None, "entries are given up by a policy", row)
    assert config is not None
    blocks, cached = int(rows.blocks[row]), int(rows.cached[row])
    _require(rows.compacted[row] <= rows.computed[row], "who was compacted had computed", row)
    _require(rows.dropped[row] % size == 0, "whole blocks of entries are given up", row)
    _require(entries >= config.least, "who gives up entries keeps the least", row)
    _require(blocks <= -(-(entries + 1) // size), "who gave up entries holds no more", row)
    _require(rows.known[row] == 0, "who gave up entries offers none", row)
    own = rows.tables[row, cached:blocks]
    _require(not pool.keys[own].any(), "what was compacted has no hash", row)
    _require((pool.refs(own) == 1).all(), "what was compacted is nobody else's", row)


def _check_queue(state: EngineState) -> None:
    for seq in state.sequences.values():
        is_waiting = seq.state is SequenceState.WAITING
        _require(is_waiting == (seq in state.queue), "who waits is in the queue", seq)
        _require(is_waiting == (seq.row < 0), "who waits has no row", seq)
        _require(is_waiting or not len(seq.host_blocks), "who runs has nothing on the host", seq)
        if is_waiting and seq.dropped:
            held = -(-(seq.computed - seq.dropped) // state.config.block_size)
            _require(len(seq.host_blocks) == held, "what is left of who waits is on the host", seq)
    if len(state.queue) + state.rows.used != len(state.sequences):
        raise IntegrityError(
            f"{len(state.queue)} wait and {state.rows.used} have rows, "
            f"of {len(state.sequences)} sequences"
        )


def _require(holds: bool | np.bool_, law: str, where: int | Sequence) -> None:
    if not holds:
        subject = f"row {where}" if isinstance(where, int) else f"request {where.request.id!r}"
        raise IntegrityError(f"{law}: not so for {subject}")
