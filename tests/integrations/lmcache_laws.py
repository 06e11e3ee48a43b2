"""Laws of the L2 adapter, and a run under LMCache's own storage manager.

`PYTHON lmcache_laws.py FOLDER` holds them with a real LMCache; `test_lmcache.py` with fakes.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZE = 5000


@dataclass(frozen=True)
class Key:
    """LMCache's `ObjectKey`."""

    chunk_hash: bytes
    model_name: str = "llama"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


class Memory:
    """LMCache's `MemoryObj`, as far as adapters read it."""

    def __init__(self, fill: int = 0, size: int = SIZE) -> None:
        self.byte_array = memoryview(bytearray([fill]) * size)

    def get_size(self) -> int:
        return len(self.byte_array)


def open_l2(folder: Path, **params: Any) -> Any:
    from pigou.integrations.lmcache import PigouL2

    defaults = {"tiers": [f"disk=200KiB@{folder}"], "page": 1024, "max_value": 1 << 16}
    return PigouL2({**defaults, **params})


def wait(fd: int, query: Callable[[], Any]) -> Any:
    """Wait for the descriptor, then ask."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    end = time.monotonic() + 20
    while not (result := query()):
        assert poll.poll(5000)
        assert time.monotonic() < end
        time.sleep(0.001)
    return result


def store(l2: Any, keys: list[Any], memories: list[Any]) -> Any:
    task = l2.submit_store_task(keys, memories)
    return wait(l2.get_store_event_fd(), l2.pop_completed_store_tasks)[task]


def flags(bits: Any) -> list[bool]:
    return [bits.test(i) for i in range(len(bits))]


def look_up(l2: Any, keys: list[Any]) -> list[bool]:
    task = l2.submit_lookup_and_lock_task(keys, {})
    found = wait(l2.get_lookup_and_lock_event_fd(), lambda: l2.query_lookup_and_lock_result(task))
    assert l2.query_lookup_and_lock_result(task) is None  # told once
    l2.submit_unlock(keys)
    return flags(found)


def load(l2: Any, keys: list[Any], memories: list[Any]) -> list[bool]:
    task = l2.submit_load_task(keys, memories)
    return flags(wait(l2.get_load_event_fd(), lambda: l2.query_load_result(task)))


def law_objects_come_back_as_stored_under_their_salt_alone(folder: Path) -> None:
    l2 = open_l2(folder)
    keys = [Key(bytes([i]), cache_salt=salt) for i in range(4) for salt in ("", "alice")]
    result = store(l2, keys, [Memory(i + 1) for i in range(8)])
    assert result.is_successful()
    assert result.bytes_transferred() == 8 * SIZE
    others = [Key(b"\1", cache_salt="bob"), Key(b"\1", "other"), Key(b"\1", kv_rank=1), Key(b"z")]
    others.append(Key(b"\1", object_group_id=1))
    assert look_up(l2, [*keys, *others]) == [True] * 8 + [False] * 5
    out = [Memory() for _ in range(13)]
    assert load(l2, [*keys, *others], out) == [True] * 8 + [False] * 5
    assert [memory.byte_array for memory in out[:8]] == [Memory(i + 1).byte_array for i in range(8)]
    assert load(l2, keys[:1], [Memory(size=SIZE - 1)]) == [False]  # of another size
    l2.delete([keys[0], others[0]])
    assert look_up(l2, keys[:2]) == [False, True]
    fds = {l2.get_store_event_fd(), l2.get_lookup_and_lock_event_fd(), l2.get_load_event_fd()}
    assert len(fds) == 3
    l2.close()


def law_salts_keep_their_quotas(folder: Path) -> None:
    quota = 4 * 5 * 1040 + 3
    l2 = open_l2(folder, quotas={"alice": quota}, default_quota=0)
    keys = [Key(bytes([i]), cache_salt="alice") for i in range(12)]
    for i, key in enumerate(keys):
        assert store(l2, [key], [Memory(i)]).is_successful()
        assert l2.get_usage().bytes_by_cache_salt["alice"] <= quota
    assert look_up(l2, keys) == [False] * 8 + [True] * 4
    assert store(l2, [Key(b"x")], [Memory()]).bytes_transferred() == 0
    assert l2.get_usage().total_bytes_used == 4 * 5 * 1040
    assert l2.report_status()["is_healthy"]
    l2.close()


def law_a_failure_is_a_failed_task_and_never_an_exception(folder: Path) -> None:
    l2 = open_l2(folder, max_value=SIZE - 1)
    assert not store(l2, [Key(b"1")], [Memory()]).is_successful()
    assert load(l2, [Key(b"1")], [Memory()]) == [False]
    l2.close()


LAWS = [value for name, value in list(globals().items()) if name.startswith("law_")]


# --- with LMCache -----------------------------------------------------------------------------


def check_contract() -> None:
    """Every method of the adapter takes what LMCache's abstract one takes."""
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

    from pigou.integrations.lmcache import PigouL2

    assert not PigouL2.__abstractmethods__
    for name, method in inspect.getmembers(L2AdapterInterface, inspect.isfunction):
        own = getattr(PigouL2, name)
        if own is not method and name != "__init__":
            wanted = list(inspect.signature(method).parameters)
            assert list(inspect.signature(own).parameters) == wanted, name


