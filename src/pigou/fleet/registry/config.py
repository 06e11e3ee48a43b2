"""How a worker registers itself: options of `pigou worker`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from pigou.config import ConfigError
from pigou.config_option import option
from pigou.fleet.registry.entry import Topology

#: Heading of options.
_GROUP = "Registry"
#: Labels that are fields of a topology.
_FIELDS = ("host", "rack", "zone")


class RegistrationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a worker registers itself, and as what; without `registry` it does not."""

    registry: Annotated[
        str,
        option(
            "Registry that gateways find this worker in: file:///FOLDER, etcd://HOST:PORT/PREFIX, "
            "nats://HOST:PORT[/BUCKET] or k8s://NAMESPACE?selector=LABELS.",
            _GROUP,
        ),
    ] = ""
    worker_id: Annotated[
        str, option("Name in the fleet; by default the host's, and one of this process.", _GROUP)
    ] = ""
    label: Annotated[
        tuple[str, ...],
        option("Where it runs, as NAME=VALUE: host, rack, zone, gpus, others. Repeatable.", _GROUP),
    ] = ()
    advertise: Annotated[
        str, option("Host that others reach it at; by default --host, or this host's.", _GROUP)
    ] = ""
    lease: Annotated[
        float, option("Seconds after which it counts as lost without a renewal.", _GROUP)
    ] = 15.0

    def __post_init__(self) -> None:
        for name in ("worker_id", "label", "advertise"):
            if getattr(self, name) and not self.registry:
                raise ConfigError(f"{name} is given, and registry is not; give it")
        if self.lease != 15.0 and not self.registry:
            raise ConfigError(f"lease is {self.lease}, and registry is not given; give it")
        if not 1 <= self.lease <= 3600:
            raise ConfigError(f"lease is {self.lease}; it must be 1 to 3600 seconds")
        self.topology("")

    def topology(
        self, host: str, gpus: int = 0, location: Mapping[str, str] | None = None
    ) -> Topology:
        """Return where the worker runs, by its labels, else by the arguments.

        Args:
            location: host, rack and zone, as far as `--location` says.

        Raises:
            ConfigError: a label is not understood.
        """
        labels: dict[str, str] = {}
        for text in self.label:
            name, equals, value = text.partition("=")
            if not name or not equals or not value or max(len(name), len(value)) > 512:
                raise ConfigError(f"label is {text[:80]!r}; write NAME=VALUE, like rack=r1")
            labels[name] = value
        number = labels.pop("gpus", str(gpus))
        if not number.isdecimal() or len(number) > 6:
            raise ConfigError(f"label: gpus is {number[:20]!r}; it must be a number")
        fields = {"host": host}
        fields |= {name: value for name, value in (location or {}).items() if value}
        fields |= {name: labels.pop(name) for name in _FIELDS if name in labels}
        return Topology(**fields, gpus=int(number), labels=labels)
