"""Measures a worker's speed before it is ready (`pigou.engine.startup_profiling`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np

from pigou.compiled import on_compiling
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan
from pigou.engine.startup_profiling import (
    CONTEXT_TOKENS,
    DECODE_STEPS,
    REPEATS,
    ProfiledLoad,
    max_stream_tokens,
    profiled_loads,
    warm_up,
)
from pigou.kv import checksum
from pigou.request import SECOND, Rehearsed, Request, SamplingParams, no_hashes
from pigou.runtime.step_output import StepOutput
from pigou.wire import json_limits
from pigou.worker.config import WorkerConfig
from pigou.worker.engine_thread.commands import Backend
from pigou.worker.startup.build import WorkerParts, build

_PROMPT = "rehearsed-prompt"
_STREAM = "rehearsed-stream"
_TOKENS = 40
_OUTPUT = 12
_ID = "warm"
_log = logging.getLogger("pigou.worker")
#: Environment variable: 1 prints each stage as a line of JSON on stdout, for the fleet.
STAGES = "PIGOU_STAGES"


def profile_at_startup(
    core: EngineCore, backend: Backend, budget_s: float, rest: Callable[[], None] | None = None
) -> tuple[Rehearsed, ...]:
    """Time loads on the real core, smallest first, within `budget_s` seconds.

    A load is skipped if too slow at the previous one's pace, or aborted after a step. They leave no
    state; returns the loads measured.
    """
    began = time.monotonic_ns()
    deadline, pace = began + budget_s * SECOND, 0.0
    profiles: list[Rehearsed] = []
    for load in profiled_loads(core.config):
        if began + pace * load.size >= deadline:
            break
        stage = _Stage(core, backend, load, deadline, rest)
        measured = stage.measure()
        stage.clear()
        if measured is None:
            break
        profiles.append(measured)
        now = time.monotonic_ns()
        pace, began = (now - began) / load.size, now
    return tuple(profiles)


@dataclass(eq=False, slots=True)
class _Stage:
    """One load on a core."""

    _core: EngineCore
    _backend: Backend
    _load: ProfiledLoad
    _deadline: float  # monotonic nanoseconds
    _rest: Callable[[], None] | None
    _ids: list[str] = field(default_factory=list)

    def measure(self) -> Rehearsed | None:
        """Return the load's best time; None if aborted."""
        if not self._gather():
            return None
        takes: list[Rehearsed] = []
        began = time.monotonic_ns()
        for _ in range(REPEATS):
            steps = self._take()
            if not steps:
                break
            ended = time.monotonic_ns()
            takes.append(Rehearsed(*self._load, steps, (ended - began) / SECOND))
            began = ended
        return min(takes, key=lambda take: take.seconds / take.steps, default=None)

    def clear(self) -> None:
        """Remove all requests from core and backend."""
        for name in self._ids:
            self._core.abort(name)
            self._backend.drop(name)

    def _take(self) -> int:
        """Run the measured part; return its steps, 0 if a prompt was aborted."""
        tokens, steps = self._load.tokens, 0
        if self._rest is not None:
            self._rest()
        if tokens:
            self._add(_PROMPT, tokens, 1)
        while (_PROMPT in self._core) if tokens else (steps < DECODE_STEPS):
            done = self._advance(self._core.config.max_repeat if tokens else DECODE_STEPS - steps)
            if done is None:
                return 0 if tokens else steps
            steps += done[1]
        return steps

    def _gather(self) -> bool:
        streams = self._load.streams
        max_tokens = max_stream_tokens(self._load, self._core.config) - CONTEXT_TOKENS
        for number in range(streams):
            self._add(f"{_STREAM}-{number}", CONTEXT_TOKENS, max_tokens)
        decoding = 0
        while decoding < streams:
            done = self._advance(1)
            if done is None:
                return False
            decoding = int(np.count_nonzero(done[0].samples))
        return True

    def _add(self, name: str, prompt: int, max_tokens: int) -> None:
        _submit(self._core, self._backend, name, prompt, max_tokens)
        self._ids.append(name)

    def _advance(self, max_steps: int) -> tuple[Plan, int] | None:
        """Execute a plan of at most `max_steps` steps; return it and the steps done."""
        now = time.monotonic_ns()
        if now >= self._deadline:
            return None
        left = max_steps

        def goes_on(_: StepOutput) -> bool:
            nonlocal left
            left -= 1
            return left > 0 and time.monotonic_ns() < self._deadline

        plan = self._core.schedule(now)
        if not plan:
            return None
        result = self._backend.execute(plan, goes_on)
        for finished in self._core.apply(plan, result).finished:
            self._backend.drop(finished.request)
        return plan, result.steps


def _submit(core: EngineCore, backend: Backend, name: str, prompt: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    backend.add(name, [0] * prompt, params, seed=b"", hashes=no_hashes())
    core.add(Request(name, prompt, max_tokens))


def warm_backend(core: EngineCore, backend: Backend) -> None:
    """Compute a short request on the real core, leaving nothing in its cache."""
    room = min(core.config.max_model_len, core.config.blocks * core.config.block_size)
    if room <= _OUTPUT + 1:
        return
    _submit(core, backend, _ID, min(_TOKENS, room - _OUTPUT), _OUTPUT)
    while core.running or core.waiting:
        plan = core.schedule(time.monotonic_ns())
        for finished in core.apply(plan, backend.execute(plan)).finished:
            backend.drop(finished.request)


def report_stage(stage: str) -> None:
    """Report the start of a stage."""
    _log.info("%s", stage)
    if os.environ.get(STAGES) == "1":
        print(msgspec.json.encode({"stage": stage}).decode(), flush=True)


@contextmanager
def compiling_reported(what: str) -> Iterator[None]:
    """Report the start of a stage, and each kernel compiled within it."""
    report_stage(what)
    compiled = 0

    def listener(_: str) -> None:
        nonlocal compiled
        compiled += 1
        report_stage(f"{what}, compiling kernel {compiled} (first start only)")

    with on_compiling(listener):
        yield


def build_warm(config: WorkerConfig) -> WorkerParts:
    """Build a worker's parts, and compile or load their kernels."""
    with compiling_reported("loading the model"):
        parts = build(config)
    with compiling_reported("warming up"):
        warm_up()
        json_limits.warm_up()
        warm_backend(parts.core, parts.backend)
        parts.grammars.warm_up()
        if not config.allow_special_tokens:
            parts.model.tokenizer.control.warm_up()
        if config.kv_transfer != "none":
            checksum.warm_up()
    return parts


def warm_all(config: WorkerConfig) -> None:
    """Compile all kernels that this configuration needs; raises as `build`."""
    if not config.sleeps:
        from pigou.runtime.resources import prepare_environment

        prepare_environment(config.threads)
    parts = build_warm(config)
    if parts.memory is not None:
        parts.memory.close()


def prepare(config: WorkerConfig) -> WorkerParts:
    """Build, warm up and measure a worker's parts.

    Call it on a thread that ends afterwards, freeing its OpenMP threads. The engine thread has its
    own; with more of them than cores, OpenMP disables spinning.
    """
    parts = build_warm(config)
    report_stage("measuring its speed")
    profile = partial(profile_at_startup, parts.core, parts.backend, config.rehearse, parts.rest)
    if parts.measure is None:
        return replace(parts, rehearsed=profile())
    rehearsed, report = parts.measure(profile)
    return replace(parts, rehearsed=rehearsed, memory_report=report)
