"""One profile, from the first question to the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from pigou import __version__
from pigou.sim.measured import Measured
from pigou.workload.client import open_session
from pigou.workload.profiling.config import ProfileConfig
from pigou.workload.profiling.fit import Error, errors, fit
from pigou.workload.profiling.measure import Measuring
from pigou.workload.profiling.seen import Seen
from pigou.workload.profiling.target import find_target


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        model: that was asked for.
        measured: the timing.
        errors: how well it fits.
        seen: what it was fitted to.
    """

    model: str
    measured: Measured
    errors: list[Error]
    seen: Seen


async def profile(
    config: ProfileConfig, watch: Callable[[int, int, str], None] | None = None
) -> Profile:
    """Measure a live worker.

    Args:
        config: what to measure.
        watch: told of each measurement: how many are done, of how many, and what is measured.

    Raises:
        EndpointError: the worker is not there, is busy, or cannot be measured.
    """
    async with open_session(config.api_key) as session:
        target = await find_target(config, session)
        seen = await Measuring(target, config, watch or _nothing).run()
    found = fit(seen)
    misses = errors(found, seen)
    about: dict[str, Any] = {
        "pigou": __version__,
        "model": target.client.model,
        "limits": msgspec.to_builtins(target.limits),
        "repeats": config.repeats,
        "errors": msgspec.to_builtins(misses),
        "seen": msgspec.to_builtins(seen),
    }
    limits = target.limits
    size = limits.block if limits.blocks else 0
    found = msgspec.structs.replace(found, about=about, blocks=limits.blocks, block_size=size)
    return Profile(target.client.model, found, misses, seen)


def _nothing(done: int, total: int, what: str) -> None:
    """Watch nothing."""
