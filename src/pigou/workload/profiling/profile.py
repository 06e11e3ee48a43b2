"""One profile, from the first question to the file."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from pigou import __version__
from pigou.sim.timing_measured import WorkerProfile
from pigou.workload.bench_config import ProfileConfig
from pigou.workload.endpoint import EndpointError, open_session, until_stopped
from pigou.workload.profiling.fit import FitError, Measurements, errors, fit
from pigou.workload.profiling.measure import Measuring, Watch, find_target


@dataclass(frozen=True)
class ProfileReport:
    """Measurements of a profile."""

    model: str
    measured: WorkerProfile
    errors: list[FitError]
    seen: Measurements
    notes: tuple[str, ...] = ()


async def profile(
    config: ProfileConfig, watch: Watch = lambda *_: None, stop: asyncio.Event | None = None
) -> ProfileReport:
    """Measure a live worker until the end or `stop`, in whole rounds; raises EndpointError."""
    async with open_session(config.api_key) as session:
        target = await find_target(config, session)
        measuring = Measuring(target, config, watch)
        seen = await _measured(measuring, stop)
    timing = fit(seen)
    misses = errors(timing, seen)
    about: dict[str, Any] = {
        "pigou": __version__,
        "model": target.client.model,
        "limits": msgspec.to_builtins(target.limits),
        "repeats": measuring.pace.rounds,
        "notes": measuring.notes,
        "errors": msgspec.to_builtins(misses),
        "seen": msgspec.to_builtins(seen),
    }
    limits = target.limits
    size = limits.block if limits.blocks else 0
    timing = msgspec.structs.replace(timing, about=about, blocks=limits.blocks, block_size=size)
    return ProfileReport(target.client.model, timing, misses, seen, tuple(measuring.notes))


async def _measured(measuring: Measuring, stop: asyncio.Event | None) -> Measurements:
    """Run to the end, or until `stop` is set or a request fails after a whole round."""
    try:
        whole = await until_stopped(stop or asyncio.Event(), measuring.run())
        if whole is not None:
            return whole
        reason = EndpointError("broken off before the first round was whole: nothing to write")
    except EndpointError as error:
        reason = error
    seen = measuring.so_far()
    if seen is None:
        raise reason
    if stop is None or not stop.is_set():
        measuring.notes.append(str(reason))
    return seen
