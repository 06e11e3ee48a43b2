"""Compile the kernels before the first request needs them."""

from __future__ import annotations

import numpy as np

from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Result
from pigou.kv.block_pool import BlockPool
from pigou.request import Request


def warm_up() -> None:
    """Run two small requests through an engine, so that every kernel is compiled or loaded.

    Takes some seconds the first time on a machine, and a fraction of one after that.
    """
    core = EngineCore(
        EngineConfig(
            blocks=8,
            block_size=1,
            max_seqs=2,
            max_batched_tokens=4,
            max_model_len=8,
            max_repeat=4,
        )
    )
    hashes = np.array([[1, 1], [2, 2]], dtype=np.uint64)
    for name in ("cold", "hit"):
        core.add(Request(name, prompt=2, max_tokens=4, hashes=hashes))
        while name in core:
            plan = core.schedule(0)
            core.apply(plan, Result(steps=plan.repeat))
    core.clear_cache()
    _learn()
    _give_up()
    _hand_out()


def _learn() -> None:
    """Run two requests side by side, whose blocks are cached as they are generated."""
    core = EngineCore(
        EngineConfig(
            blocks=8, block_size=1, max_seqs=2, max_batched_tokens=4, max_model_len=8, max_repeat=4
        )
    )
    for name in ("one", "other"):
        core.add(Request(name, prompt=2, max_tokens=3))
    fresh = np.arange(1, 33, dtype=np.uint64).reshape(2, 8, 2)
    while core.running or core.waiting:
        plan = core.schedule(0)
        sealed = {row: fresh[row] for row in plan.rows.tolist()}
        core.apply(plan, Result(steps=plan.repeat, sealed=sealed))


def _give_up() -> None:
    """Run a request beside another that has to give up entries for it."""
    eviction = EvictionConfig(sinks=0, recent=1, least=1, interval=1)
    core = EngineCore(
        EngineConfig(blocks=6, block_size=1, max_seqs=2, max_model_len=8, eviction=eviction)
    )
    for name in ("one", "other"):
        core.add(Request(name, prompt=2, max_tokens=4))
    while core.running or core.waiting:
        plan = core.schedule(0)
        core.apply(plan, Result(steps=plan.repeat))


def _hand_out() -> None:
    """Do with blocks what only tiers ask for."""
    pool = BlockPool(1)
    next_ = pool.peek(1)
    pool.claim(next_)
    pool.release_chain(next_)
