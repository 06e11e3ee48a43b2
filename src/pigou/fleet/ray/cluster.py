"""A Ray cluster as a fleet uses it: its nodes, bundles on chosen nodes, and actors in them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pigou.config import ConfigError
from pigou.control.placement.topology import Node
from pigou.fleet.config import FleetError
from pigou.fleet.ray.worker_actor import WorkerActor
from pigou.imports import remedy

_log = logging.getLogger("pigou.fleet")

#: Seconds that a placement group may take: its nodes were free a moment ago.
_RESERVE_S = 20.0
#: Labels that Ray itself gives to nodes.
_NODE_ID, _ZONE, _KIND = "ray.io/node-id", "ray.io/availability-zone", "ray.io/accelerator-type"


@dataclass(slots=True, eq=False)
class Bundle:
    """One worker's part of a placement group, and its actor."""

    host: str
    group: Any = field(repr=False)  # handle of the placement group
    index: int  # within the group
    actor: Any = field(default=None, repr=False)  # handle; None before it was started


class ActorGone(FleetError):
    """An actor ended, or its node was lost."""


class RayCluster:
    """The cluster that this process is, or gets, connected to.

    Ray reserves what `reserve` asks for at once or not at all, and on the nodes that were chosen
    here: its own scheduler does not know what a pair of workers sends to each other.
    """

    def __init__(self, address: str, resources: Mapping[str, float]) -> None:
        """Prepare to connect.

        Args:
            address: of the cluster's head, or `auto`.

        Raises:
            ConfigError: Ray is not installed.
        """
        if find_spec("ray") is None:
            raise ConfigError(f"--on ray needs ray; {remedy('ray')}")
        self._address = address
        self._resources = dict(resources)
        self._node_ids: dict[str, str] = {}
        self._groups: list[Any] = []
        self._own = False

    @property
    def _counted(self) -> str:
        """The resource that nodes are filled by."""
        return "GPU" if self._resources.get("GPU") else "CPU"

    async def connect(self) -> None:
        """Connect to the cluster, where this process is not connected.

        Raises:
            FleetError: there is none at that address.
        """
        import ray

        if ray.is_initialized():
            return
        try:
            await asyncio.to_thread(
                ray.init, address=self._address, log_to_driver=False, logging_level="warning"
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise FleetError(
                f"ray: no cluster at {self._address!r}: {error}; start one with `ray start --head`"
            ) from error
        self._own = True

    async def nodes(self) -> list[Node]:
        """Return the nodes that are alive; `gpus` counts what the workers are placed by."""
        import ray

        rows = [row for row in await asyncio.to_thread(ray.nodes) if row["Alive"]]
        names = Counter(str(row["NodeManagerHostname"]) for row in rows)
        self._node_ids, nodes = {}, []
        for row in rows:
            labels, name = row["Labels"], str(row["NodeManagerHostname"])
            own = name if names[name] == 1 else f"{name}-{row['NodeID'][:8]}"
            host = str(labels.get("host") or own)
            self._node_ids[host] = row["NodeID"]
            nodes.append(
                Node(
                    host=host,
                    rack=labels.get("rack", ""),
                    zone=labels.get("zone") or labels.get(_ZONE, ""),
                    gpus=int(row["Resources"].get(self._counted, 0)),
                    kind=labels.get(_KIND, ""),
                    labels=dict(labels),
                )
            )
        return nodes

    async def reserve(self, hosts: Sequence[str]) -> list[Bundle]:
        """Reserve what a worker takes on each of these hosts, which may repeat: all or nothing.

        Raises:
            FleetError: Ray does not have it.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        selectors = [{_NODE_ID: self._node_ids[host]} for host in hosts]
        group = await asyncio.to_thread(
            placement_group, [self._resources] * len(hosts), strategy="PACK",
            bundle_label_selector=selectors,
        )  # fmt: skip
        if not await asyncio.to_thread(group.wait, _RESERVE_S):
            await asyncio.to_thread(remove_placement_group, group)
            raise FleetError(
                f"ray: {len(hosts)} bundles of {self._resources} on {', '.join(sorted(set(hosts)))}"
                f" were not reserved in {_RESERVE_S:g} s; others use these nodes"
            )
        self._groups.append(group)
        return [Bundle(host, group, index) for index, host in enumerate(hosts)]

    async def call(self, bundle: Bundle, method: str, *arguments: Any) -> Any:
        """Call a method of a bundle's actor, which is started where there is none.

        Raises:
            ActorGone: the actor is gone, or its node. FleetError: it cannot be reached now, or
                the method raised an error.
        """
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

        if bundle.actor is None:
            bundle.actor = self._start_actor(bundle)
        try:
            return await getattr(bundle.actor, method).remote(*arguments)
        except RayTaskError as error:
            raise FleetError(str(error.cause or error)) from None
        except ActorUnavailableError:
            raise FleetError(f"its node {bundle.host} does not answer") from None
        except RayError as error:
            raise ActorGone(f"its node {bundle.host} is gone ({type(error).__name__})") from None

    def _start_actor(self, bundle: Bundle) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            bundle.group, placement_group_bundle_index=bundle.index
        )
        return ray.remote(WorkerActor).options(
            num_cpus=self._resources.get("CPU", 0), num_gpus=self._resources.get("GPU", 0),
            scheduling_strategy=strategy, max_restarts=0,
        ).remote()  # fmt: skip

    async def is_alive(self, host: str) -> bool:
        """Whether a node is alive, as far as Ray knows."""
        return any(node.host == host for node in await self.nodes())

    def end_actor(self, bundle: Bundle) -> None:
        """End the actor of a bundle, and its process with it."""
        import ray

        if bundle.actor is not None:
            ray.kill(bundle.actor)
            bundle.actor = None

    def give_back(self, bundle: Bundle) -> None:
        """Give back a bundle that is a group of its own; those of the start stay together."""
        from ray.util.placement_group import remove_placement_group

        if len(bundle.group.bundle_specs) == 1 and bundle.group in self._groups:
            self._groups.remove(bundle.group)
            remove_placement_group(bundle.group)

    async def close(self) -> None:
        """Give back all that was reserved; actors end with their group."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            for group in self._groups:
                await asyncio.to_thread(remove_placement_group, group)
            if self._own:
                await asyncio.to_thread(ray.shutdown)
        self._groups.clear()