def alter(folder: Path) -> None:
    """Flip bits wherever the fifth object is, also in pages that are free."""
    import torch

    file = next(folder.glob("*.pigou-kv"))
    raw = bytearray(file.read_bytes())
    five = torch.full((1000,), 5, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    at = -1
    while (at := raw.find(five, at + 1)) >= 0:
        raw[at] ^= 1
    file.write_bytes(raw)


def check_storage_manager(folder: Path) -> None:
    """LMCache's storage manager stores to the adapter, and prefetches from it after a restart."""
    import torch
    from lmcache.v1.distributed.api import (
        GroupedObjectKeys,
        MemoryLayoutDesc,
        ObjectKey,
        PrefetchTaskSpec,
    )
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
    from lmcache.v1.distributed.storage_manager import StorageManager

    layout = MemoryLayoutDesc([torch.Size([2, 4, 256, 64])], [torch.bfloat16])
    plugin = PluginL2AdapterConfig.from_dict({
        "module_path": "pigou.integrations.lmcache", "class_name": "PigouL2",
        "adapter_params": {
            "tiers": [f"disk=100MiB@{folder}"], "quotas": {"bob": 4 << 18}, "page": 1 << 18,
        },
    })  # fmt: skip

    def start() -> Any:
        memory = L1MemoryManagerConfig(64 << 20, False, 64 << 20)
        eviction = EvictionConfig("LRU")
        config = StorageManagerConfig(L1ManagerConfig(memory), eviction, L2AdaptersConfig([plugin]))
        return StorageManager(config)

    def keys(salt: str) -> list[Any]:
        return [ObjectKey(bytes([i] * 16), "llama", 0x01000100, 0, salt) for i in range(8)]

    def prefetch(manager: Any, wanted: list[Any]) -> int:
        spec = PrefetchTaskSpec([GroupedObjectKeys(wanted, 0, layout)])
        handle = manager.submit_prefetch_task(spec)
        end = time.monotonic() + 20
        while (result := manager.query_prefetch_status(handle)) is None:
            assert time.monotonic() < end
            time.sleep(0.005)
        return int(result.l2_hit_cells[0].popcount())

    manager = start()
    for salt in ("alice", "bob"):
        reserved = manager.reserve_write(keys(salt), layout)
        assert len(reserved) == 8
        for i, key in enumerate(keys(salt)):
            reserved[key].tensor.fill_(i + 1)
        manager.finish_write(keys(salt))
    end = time.monotonic() + 20
    usage: dict[str, int] = {}
    while usage.get("alice", 0) < 8 << 18 or not usage.get("bob"):
        assert time.monotonic() < end, usage
        time.sleep(0.05)
        usage = manager.get_usage_bytes_by_cache_salt()
    time.sleep(0.5)
    assert manager.get_usage_bytes_by_cache_salt()["bob"] <= 4 << 18
    manager.close()
    manager = start()
    assert prefetch(manager, keys("")) == 0
    assert prefetch(manager, keys("carol")) == 0
    assert prefetch(manager, keys("alice")) == 8
    with manager.read_prefetched_results(keys("alice")) as objects:
        for i, memory in enumerate(objects):
            assert (memory.tensor == i + 1).all()
    manager.finish_read_prefetched(keys("alice"))
    assert prefetch(manager, keys("bob")) < 8
    manager.close()
    alter(folder)
    manager = start()
    assert prefetch(manager, keys("alice")) == 4  # up to the altered one
    manager.close()
    print("LMCache's storage manager: stored, restarted, prefetched 8 of 8 objects")


def check_connector(url: str) -> None:
    """LMCache's own remote connector puts to a Pigou store and gets from it."""
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.connector import CreateConnector
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    extra = {"save_chunk_meta": False} if url.startswith("resp") else {}
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=256, max_local_cpu_size=0.2, remote_url=url, extra_config=extra
    )
    metadata = LMCacheMetadata("llama", 1, 1, 0, 0, torch.bfloat16, (4, 2, 256, 2, 64))
    memory = LocalCPUBackend(config, metadata=metadata, dst_device="cpu")
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    connector = CreateConnector(url, loop, memory, config, metadata)

    def run(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result(30)

    def key(number: int, user: str) -> Any:
        tags = {"lmcache.tag.user": user}
        return CacheEngineKey("llama", 1, 0, number * 1234567, torch.bfloat16, tags)

    for i in range(4):
        chunk = memory.allocate(metadata.get_shapes(), metadata.get_dtypes())
        chunk.tensor.fill_(i + 1)
        run(connector.put(key(i, "alice"), chunk))
    assert [run(connector.exists(key(i, "alice"))) for i in range(5)] == [True] * 4 + [False]
    assert not run(connector.exists(key(1, "bob")))
    for i in range(4):
        assert (run(connector.get(key(i, "alice"))).tensor == i + 1).all()


if __name__ == "__main__":
    if "://" in sys.argv[1]:
        check_connector(sys.argv[1])
        print("ok", flush=True)
        os._exit(0)  # LMCache's executors never end
    base = Path(sys.argv[1])
    check_contract()
    for number, law in enumerate(LAWS):
        law(base / str(number))
    check_storage_manager(base / "manager")
    print("ok")
