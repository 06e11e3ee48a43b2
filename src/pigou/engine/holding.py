"""Blocks of the prefix cache that are held for another worker, which reads them."""

from __future__ import annotations

import numpy as np

from pigou.engine.sequence import NO_BLOCKS, usable
from pigou.engine.state import EngineState, Kept
from pigou.request import Ints, Request


def hold(state: EngineState, request: Request, foreseen: Ints) -> Ints:
    """Hold the longest cached prefix of a prompt under the request's id, as far as there is room.

    Blocks that somebody uses anyway cost nothing. Of those that nobody does, which could be
    handed out, at most half of what is spare is held, and none while the head of the queue waits
    for blocks: a reader that never comes would keep them for a lease. After the expiry of its
    tenure nothing is found.

    Args:
        state: of the engine.
        request: its id, prompt, hashes and expiry count.
        foreseen: free blocks that later steps of a plan under way write to, shape (n,).

    Returns:
        The blocks, in the order of the prompt, shape (held,); empty where none are held.
    """
    config = state.config
    hashes = usable(request.hashes, request.prompt // config.block_size)
    limit = 0 if request.expiry <= state.unix or not config.prefix_caching else len(hashes)
    blocks = state.prefix.match(hashes, limit).blocks
    written = np.isin(blocks, foreseen)
    if written.any():  # it is not what its hash says until then
        blocks = blocks[: int(written.argmax())]
    idle = (state.pool.refs(blocks) == 0).cumsum()
    blocks = blocks[: int(idle.searchsorted(_room(state, len(foreseen)), side="right"))]
    if not len(blocks):
        return NO_BLOCKS
    held = np.empty(len(blocks), dtype=np.int32)
    state.pool.take(blocks, held)
    state.held[request.id] = Kept(held, hashes[: len(held)].copy(), False)
    return held


def _room(state: EngineState, foreseen: int) -> int:
    """Return how many blocks that nobody uses may be held, so many being as good as handed out."""
    if state.blocked is not None:
        return 0
    spare = state.pool.free - foreseen - (state.config.headroom + 1) * state.rows.used
    return max(0, spare) // 2
