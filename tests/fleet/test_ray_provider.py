"""The provider of workers on Ray, over a cluster that is made up: where they go, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.plane import ControlPlane
from pigou.fleet.config import FleetError, RayConfig, WatchConfig
from pigou.fleet.hang_detection import HangArbiter
from pigou.fleet.member import MemberSetup
from pigou.fleet.ray import cluster as cluster_module
from pigou.fleet.ray import ray_provider
from pigou.fleet.ray.cluster import ActorGone, Bundle, RayCluster, RayProcess
from pigou.fleet.ray.ray_provider import RayProvider
from pigou.fleet.sources.local import WorkerTemplate, start_workers
from pigou.gateway.plane_driver import PlaneDriver
from pigou.placement.topology import Node


class MadeUpCluster:
    """Nodes of two slots each; it notes what is reserved, and answers calls from a script."""

    def __init__(self, *_: Any) -> None:
        self.hosts = ["n0", "n1", "n2"]
        self.reserved: list[list[str]] = []
        self.given_back: list[str] = []
        self.ended: list[str] = []
        self.answers: dict[str, list[Any]] = {}

    async def connect(self) -> None: ...

    async def nodes(self) -> list[Node]:
        return [Node(host=host, rack="r", zone="z", gpus=2) for host in self.hosts]

    async def reserve(self, hosts: Sequence[str]) -> list[Bundle]:
        self.reserved.append(list(hosts))
        return [Bundle(host, object(), index) for index, host in enumerate(hosts)]

    async def call(self, bundle: Bundle, method: str, *_: Any) -> Any:
        bundle.actor = bundle.actor or object()
        answer = self.answers[method].pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return answer

    async def is_alive(self, host: str) -> bool:
        return host in self.hosts

    def end_actor(self, bundle: Bundle) -> None:
        bundle.actor = None
        self.ended.append(bundle.host)

    def give_back(self, bundle: Bundle) -> None:
        self.given_back.append(bundle.host)

    async def close(self) -> None: ...


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MadeUpCluster:
    made = MadeUpCluster()
    monkeypatch.setattr(ray_provider, "RayCluster", lambda *_: made)
    monkeypatch.setattr(cluster_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(cluster_module, "_ANSWER_S", 0.01)
    return made


def provider(prefill: int, decode: int, both: int) -> tuple[RayProvider, list[Any]]:
    setup = MemberSetup(PlaneDriver(ControlPlane(ControlConfig())), WatchConfig(), HangArbiter(0.0))
    template = WorkerTemplate(ray=RayConfig())
    made = RayProvider(setup, [template], RayConfig())
    specs = start_workers([template], {"": (prefill, decode, both)})
    return made, [made.adopt(spec) for spec in specs]


async def test_the_gang_is_reserved_at_once_by_the_first_that_starts(
    cluster: MadeUpCluster,
) -> None:
    made, members = provider(1, 2, 0)
    placed = [await made.locate(member) for member in members]
    assert cluster.reserved == [[bundle.host for bundle, _ in placed]]
    assert len(set(cluster.reserved[0])) == 2
    assert all(location.rack == "r" for _, location in placed)


async def test_a_gang_that_does_not_fit_reserves_nothing(cluster: MadeUpCluster) -> None:
    made, members = provider(1, 6, 0)
    with pytest.raises(FleetError, match="7 workers of 1 GPUs do not fit the 3 nodes with 6"):
        await made.locate(members[0])
    assert cluster.reserved == []


async def test_a_worker_of_a_lost_node_gets_a_group_of_its_own_elsewhere(
    cluster: MadeUpCluster,
) -> None:
    made, members = provider(1, 2, 0)
    hosts = {member.id: (await made.locate(member))[0].host for member in members}
    lost = next(member for member in members if list(hosts.values()).count(hosts[member.id]) == 1)
    cluster.hosts.remove(hosts[lost.id])
    bundle, location = await made.locate(lost)
    assert bundle.host == location.host != hosts[lost.id]
    assert cluster.reserved[1:] == [[bundle.host]]
    for member in members:
        if member is not lost:
            assert (await made.locate(member))[0].host == hosts[member.id]


async def test_a_worker_that_leaves_makes_room_for_another(cluster: MadeUpCluster) -> None:
    made, members = provider(0, 6, 0)
    for member in members:
        await made.locate(member)
    assert "has room for 0" in made.start_refusal("decode")
    made.discard(members[0])
    assert len(cluster.given_back) == len(cluster.ended) == 1
    assert made.start_refusal("decode") == ""
    assert (await made.locate(made.make("decode")))[0].host == cluster.given_back[0]


def process(cluster: MadeUpCluster, **answers: list[Any]) -> RayProcess:
    cluster.answers = answers
    bundle = Bundle("n1", object(), 0, actor=object())
    return RayProcess("w", [], None, cluster, bundle)  # type: ignore[arg-type]


async def test_a_start_ends_with_its_node(cluster: MadeUpCluster) -> None:
    started = process(cluster, start=[{"url": "http://h"}])
    assert await started.ready(1.0) == {"url": "http://h"}
    cluster.hosts.remove("n1")
    with pytest.raises(FleetError, match="its node n1 is gone"):
        await process(cluster, start=[None]).ready(1.0)
    cluster.hosts.append("n1")
    with pytest.raises(FleetError, match=r"not ready within 0\.05 s"):
        await process(cluster, start=[None]).ready(0.05)


async def test_an_actor_that_is_out_of_reach_for_a_while_has_not_ended(
    cluster: MadeUpCluster,
) -> None:
    waits = process(cluster, exited=[FleetError("away"), FleetError("away"), ("ended", -9)])
    assert await waits.exited() == "ended"
    assert waits.code == -9
    gone = process(cluster, exited=[ActorGone("its node n1 is gone")])
    assert await gone.exited() == "its node n1 is gone"
    assert gone.code is None
    assert cluster.ended == ["n1"]


async def test_a_process_that_does_not_answer_is_ended_with_its_actor(
    cluster: MadeUpCluster,
) -> None:
    await process(cluster, stop=[()]).stop(0.0)
    assert cluster.ended == []
    await process(cluster, stop=[None]).stop(0.0)
    assert cluster.ended == ["n1"]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"--on ray needs ray; pip install '.\[ray\]'"):
        RayCluster("auto", {"CPU": 1.0})
