"""The Ray cluster that the workers of a fleet run on."""

from __future__ import annotations

import msgspec

from pigou.config import ConfigError
from pigou.control.placement.gang import Pack
from pigou.control.placement.topology import TopologyLevel


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster that workers run on."""

    address: str = "auto"  # of its head, or `auto`
    # how near to each other the workers must be; None for the cheapest nodes.
    pack: Pack | None = None
    cpus: int = 1
    gpus: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """What a worker takes, as Ray names it."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    @property
    def units(self) -> int:
        """What a worker takes of the resource that nodes are filled by."""
        return self.gpus or self.cpus


def ray_config(address: str, pack: str, device: str, threads: int) -> RayConfig:
    """Return the cluster as the options of `pigou serve` say it.

    Args:
        address: of its head, or `auto`.
        pack: a level, or `required:` and a level; empty for the cheapest nodes.
        device: cpu or cuda.
        threads: of each worker; 0 for one.

    Raises:
        ConfigError: a value is not understood.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"device is {device!r}; with --on ray give cpu or cuda: Ray chooses which"
        )
    must, _, level = pack.rpartition(":")
    if must not in ("", "required") or (pack and level not in list(TopologyLevel)):
        raise ConfigError(
            f"pack is {pack!r}; give host, rack or zone, or for example required:rack"
        )
    packed = Pack(level=TopologyLevel(level), required=bool(must)) if pack else None
    return RayConfig(address=address, pack=packed, cpus=max(1, threads), gpus=int(device == "cuda"))
