"""What `--timing` says: how long steps take, and links, where no model computes.

The timing models are the simulator's own, so that a worker that sleeps and a worker that is
simulated take the same time to the nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pigou.config import ConfigError
from pigou.sim.network import LinkConfig
from pigou.sim.timing import Timing
from pigou.sim.timings import build_timing, is_measured, kv_bytes
from pigou.worker.link import Link


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of a worker.

    Attributes:
        timing: of its steps.
        link: over which blocks come to it; None for one that takes no time of its own.
    """

    timing: Timing
    link: Link | None = None


class _LinkKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys of a link; how it is shared is none of them: loads come one after another, and a sender
    is not shared.
    """

    gbps: float = 400.0
    latency_us: float = 200.0


def timed(spec: str, model: str, gpu: str, tp: int, link: str, block_size: int) -> Timed:
    """Make the times of a worker.

    Args:
        spec: as for `pigou simulate --timing`.
        model: name of the model, or folder of its `config.json`.
        gpu: name of the GPU; "" where the timing needs none.
        tp: GPUs that share the model.
        link: `gbps=..,latency_us=..`; "" for none.
        block_size: tokens in a block.

    Raises:
        ConfigError: one of them is not understood, or cannot be honoured by a worker alone.
    """
    built = build_timing(spec, model, gpu, tp)
    if built.overhead and not is_measured(spec):  # a worker that was measured has its own way in
        raise ConfigError(
            f"timing is {spec!r}, which has an overhead of {built.overhead} s between the client "
            "and the worker; a worker cannot add that: give overhead=0"
        )
    if not link:
        return Timed(built.timing)
    config = read_link(link)
    return Timed(built.timing, Link(config, kv_bytes(model) * block_size if config.gbps else 0))


def read_link(text: str) -> LinkConfig:
    """Read `gbps=..,latency_us=..`.

    Raises:
        ConfigError: a key is not known, or a value refused.
    """
    values = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(
                f"timing_link: {item!r} is not understood; write gbps=..,latency_us=.."
            )
        values[key] = value
    try:
        keys = msgspec.convert(values, _LinkKeys, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"timing_link: {error}") from error
    return LinkConfig(gbps=keys.gbps, latency_us=keys.latency_us, sharing="fifo", ends="receiver")
