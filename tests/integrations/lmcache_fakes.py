"""What `pigou.integrations.lmcache` needs of LMCache, for tests without it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class Bitmap:
    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def batched_set(self, indices: list[int]) -> None:
        for i in indices:
            self.bits[i] = True

    def test(self, index: int) -> bool:
        return self.bits[index]

    def __len__(self) -> int:
        return len(self.bits)


class L2StoreResult(int):
    def __new__(cls, success: bool, size: int) -> L2StoreResult:
        return super().__new__(cls, size if success else -1)

    def is_successful(self) -> bool:
        return self >= 0

    def bytes_transferred(self) -> int:
        return max(0, int(self))


@dataclass(frozen=True)
class AdapterUsage:
    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: dict[str, int]


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.told: list[tuple[str, list[Any]]] = []

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.told.append(("stored", keys))

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.told.append(("accessed", keys))

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self.told.append(("deleted", keys))


class EventNotifier:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self.fd

    def notify(self) -> None:
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        os.close(self.fd)


def install() -> None:
    """Put the fakes where LMCache is imported from."""
    for name, members in {
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.v1.distributed.l2_adapters.base": {
            "AdapterUsage": AdapterUsage, "L2AdapterInterface": L2AdapterInterface,
        },
        "lmcache.v1.platform": {"create_event_notifier": EventNotifier},
    }.items():  # fmt: skip
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        vars(sys.modules[name]).update(members)
