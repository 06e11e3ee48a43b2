"""Laws of an endpoint picker's pool: it is what its file or InferencePool says, live."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integrations.inference_pools import DEFINITION, inference_pool, pod
from tests.lib.fake_kubernetes import FakeKubernetes

from pigou.background import cancel
from pigou.config import ConfigError, ControlConfig
from pigou.control.plane import ControlPlane
from pigou.fleet.config import AttachedWorker
from pigou.fleet.supervisor import Supervisor
from pigou.gateway.plane_driver import PlaneDriver
from pigou.integrations.endpoint_pools import (
    EndpointPool,
    InferencePool,
    PoolFollower,
    open_pool,
    read_endpoints,
)
from pigou.request import Role

TWO = "endpoints:\n- url: http://10.0.0.1:8000\n- {url: 'http://10.0.0.2:8000/v1', role: decode}\n"
Seen = dict[str, AttachedWorker]


@asynccontextmanager
async def followed(source: EndpointPool) -> AsyncIterator[Callable[[], Seen]]:
    """Follow a source; yields a function that returns its endpoints by URL."""
    seen: list[Seen] = [{}]
    task = asyncio.create_task(
        source.follow(lambda workers: seen.append({worker.url: worker for worker in workers}))
    )
    try:
        yield lambda: seen[-1]
        assert not task.done()
        assert source.ready is bool(seen[1:])
    finally:
        await cancel(task)


async def until(true: Callable[[], Any], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():
            await asyncio.sleep(0.01)


# --- files ------------------------------------------------------------------------------------


def test_yaml_and_json_say_the_same() -> None:
    entries = {"endpoints": [
        {"url": "http://10.0.0.1:8000", "role": "prefill",
         "labels": {"host": "n1", "rack": "r1", "zone": "z1"}},
        {"url": "http://[fd00::1]:8000", "events": "tcp://[fd00::1]:5557", "key": "k"},
    ]}  # fmt: skip
    first, second = read_endpoints(json.dumps(entries).encode(), "pool.json")
    assert first == AttachedWorker(
        id="10.0.0.1:8000", url="http://10.0.0.1:8000", role=Role.PREFILL, host="n1", rack="r1",
        zone="z1",
    )  # fmt: skip
    assert (second.events, second.key, second.role) == ("tcp://[fd00::1]:5557", "k", Role.BOTH)
    assert [worker.url for worker in read_endpoints(TWO.encode(), "pool.yaml")] == [
        "http://10.0.0.1:8000", "http://10.0.0.2:8000",
    ]  # fmt: skip
    assert read_endpoints(b"endpoints: []", "pool.yaml") == []


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("{role: both}", "missing required field `url`"),
        ("{url: '10.0.0.1:8000'}", "write for example http://"),
        ("{url: 'http://h:8000/base'}", "write for example http://"),
        ("{url: 'http://me:secret@h:8000'}", "write for example http://"),
        ("{url: 'http://h:8000', role: draft}", "Invalid enum value 'draft'"),
        ("{url: 'http://h:8000', weight: 2}", "unknown field `weight`"),
        ("{url: 'http://h:8000', labels: {region: eu}}", "Invalid enum value 'region'"),
        ("{url: 'http://h:8000', labels: {zone: z}}", "without a host"),
        ("{url: 'http://10.0.0.1:8000'}", "given again"),
        ("7", "Expected `object`"),
    ],
)
def test_each_bad_entry_is_named(entry: str, complaint: str) -> None:
    text = f"endpoints:\n- url: http://10.0.0.1:8000\n- {entry}\n- {{url: x}}\n"
    with pytest.raises(ConfigError, match="refused") as raised:
        read_endpoints(text.encode(), "pool.yaml")
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("pool.yaml")
    assert len(lines) == 3
    assert lines[1].startswith("  endpoints[1]: ")
    assert complaint in lines[1]
    assert lines[2].startswith("  endpoints[2]: ")


@pytest.mark.parametrize("text", ["", "[]", "endpoints: 3", "endpoints: []\nmore: 1", "{", "\x00"])
def test_what_is_no_list_of_endpoints_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"pool\.yaml"):
        read_endpoints(text.encode(), "pool.yaml")


@pytest.mark.parametrize(
    "text",
    ["", "http://h:1", "k8s://ns", "k8s://ns/a/b?api=http://h:1", "/no/such/file",
     "k8s://ns/a?colour=red&api=http://h:1", "k8s://ns/a?events=0x10&api=http://h:1"],
)  # fmt: skip
def test_a_pool_that_is_not_understood_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match="pool"):
        open_pool(text)


async def test_a_file_is_followed_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(TWO)
    async with followed(open_pool(str(path))) as seen:
        await until(lambda: len(seen()) == 2)
        path.write_text("endpoints:\n- url: nonsense\n")
        await until(lambda: "endpoints[0]: url is 'nonsense'" in caplog.text)
        path.unlink()
        await until(lambda: "No such file" in caplog.text)
        assert len(seen()) == 2
        (tmp_path / "next").write_text(TWO.replace("10.0.0.2", "10.0.0.3"))
        (tmp_path / "next").rename(path)
        await until(lambda: "http://10.0.0.3:8000" in seen())
        assert "http://10.0.0.2:8000" not in seen()


# --- Kubernetes -------------------------------------------------------------------------------


@asynccontextmanager
async def cluster(*pods: dict[str, Any], **fields: Any) -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as api:
        api.store.put(DEFINITION)
        api.store.put(inference_pool({"app": "vllm"}, 8000, **fields))
        for each in pods:
            api.store.put(each)
        yield api


def source(api: FakeKubernetes, options: str = "") -> InferencePool:
    return InferencePool.parse(f"k8s://default/chat?api={api.url}{options}")


async def test_ready_pods_join_and_those_deleted_or_not_ready_leave() -> None:
    pods = [
        pod("a", "10.1.0.1", role="decode"), pod("b", "10.1.0.2", role="prefill"),
        pod("c", "10.1.0.3", ready=False), pod("d", "10.1.0.4", app="other"),
        pod("e", "10.1.0.5", role="encode"), pod("f", ""),
    ]  # fmt: skip
    async with cluster(*pods) as api, followed(source(api)) as seen:
        await until(lambda: len(seen()) == 2)
        one, two = seen()["http://10.1.0.1:8000"], seen()["http://10.1.0.2:8000"]
        assert (one.id, one.role, two.role) == ("a", Role.DECODE, Role.PREFILL)
        api.store.put(pod("c", "10.1.0.3"))
        await until(lambda: "http://10.1.0.3:8000" in seen())
        assert seen()["http://10.1.0.3:8000"].role is Role.BOTH
        api.store.put(pod("a", "10.1.0.1", ready=False))
        await until(lambda: "http://10.1.0.1:8000" not in seen())
        leaving = pod("b", "10.1.0.2")
        leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        leaving["metadata"]["finalizers"] = ["t/t"]
        api.store.put(leaving)
        await until(lambda: list(seen()) == ["http://10.1.0.3:8000"])


async def test_each_target_port_of_a_pod_is_an_endpoint_with_events_of_its_own() -> None:
    ports = [{"number": 8000 + rank} for rank in range(8)]
    async with (
        cluster(pod("a", "fd00::1"), targetPorts=ports) as api,
        followed(source(api, "&events=5557&replay=5657")) as seen,
    ):
        await until(lambda: len(seen()) == 8)
        last = seen()["http://[fd00::1]:8007"]
        assert (last.id, last.events, last.replay) == (
            "a-8007", "tcp://[fd00::1]:5564", "tcp://[fd00::1]:5664",
        )  # fmt: skip


async def test_a_pool_with_another_selector_has_other_pods() -> None:
    pods = [pod("a", "10.1.0.1"), pod("b", "10.1.0.2", app="sglang")]
    async with cluster(*pods) as api, followed(source(api)) as seen:
        await until(lambda: list(seen()) == ["http://10.1.0.1:8000"])
        api.store.put(inference_pool({"app": "sglang"}, 30000))
        await until(lambda: list(seen()) == ["http://10.1.0.2:30000"])
        api.store.put(pod("c", "10.1.0.3", app="sglang"))  # seen by a watch of the new selector
        await until(lambda: len(seen()) == 2)


async def test_a_pool_that_does_not_exist_yet_is_awaited(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeKubernetes() as api:
        api.store.put(DEFINITION)
        api.store.put(pod("a", "10.1.0.1"))
        pool = source(api)
        async with followed(pool) as seen:
            await until(lambda: "pool chat stays as it was" in caplog.text)
            assert not pool.ready
            api.store.put(inference_pool({"app": "vllm"}, 8000))
            await until(lambda: list(seen()) == ["http://10.1.0.1:8000"])
            assert pool.ready


async def test_an_api_server_that_is_away_leaves_the_pool_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(pod("a", "10.1.0.1")) as api, followed(source(api)) as seen:
        await until(lambda: len(seen()) == 1)
        await api.stop()
        await until(lambda: "pool chat stays as it was" in caplog.text)
        assert len(seen()) == 1
        api.store.put(pod("b", "10.1.0.2"))
        await api.start()
        await until(lambda: len(seen()) == 2)


@pytest.mark.parametrize(
    "fields", [{"appProtocol": "kubernetes.io/h2c"}, {"selector": {"matchLabels": {}}}]
)
async def test_a_pool_that_workers_cannot_serve_is_refused(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(pod("a", "10.1.0.1"), **fields) as api, followed(source(api)) as seen:
        await until(lambda: "pool chat stays as it was" in caplog.text)
        assert not seen()


# --- members ----------------------------------------------------------------------------------


def test_members_follow_the_pool_and_ids_are_used_once() -> None:
    supervisor = Supervisor(PlaneDriver(ControlPlane(ControlConfig())))
    pool = PoolFollower(supervisor)
    one, two = read_endpoints(TWO.encode(), "pool.yaml")

    def members() -> list[tuple[str, str]]:
        return [(member.id, member.role.value) for member in supervisor.members]

    pool.apply([one, two])
    pool.apply([one, two])
    assert members() == [("10.0.0.1:8000", "both"), ("10.0.0.2:8000", "decode")]
    pool.apply([two])
    assert members() == [("10.0.0.2:8000", "decode")]
    prefills = msgspec.structs.replace(two, role=Role.PREFILL)
    pool.apply([one, prefills])
    assert members() == [("10.0.0.1:8000.2", "both"), ("10.0.0.2:8000.2", "prefill")]
    pool.apply([])
    assert members() == []
