"""What must come out equal: on two devices, and decoded elsewhere than prefilled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Finished, Load
from pigou.kv.hashing import chain
from pigou.request import Ints, Request, SamplingParams
from pigou.runtime.local_engine import Output
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.step_output import StepOutput
from pigou.worker.kv_transfer.block_store import MappedMemory, SharedMemory
from pigou_lab.gpu_check.speed import make_engine

_SEED = b"gpu-check"
_REQUEST = "one"
_BLOCK = 16


class Side:
    """An engine stepped by hand."""

    def __init__(self, model: LoadedModel, max_tokens: int) -> None:
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
        """Add the request; `remote` of its tokens are cached elsewhere."""
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        hashes = chain(prompt, _BLOCK, _SEED)
        self._executor.add(_REQUEST, prompt, params, _SEED, hashes=hashes)
        self.core.add(
            Request(_REQUEST, len(prompt), output, hashes, remote=remote, hold=keep_blocks)
        )

    def step(self) -> tuple[list[Finished], list[Load]]:
        """Run a plan; return finished requests, and loads."""
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
    """Return the greedy tokens after remote prefill, and the blocks received."""
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


@dataclass(frozen=True, slots=True)
class DeviceComparison:
    """Comparison of greedy outputs of two devices, up to the first difference."""

    tokens: int
    divergences: int  # outputs that differ where the best two tokens were no near tie
    ties: int  # outputs that differ where they were
    difference: float  # root mean square of the log-probabilities' differences
    largest: float


def compare(
    first: LoadedModel, second: LoadedModel, *, gap: float, prompts: int = 8, output: int = 32
) -> DeviceComparison:
    """Decode the same prompts greedily with both; tokens within `gap` nats count as equal."""
    outputs = [_decode(model, prompts, output) for model in (first, second)]
    differences: list[float] = []
    tokens = divergences = ties = 0
    for one, other in zip(*outputs, strict=True):
        for left, right in zip(one.logprobs, other.logprobs, strict=False):
            if left.token != right.token:
                near = float(left.logprobs[0] - left.logprobs[1]) < gap
                ties, divergences = ties + near, divergences + (not near)
                break
            tokens += 1
            differences.append(abs(left.logprob - right.logprob))
    array = np.array(differences or [float("inf")])
    return DeviceComparison(
        tokens, divergences, ties, float(np.sqrt((array**2).mean())), float(array.max())
    )


def _decode(model: LoadedModel, prompts: int, output: int) -> list[Output]:
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, model.config.vocab, size=rng.integers(1, 101)) for _ in range(prompts)]
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, logprobs=2)
    return make_engine(model, prompts, 101 + output).generate(texts, params)
