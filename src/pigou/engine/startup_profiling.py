"""Startup profiling: a worker compiles its kernels and measures its speed before it is ready."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Result
from pigou.kv.block_pool import BlockPool
from pigou.request import BlockHashes, Request

#: Cache entries of each stream at its first step.
CONTEXT_TOKENS = 256
#: Steps measured without a prompt.
DECODE_STEPS = 8
#: How often a load is measured: the first run touches memory and compiles, the quickest counts.
REPEATS = 2
_PROMPTS = (128, 512, 2048, 8192)
_STREAMS = (1, 4, 16, 64)
#: Numbers of streams beside which prompts are measured.
_MIXED_STREAMS = (4, 16)
#: Most steps in which streams may gather: those that came first are longer by as many tokens.
_MAX_GATHERING = CONTEXT_TOKENS // 2


class ProfiledLoad(NamedTuple):
    """A load to measure."""

    tokens: int  # prompt length; 0 for `DECODE_STEPS` steps without a prompt
    streams: int

    @property
    def size(self) -> int:
        """Approximate number of tokens to set up and compute."""
        return REPEATS * self.tokens + self.streams * (CONTEXT_TOKENS + REPEATS * DECODE_STEPS)


def profiled_loads(config: EngineConfig) -> tuple[ProfiledLoad, ...]:
    """Return the loads that a worker with these limits can measure, smallest first."""
    prompts = [ProfiledLoad(tokens, 0) for tokens in _PROMPTS]
    streams = [ProfiledLoad(0, count) for count in _STREAMS]
    mixed = [ProfiledLoad(tokens, count) for count in _MIXED_STREAMS for tokens in _PROMPTS]
    fitting = (load for load in (*prompts, *streams, *mixed) if _fits(load, config))
    return tuple(sorted(fitting, key=lambda load: load.size))


def max_stream_tokens(load: ProfiledLoad, config: EngineConfig) -> int:
    """Return the maximum of tokens, prompt and output, of each of a load's streams."""
    steps = max(DECODE_STEPS, _chunks(load, config))
    return CONTEXT_TOKENS + _gathering(load, config) + REPEATS * steps + 1


def _fits(load: ProfiledLoad, config: EngineConfig) -> bool:
    tokens, streams = load
    size = config.block_size
    blocks = -(-(tokens + 1) // size) + streams * (
        -(-max_stream_tokens(load, config) // size) + config.headroom
    )
    return (
        streams + (tokens > 0) <= config.max_seqs
        and streams < config.max_batched_tokens
        and (not config.max_waiting or streams <= config.max_waiting)
        and tokens < config.max_model_len
        and (not streams or max_stream_tokens(load, config) <= config.max_model_len)
        and _gathering(load, config) <= _MAX_GATHERING
        and blocks <= config.blocks
    )


def _gathering(load: ProfiledLoad, config: EngineConfig) -> int:
    return -(-load.streams * CONTEXT_TOKENS // _chunk_tokens(load, config))


def _chunks(load: ProfiledLoad, config: EngineConfig) -> int:
    return -(-load.tokens // _chunk_tokens(load, config))


def _chunk_tokens(load: ProfiledLoad, config: EngineConfig) -> int:
    return max(1, config.max_batched_tokens - load.streams)


def warm_up() -> None:
    """Run small requests through engines to compile every kernel, which takes seconds once."""
    core = EngineCore(_warm_up_config(max_batched_tokens=4, max_repeat=4))
    hashes = np.array([[1, 1], [2, 2]], dtype=np.uint64)
    for name in ("cold", "hit"):
        core.add(Request(name, prompt=2, max_tokens=4, hashes=hashes))
        _run(core)
    core.clear_cache()
    _cache_generated_blocks()
    _evict_tokens()
    pool = BlockPool(1)  # calls of tiers alone
    block = pool.peek(1)
    pool.claim(block)
    pool.release_chain(block)
    pool.open_accounts(1)
    pool.available(pool.nobody)
    pool.forget_tree(0)


def _warm_up_config(
    blocks: int = 8,
    max_batched_tokens: int = 8192,
    max_repeat: int = 1,
    eviction: EvictionConfig | None = None,
) -> EngineConfig:
    return EngineConfig(
        blocks=blocks, block_size=1, max_seqs=2, max_batched_tokens=max_batched_tokens,
        max_model_len=8, max_repeat=max_repeat, eviction=eviction,
    )  # fmt: skip


def _run(core: EngineCore, fresh: BlockHashes | None = None) -> None:
    while core.running or core.waiting:
        plan = core.schedule(0)
        hashes = {} if fresh is None else {row: fresh[row] for row in plan.rows.tolist()}
        core.apply(plan, Result(steps=plan.repeat, full_block_hashes=hashes))


def _cache_generated_blocks() -> None:
    """Run two requests side by side, with generated blocks cached."""
    core = EngineCore(_warm_up_config(max_batched_tokens=4, max_repeat=4))
    for name in ("one", "other"):
        core.add(Request(name, prompt=2, max_tokens=3))
    _run(core, np.arange(1, 33, dtype=np.uint64).reshape(2, 8, 2))


def _evict_tokens() -> None:
    eviction = EvictionConfig(sinks=0, recent=1, least=1, interval=1)
    core = EngineCore(_warm_up_config(blocks=6, eviction=eviction))
    for name in ("one", "other"):
        core.add(Request(name, prompt=2, max_tokens=4))
    _run(core)
