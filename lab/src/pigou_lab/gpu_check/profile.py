"""Which kernels a plan runs, and how often the host waits for the device."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from pigou.engine.plan import Result
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import LoadedModel
from pigou_lab.gpu_check.speed import make_engine


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """Kernels of a plan."""

    steps: int
    # name -> (microseconds, launches), those that take longest first.
    kernels: dict[str, tuple[float, int]]

    @property
    def launches_per_step(self) -> float:
        """Kernel launches per step."""
        return sum(count for _, count in self.kernels.values()) / max(self.steps, 1)


def profile_plans(model: LoadedModel, streams: int) -> tuple[KernelProfile, KernelProfile]:
    """Profile a prefill plan, and a decode plan of `streams`."""
    engine = filled_engine(model, streams)
    prompts = _profile(model.device, engine.step)
    advance_to_decoding(engine)
    return prompts, _profile(model.device, engine.step)


def waits_per_step(model: LoadedModel, streams: int) -> float:
    """Return how often a decode step made the host wait, as CUDA's debug mode counts it."""
    engine = filled_engine(model, streams)
    advance_to_decoding(engine)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wait_count = sum("synchroniz" in str(warning.message) for warning in caught)
    return wait_count / max(result.steps, 1)


def filled_engine(model: LoadedModel, streams: int) -> LocalEngine:
    """Make an engine with queued prompts."""
    engine = make_engine(model, streams, 256)
    rng = np.random.default_rng(1)
    params = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    for _ in range(streams):
        engine.add(rng.integers(3, model.config.vocab, size=64), params)
    return engine


def advance_to_decoding(engine: LocalEngine) -> None:
    """Compute plans until one has had nothing but decode steps."""
    decoding: list[bool] = []
    engine.on_plan = lambda plan: decoding.append(bool(len(plan.rows) and (plan.counts == 1).all()))
    while not (decoding and decoding[-1]):
        engine.step()


def _profile(device: torch.device, call: Callable[[], Result]) -> KernelProfile:
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with profile(activities=activities) as prof:
        result = call()
        if on_cuda:
            torch.cuda.synchronize(device)
    wanted = "CUDA" if on_cuda else "CPU"
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in prof.events() or []:
        if event.device_type.name == wanted:
            times[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    order = sorted(times, key=lambda name: -times[name])
    return KernelProfile(result.steps, {name: (times[name], counts[name]) for name in order})
