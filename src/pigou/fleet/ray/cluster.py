"""A Ray cluster as a fleet uses it: its nodes, bundles on chosen nodes, and processes in them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pigou.config import ConfigError
from pigou.fleet.config import FleetError
from pigou.fleet.hang_detection import EngineProgress
from pigou.fleet.worker_process import ProcessState, WorkerProcess
from pigou.placement.topology import Node
from pigou.registry import remedy
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import url_host

#: Seconds between liveness checks of a starting node.
_LOOK_S = 1.0
#: Seconds beyond a drain for an actor to report its process's exit.
_ANSWER_S = 5.0
_log = logging.getLogger("pigou.fleet")
#: Seconds that a placement group may take: its nodes were free a moment ago.
_RESERVE_S = 20.0
#: Labels that Ray itself gives to nodes.
_NODE_ID, _ZONE, _KIND = "ray.io/node-id", "ray.io/availability-zone", "ray.io/accelerator-type"


class WorkerActor:
    """Runs `pigou worker` on its node, one process at a time; tokens never pass through it."""

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None

    async def start(
        self, name: str, arguments: Sequence[str], secret: bytes, timeout_s: float
    ) -> dict[str, Any]:
        """Start the process with `arguments` of `pigou worker`; return its ready line."""
        import ray

        host = ray.util.get_node_ip_address()
        endpoint = f"tcp://{url_host(host)}:*"
        endpoints = ["--kv-events-endpoint", endpoint, "--kv-replay-endpoint", endpoint]
        await self.stop(0.0)
        known = FleetSecret(secret.decode("utf-8", "surrogateescape")) if secret else None
        self._process = await WorkerProcess.start(name, [*endpoints, *arguments], known, host)
        try:
            return await self._process.ready(timeout_s)
        except BaseException:
            await self.stop(0.0)
            raise

    async def exited(self) -> tuple[str, int]:
        """Return how the process ended, and its status, once it has."""
        process = self._process
        if process is None:
            return "was stopped", 0
        return await process.exited(), process.code or 0

    async def stop(self, drain_s: float) -> None:
        """Terminate the process; kill it after the limit."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop(drain_s)

    async def pids(self) -> tuple[int, int]:
        """Return the process ids of the actor and of the worker; 0 for none."""
        return os.getpid(), 0 if self._process is None else self._process.pid


class RayProcess:
    """`pigou worker` in an actor; its health, load and progress come by HTTP."""

    pid: int = 0  # 0, as it is no process of this machine
    heartbeat: EngineProgress | None = None  # None, for the same reason
    process_state: ProcessState | None = None

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        secret: FleetSecret | None,
        cluster: RayCluster,
        bundle: Bundle,
    ) -> None:
        self.code: int | None = None  # while it runs, or where its node is gone
        self._name, self._arguments = name, list(arguments)
        self._secret = b"" if secret is None else secret.text()
        self._cluster, self._bundle = cluster, bundle

    async def ready(
        self, timeout_s: float, on_stage: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Start it; return the line that says where it listens. Raises FleetError."""
        if on_stage is not None:
            on_stage(f"starting on {self._bundle.host}")
        arguments = self._name, self._arguments, self._secret, timeout_s
        answer = asyncio.create_task(self._cluster.call(self._bundle, "start", *arguments))
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_S):
                while not (await asyncio.wait((answer,), timeout=_LOOK_S))[0]:
                    if not await self._cluster.is_alive(self._bundle.host):
                        raise FleetError(f"{self._name}: its node {self._bundle.host} is gone")
                line: dict[str, Any] = await answer
                return line
        except TimeoutError:
            raise FleetError(f"{self._name} was not ready within {timeout_s:g} s") from None
        except ActorGone:
            self._cluster.end_actor(self._bundle)
            raise
        finally:
            answer.cancel()

    async def exited(self) -> str:
        """Return how it ended, once it has."""
        while True:
            try:
                how, self.code = await self._cluster.call(self._bundle, "exited")
            except ActorGone as gone:
                self._cluster.end_actor(self._bundle)
                return str(gone)
            except FleetError:  # the worker itself is watched by HTTP
                await asyncio.sleep(_LOOK_S)
            else:
                return str(how)

    async def stop(self, drain_s: float) -> None:
        """End it, by force after `drain_s` seconds; one whose node is gone has ended."""
        if self._bundle.actor is None:
            return
        with suppress(FleetError, TimeoutError):
            async with asyncio.timeout(drain_s + _ANSWER_S):
                await self._cluster.call(self._bundle, "stop", drain_s)
                return
        self._cluster.end_actor(self._bundle)


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
    """The Ray cluster of this process; `reserve` gets all bundles at once, or none."""

    def __init__(self, address: str, resources: Mapping[str, float]) -> None:
        """`address` is the head's, or `auto`. Raises ConfigError: Ray is not installed."""
        if find_spec("ray") is None:
            raise ConfigError(f"--on ray needs ray; {remedy('ray')}")
        self._address = address
        self._resources = dict(resources)
        self._node_ids: dict[str, str] = {}
        self._groups: list[Any] = []
        self._own = False

    @property
    def _counted(self) -> str:
        return "GPU" if self._resources.get("GPU") else "CPU"

    async def connect(self) -> None:
        """Connect to the cluster, where this process is not connected. Raises FleetError."""
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
        """Return live nodes; `gpus` counts the placement resource."""
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
        """Reserve a worker's bundles on hosts; raises FleetError."""
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
        """Call a method of a bundle's actor, started if missing; raises ActorGone or FleetError."""
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
        """Release a bundle of its own group; the start's stay together."""
        from ray.util.placement_group import remove_placement_group

        if len(bundle.group.bundle_specs) == 1 and bundle.group in self._groups:
            self._groups.remove(bundle.group)
            remove_placement_group(bundle.group)

    async def close(self) -> None:
        """Release all reservations, which ends their actors."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            for group in self._groups:
                await asyncio.to_thread(remove_placement_group, group)
            if self._own:
                await asyncio.to_thread(ray.shutdown)
        self._groups.clear()
