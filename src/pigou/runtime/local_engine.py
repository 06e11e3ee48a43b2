"""LocalEngine: an engine core and an executor in one process, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan, Result
from pigou.kv.hashing import chain
from pigou.request import NEVER, FinishReason, Request, SamplingParams
from pigou.runtime.executor import Proposer
from pigou.runtime.lora import Adapter, LoRABank
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.step_output import RankedLogprobs, StepOutput

Prompt = Sequence[int] | NDArray[np.integer]

#: Key of the block hashes: one engine, one user.
_SEED = b"local"


@dataclass(slots=True)
class Output:
    """Output of one prompt."""

    request: str
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None  # why it ended; None while it runs
    logprobs: list[RankedLogprobs] = field(default_factory=list)  # by output token, if requested
    # by prompt token, if requested.
    prompt_logprobs: list[RankedLogprobs | None] = field(default_factory=list)
    cached: int = 0  # prompt tokens found in the cache
    preemptions: int = 0


class LocalEngine:
    """Runs prompts to completion with continuous batching."""

    def __init__(
        self, model: LoadedModel, config: EngineConfig, lora: LoRABank | None = None,
        adapters: Mapping[str, Adapter] = MappingProxyType({}), proposer: Proposer | None = None,
        *, enforce_eager: bool = False,
    ) -> None:  # fmt: skip
        """Build core and executor; raises ModelError or ConfigError on a bad configuration."""
        self._adapters = adapters
        self.core = EngineCore(config)
        self.cache = model.cache(config.blocks, config.block_size, config.host_blocks)
        self.executor = model.executor(
            self.cache, self.core.tables, config.max_model_len, config.eviction, lora,
            enforce_eager=enforce_eager,
        )  # fmt: skip
        self.executor.proposer = proposer  # drafts `EngineConfig.num_speculative_tokens` at most
        self.on_plan: Callable[[Plan], None] = lambda _plan: None
        self._config = config
        self._outputs: dict[str, Output] = {}
        self._ids: dict[int, str] = {}  # requests by row
        self._number = 0

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Output]:
        """Run prompts together; return their outputs in order."""
        params_of = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        outputs = [self.add(prompt, p) for prompt, p in zip(prompts, params_of, strict=True)]
        while any(output.reason is None for output in outputs):
            self.step()
        return outputs

    def add(
        self, prompt: Prompt, params: SamplingParams, resume: int = 0, tenant: str = "",
        adapter: str = "",
    ) -> Output:  # fmt: skip
        """Queue a prompt; the returned object fills as `step` is called."""
        request = f"local-{self._number}"
        self._number += 1
        # Prompt logprobs require computing the prompt, so it may not hit the cache.
        shared = params.prompt_logprobs is None
        key = _SEED + (bytes.fromhex(self._adapters[adapter].digest) if adapter else b"")
        hashes = chain(prompt if shared else [], self._config.block_size, key)
        seed = key if shared else b""
        self.executor.add(request, prompt, params, seed, resume, adapter=adapter)
        output = self._outputs[request] = Output(request)
        arrival = time.monotonic_ns()
        self.core.add(Request(
            id=request, prompt=len(prompt), max_tokens=params.max_tokens, hashes=hashes,
            arrival=arrival, tenant=tenant, model=adapter,
        ))  # fmt: skip
        return output

    def step(self, horizon: int = NEVER) -> Result:
        """Execute one plan; no step begins after `horizon` (`monotonic_ns`)."""
        plan = self.core.schedule(time.monotonic_ns(), horizon, self.executor.drafts())
        self.on_plan(plan)
        self._ids |= {started.row: started.request for started in plan.started}
        owners = [self._outputs[self._ids[row]] for row in plan.rows.tolist()]

        def note(step: StepOutput) -> bool:
            for entry, (output, token) in enumerate(zip(owners, step.tokens.tolist(), strict=True)):
                if token >= 0:
                    output.tokens.append(token)
                if entry in step.logprobs:
                    output.logprobs.append(step.logprobs[entry])
                if entry in step.prompt_logprobs:
                    output.prompt_logprobs = step.prompt_logprobs[entry]
            return True

        result = self.executor.execute(plan, note)
        effects = self.core.apply(plan, result)
        for load in plan.loads:
            raise RuntimeError(f"{load.request}: a local engine loads nothing from outside")
        for adapter, slot in plan.adapters:
            assert self.executor.lora is not None
            self.executor.lora.load(adapter, self._adapters[adapter], slot)
            self.core.adapter_loaded(adapter)
        for finished in effects.finished:
            output = self._outputs.pop(finished.request)
            output.reason = finished.reason
            output.cached = finished.cached
            output.preemptions = finished.preemptions
            self.executor.drop(finished.request)
        return result
