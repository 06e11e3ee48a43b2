"""LMCache's L2 adapter and remote connector over Pigou's tiers, in the process of LMCache."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from pigou.registry import read_struct
from pigou.runtime.stores.page_store import ValueStore

#: Version of LMCache that these classes are written for.
SEAM = "lmcache 0.5"
log = logging.getLogger(__name__)


class L2Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`adapter_params` of `PigouL2`."""

    tiers: list[str]  # nearest first, as disk=100GiB@/DIR
    quotas: dict[str, int] = {}  # bytes by `cache_salt`
    default_quota: int | None = None  # bytes of other salts
    page: int = 1 << 20  # unit of storage in bytes
    max_value: int = 64 << 20  # bytes of the largest object
    threads: int = 4

    def open(self) -> ValueStore:
        """Open the tiers; raises ConfigError."""
        return ValueStore.open(
            self.tiers, self.page, self.max_value,
            quotas=self.quotas, default_quota=self.default_quota,
        )  # fmt: skip


class PigouL2(L2AdapterInterface):  # type: ignore[misc]
    """Second tier of LMCache's daemon, with eviction by price and quotas by `cache_salt`.

    Load it as `{"type": "plugin", "module_path": "pigou.integrations.lmcache", "class_name":
    "PigouL2", "adapter_params": {"tiers": ["disk=100GiB@/DIR"]}}`. Objects are not locked: one
    that goes between lookup and load is a miss.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: object = None) -> None:  # noqa: ARG002
        super().__init__()  # evicts by itself, so declares no capacity to LMCache
        options = read_struct("adapter_params", L2Params, params, strict=True)
        self._values = options.open()
        self._threads = ThreadPoolExecutor(options.threads, "pigou-l2")
        self._local = threading.local()
        self._signals = {kind: create_event_notifier() for kind in ("store", "lookup", "load")}
        self._done: dict[str, dict[int, Any]] = {kind: {} for kind in self._signals}
        self._lock, self._tasks = threading.Lock(), 0

    def get_store_event_fd(self) -> int:
        """Return the descriptor that tells of stores."""
        return int(self._signals["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that tells of lookups."""
        return int(self._signals["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that tells of loads."""
        return int(self._signals["load"].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects; those without room in their quota are left out."""

        def store() -> L2StoreResult:
            held = [pair for pair in zip(keys, objects, strict=True) if self._put(*pair)]
            sizes = [memory.get_size() for _, memory in held]
            self._notify_keys_stored([key for key, _ in held], sizes)
            return L2StoreResult(True, sum(sizes))

        return self._submit("store", store, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of stores since the last call."""
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: object) -> int:  # noqa: ARG002
        """Look up objects."""

        def look_up() -> Bitmap:
            return bitmap([self._values.has(*name_of(key)) for key in keys])

        return self._submit("lookup", look_up, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return which objects are held, once."""
        with self._lock:
            return self._done["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: nothing is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Read objects into memory."""

        def load() -> Bitmap:
            good = [self._get(key, memory) for key, memory in zip(keys, objects, strict=True)]
            self._notify_keys_accessed([key for key, hit in zip(keys, good, strict=True) if hit])
            return bitmap(good)

        return self._submit("load", load, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return which objects were read, once."""
        with self._lock:
            return self._done["load"].pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects."""
        gone = [key for key in keys if self._values.delete(*name_of(key))]
        self._notify_keys_deleted(gone, [0] * len(gone))  # `get_usage` counts by itself

    def get_usage(self) -> AdapterUsage:
        """Return the bytes of the tiers' pages, all and by salt."""
        stats = self._values.store.stats()
        by_salt = {salt: of["bytes"] for salt, of in stats["tenures"].items()}
        capacity = sum(tier["cap_bytes"] for tier in stats["tiers"])
        return AdapterUsage(stats["bytes"], capacity, by_salt)

    def report_status(self) -> dict[str, Any]:
        """Return figures by tier and salt."""
        stats = self._values.store.stats()
        return {"is_healthy": any(t["up"] for t in stats["tiers"]), "type": "pigou", **stats}

    def close(self) -> None:
        """End the threads, close the tiers."""
        self._threads.shutdown(wait=True)
        self._values.store.close()
        for signal in self._signals.values():
            signal.close()

    def _submit(self, kind: str, work: Callable[[], Any], failure: Any) -> int:
        with self._lock:
            self._tasks += 1
            task = self._tasks

        def run() -> None:
            result = failure
            try:
                result = work()
            except Exception:
                log.exception("a %s failed", kind)
            with self._lock:
                self._done[kind][task] = result
            self._signals[kind].notify()

        self._threads.submit(run)
        return task

    def _frame(self) -> Any:
        if not hasattr(self._local, "frame"):
            self._local.frame = self._values.frame()
        return self._local.frame

    def _put(self, key: Any, memory: Any) -> bool:
        data, frame = np.frombuffer(memory.byte_array, np.uint8), self._frame()
        if len(data) > self._values.max_bytes:
            raise ValueError(f"an object has {len(data)} bytes; raise max_value")
        np.copyto(np.frombuffer(self._values.body(frame, len(data)), np.uint8), data)
        return self._values.put(*name_of(key), frame, len(data))

    def _get(self, key: Any, memory: Any) -> bool:
        out, frame = np.frombuffer(memory.byte_array, np.uint8), self._frame()
        size = self._values.get(*name_of(key), frame)
        if size == len(out):
            np.copyto(out, np.frombuffer(self._values.body(frame, size), np.uint8))
        return size == len(out)


def name_of(key: Any) -> tuple[bytes, str]:
    """Return a key's name without its salt, and the salt."""
    text = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
    return text.encode(), key.cache_salt


def bitmap(good: Sequence[bool]) -> Bitmap:
    """Return flags as LMCache's bitmap."""
    bits = Bitmap(len(good))
    bits.batched_set([i for i, flag in enumerate(good) if flag])
    return bits
