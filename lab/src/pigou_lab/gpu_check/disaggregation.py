"""Prefill in one engine, decode in another: the KV blocks go through shared memory."""

from __future__ import annotations

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Finished, Load
from pigou.kv.hashing import chain
from pigou.request import Ints, Request
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.step_output import StepOutput
from pigou.sampling import SamplingParams
from pigou.worker.kv_transfer.block_store import MappedMemory, SharedMemory

_SEED = b"gpu-check"
_REQUEST = "one"
_BLOCK = 16


class Side:
    """An engine that is stepped by hand.

    Attributes:
        cache: its KV blocks.
    """

    def __init__(self, model: LoadedModel, max_tokens: int) -> None:
        """Make an engine for one sequence of so many tokens."""
        blocks = -(-max_tokens // _BLOCK) + 2
        config = EngineConfig(blocks=blocks, block_size=_BLOCK, max_model_len=max_tokens)
        self.core = EngineCore(config)
        self.cache = model.cache(blocks, _BLOCK)
        self.tokens: list[int] = []
        self._executor = model.executor(self.cache, self.core.tables, max_tokens)
        self._now = 0

    def add(
        self, prompt: list[int], output: int, *, remote: int = 0, keep_blocks: bool = False
    ) -> None:
        """Add the request; `remote` tokens of its cache come from elsewhere."""
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        hashes = chain(prompt, _BLOCK, _SEED)
        self._executor.add(_REQUEST, prompt, params, _SEED, hashes=hashes)
        self.core.add(
            Request(_REQUEST, len(prompt), output, hashes, remote=remote, hold=keep_blocks)
        )

    def step(self) -> tuple[list[Finished], list[Load]]:
        """Do a plan; return who finished, and what is to be loaded."""
        self._now += 1
        plan = self.core.schedule(self._now)

        def note(step: StepOutput) -> bool:
            self.tokens += [token for token in step.tokens.tolist() if token >= 0]
            return True

        effects = self.core.apply(plan, self._executor.execute(plan, note))
        return effects.finished, plan.loads


def decode_alone(model: LoadedModel, prompt: list[int], output: int) -> list[int]:
    """Return the greedy tokens of one engine."""
    side = Side(model, len(prompt) + output)
    side.add(prompt, output)
    while not side.step()[0]:
        pass
    return side.tokens


def decode_elsewhere(model: LoadedModel, prompt: list[int], output: int) -> tuple[list[int], int]:
    """Return the greedy tokens of a decode engine that did not compute the prompt.

    Returns:
        The tokens, and how many blocks went from the prefill engine to it.
    """
    max_tokens = len(prompt) + output
    prefill, decode = Side(model, max_tokens), Side(model, max_tokens)
    prefill.add(prompt, 1, keep_blocks=True)
    while not (finished := prefill.step()[0]):
        pass
    decode.add(prompt, output, remote=len(prompt))
    moved, ended = 0, False
    while not ended:
        done, loads = decode.step()
        ended = bool(done)
        for load in loads:
            ids = finished[0].held[load.first : load.first + len(load.blocks)]
            moved += _move(prefill, decode, np.asarray(ids), load)
            prefill.core.release(_REQUEST)
    return decode.tokens, moved


def _move(source: Side, target: Side, ids: Ints, load: Load) -> int:
    """Move blocks by a file in memory, as between two workers of a machine."""
    size = source.cache.layout.block_bytes
    memory = SharedMemory(max(1, len(ids) * size))
    try:
        memory.buffer[: len(ids) * size] = source.cache.read(ids).reshape(-1)
        rows = MappedMemory(memory.name, memory.key).blocks(0, size)
        target.cache.write(load.blocks, rows[: len(ids)])
    finally:
        memory.close()
    target.core.loaded(load.request, len(ids) * _BLOCK)
    return len(ids)
