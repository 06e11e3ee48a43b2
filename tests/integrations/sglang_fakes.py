"""Fakes of SGLang's types that the HiCache backend meets, by SGLang 0.5.23.

`test_sglang_contract.py` compares them with the wheel.
"""

from __future__ import annotations

import enum
import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

MODULE = "sglang.srt.mem_cache.hicache_storage"
PATHS = ("sglang", "sglang.srt", "sglang.srt.mem_cache", MODULE)


class PoolName(enum.StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"


class PoolHitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = "org/model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[host_pool_name] = host_pool

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool: ...  # fmt: skip

    @abstractmethod
    def exists(self, key: str) -> bool: ...


@dataclass
class HostPool:
    """A host pool of two buffers (K, V), pages of `page_size` tokens, in layout `layer_first`."""

    tokens: int = 256
    page_size: int = 4
    dtype: torch.dtype = torch.bfloat16
    layer_num: int = 2
    head_num: int = 2
    head_dim: int = 8
    layout: str = "layer_first"
    start_layer: int = 0
    end_layer: int = 2
    kv_buffer: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (2, self.layer_num, self.tokens, self.head_num, self.head_dim)
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        self.kv_buffer = (whole % 251).to(self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[:, :, index : index + self.page_size]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        shape = (2, self.layer_num, self.page_size, self.head_num, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        shape = (2, self.layer_num, self.page_size, self.head_num, self.head_dim)
        self.kv_buffer[:, :, index : index + self.page_size] = data_page.reshape(shape)


def chain(pages: int, salt: str = "", seed: int = 0) -> list[str]:
    """Return page hashes of a sequence, as SGLang's are: SHA-256, each of the one before."""
    hashes, before = [], hashlib.sha256(salt.encode()).hexdigest()
    for number in range(pages):
        before = hashlib.sha256(f"{before}{seed}{number}".encode()).hexdigest()
        hashes.append(before)
    return hashes


@contextmanager
def fake_sglang() -> Iterator[None]:
    """Let `import sglang...` find these types."""
    kept = {name: sys.modules.pop(name, None) for name in (*PATHS, "pigou.integrations.sglang")}
    for path in PATHS:
        sys.modules[path] = ModuleType(path)
    for name in ("HiCacheStorage", "PoolHitPolicy", "PoolName", "PoolTransferResult"):
        setattr(sys.modules[MODULE], name, globals()[name])
    try:
        yield
    finally:
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
