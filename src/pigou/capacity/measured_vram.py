"""The memory map that a live worker measured, read from its `/server_info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pigou.capacity.vram import VramMap
from pigou.config import ConfigError


def measured_map(about: Mapping[str, Any]) -> VramMap:
    """Return the six terms of a worker's device; `usable` is their sum.

    CUDA graphs count as runtime, as in the computed map.
    """
    memory = about.get("memory")
    if not isinstance(memory, Mapping):
        raise ConfigError(
            "the worker tells of no memory: it is no worker of Pigou's that computes (--executor "
            "torch), or an older one"
        )
    names = ("weights", "cache", "activations", "adapters", "runtime", "graphs", "scratch")
    values = {name: memory.get(name) for name in names} | {
        name: about.get(name) for name in ("blocks", "block_size")
    }
    sizes: dict[str, int] = {}
    for name, value in values.items():
        if not isinstance(value, int) or value < 0:
            raise ConfigError(f"the worker says {name} is {value!r}; it must be a count")
        sizes[name] = value
    return VramMap(
        usable=sum(sizes[name] for name in names),
        weights=sizes["weights"], cache=sizes["cache"], activations=sizes["activations"],
        adapters=sizes["adapters"], runtime=sizes["runtime"] + sizes["graphs"],
        scratch=sizes["scratch"], blocks=sizes["blocks"],
        tokens=sizes["blocks"] * sizes["block_size"],
    )  # fmt: skip
