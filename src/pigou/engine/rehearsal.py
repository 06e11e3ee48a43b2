"""The rehearsal: what a worker measures of its own speed before anybody asks it for tokens."""

from __future__ import annotations

from typing import NamedTuple

from pigou.config import EngineConfig

#: Cache entries of each stream before its first step.
CONTEXT = 256
#: Steps in which streams are measured without a prompt.
STEPS = 8
#: Times that a scene is measured: the first touches memory and compiles, the quickest is told.
TAKES = 2
_PROMPTS = (128, 512, 2048, 8192)
_STREAMS = (1, 4, 16, 64)
#: Streams beside which prompts are measured as well.
_BESIDE = (4, 16)
#: Most steps in which streams may gather: those that came first are longer by as many tokens.
_LATEST = CONTEXT // 2


class Scene(NamedTuple):
    """Something to be measured.

    Attributes:
        tokens: of a prompt that is computed; 0 for `STEPS` steps without one.
        streams: that decode meanwhile.
    """

    tokens: int
    streams: int

    @property
    def size(self) -> int:
        """Tokens that it takes to set up and to compute, about."""
        return TAKES * self.tokens + self.streams * (CONTEXT + TAKES * STEPS)


def scenes(config: EngineConfig) -> tuple[Scene, ...]:
    """Return what a worker with these limits can measure, the smallest first.

    Prompts by themselves, streams by themselves, and prompts beside streams: so that each of what
    prices are made of (a prompt's time, the time between tokens, and what a prompt takes from
    streams) is seen apart from the others.
    """
    alone = [Scene(tokens, 0) for tokens in _PROMPTS]
    streams = [Scene(0, count) for count in _STREAMS]
    mixed = [Scene(tokens, count) for count in _BESIDE for tokens in _PROMPTS]
    return tuple(sorted(
        (each for each in (*alone, *streams, *mixed) if _fits(each, config)),
        key=lambda each: each.size,
    ))  # fmt: skip


def longest(scene: Scene, config: EngineConfig) -> int:
    """Return the tokens, prompt and output, that each of a scene's streams has at most."""
    take = max(STEPS, _chunks(scene, config))
    return CONTEXT + _gathering(scene, config) + TAKES * take + 1


def _fits(scene: Scene, config: EngineConfig) -> bool:
    tokens, streams = scene
    size = config.block_size
    blocks = -(-(tokens + 1) // size) + streams * (
        -(-longest(scene, config) // size) + config.headroom
    )
    return (
        streams + (tokens > 0) <= config.max_seqs
        and streams < config.max_batched_tokens
        and (not config.max_waiting or streams <= config.max_waiting)
        and tokens < config.max_model_len
        and (not streams or longest(scene, config) <= config.max_model_len)
        and _gathering(scene, config) <= _LATEST
        and blocks <= config.blocks
    )


def _gathering(scene: Scene, config: EngineConfig) -> int:
    """Return the most steps until all streams decode; the first go on from its own prompt on."""
    return -(-scene.streams * CONTEXT // _room(scene, config))


def _chunks(scene: Scene, config: EngineConfig) -> int:
    """Return the steps that the prompt takes."""
    return -(-scene.tokens // _room(scene, config))


def _room(scene: Scene, config: EngineConfig) -> int:
    """Return the tokens of prompts in a step in which all streams decode."""
    return max(1, config.max_batched_tokens - scene.streams)
