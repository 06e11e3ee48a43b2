"""URLs of registries: what is understood, what is refused, and whom each backend trusts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.fleet.registry.backends import Kubernetes

from pigou import registry
from pigou.config import ConfigError
from pigou.fleet.registry.entry import Topology
from pigou.fleet.registry.file_store import FileStore
from pigou.fleet.registry.registry import Registry, open_registry, open_store
from pigou.request import Role
from pigou.wire.fleet_secret import FleetSecret

SECRET = FleetSecret("s" * 32)


@pytest.mark.parametrize(
    "url",
    [
        "", "nats", "http://h:1/x", "file://host/folder", "file://",
        "nats://h:4222/a/b", "nats://h:4222/b?x=1", "etcd://h:none/b", "etcd://", "k8s://",
        "etcd://h/b?ca=x",
        "k8s://ns/path?api=http://h", "k8s://ns?colour=red&api=http://h",
        "k8s://ns?port=0&api=http://h", "k8s://ns",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_a_remedy(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="registry"):
        open_store(url)


def test_a_password_is_in_no_message() -> None:
    with pytest.raises(ConfigError) as raised:
        open_registry("nats://user:hunter2@10.0.0.1:4222/workers")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["nats", "etcd"])
def test_a_backend_whose_client_is_missing_names_its_extra(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_is_there", lambda _: False)
    with pytest.raises(ConfigError, match=rf"\.\[{scheme}\]"):
        open_store(f"{scheme}://127.0.0.1:1/workers")


@pytest.mark.parametrize("host", ["10.0.0.1", "registry.example"])
def test_a_registry_that_other_machines_reach_needs_a_secret(host: str) -> None:
    pytest.importorskip("nats")
    with pytest.raises(ConfigError, match="fleet secret"):
        open_registry(f"nats://{host}:4222/workers")
    open_registry(f"nats://{host}:4222/workers", SECRET)
    open_registry("nats://127.0.0.1:4222/workers")
    open_registry("nats://127.0.0.1:4222")  # the bucket has a default


def test_a_key_leaves_no_folder(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "registry")
    for key in ("../x", "", "a/b", ".hidden"):
        with pytest.raises(OSError, match="file's name"):
            asyncio.run(store.put(key, b"x", 1.0, None))
    assert not list(tmp_path.glob("x*"))


def test_a_stock_engines_pod_is_an_entry_made_of_its_labels() -> None:
    async def main() -> None:
        async with Kubernetes() as made:
            zone = {"topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/rack": "r1"}
            stock = {"pigou.dev/stock-role": "decode", "pigou.dev/model": "llama"}
            made.pod("w1", ready=True, **stock, **zone)
            registry = Registry(made.client(), SECRET)
            (found,) = (await registry.relist()).entries
            assert (found.worker, found.role, found.model) == ("w1", Role.DECODE, "llama")
            assert found.url == "http://10.1.0.1:8000"
            assert found.topology == Topology(host="node-1", rack="r1", zone="z1", gpus=2)
            notes = {"pigou.dev/model-name": "meta-llama/Llama-3.1", "pigou.dev/gpus": "16"}
            pod = next(p for p in made.fake.store.all("pods") if p["metadata"]["name"] == "w1")
            pod["metadata"]["annotations"] = notes
            made.fake.store.put(pod)
            (found,) = (await registry.relist()).entries
            assert (found.model, found.topology.gpus) == ("meta-llama/Llama-3.1", 16)
            made.pod("w1", ready=False)
            assert (await registry.relist()).entries == ()
            await registry.close()

    asyncio.run(main())


def test_a_worker_that_names_no_pod_is_told_so() -> None:
    async def main() -> None:
        async with Kubernetes() as made:
            store = made.client()
            with pytest.raises(OSError, match="pod's name"):
                await store.put("elsewhere", b"x", 1.0, None)
            await store.close()

    asyncio.run(main())
