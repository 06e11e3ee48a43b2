"""SGLang's HiCache over Pigou's tiers, by `--hicache-storage-backend dynamic` (SGLang 0.5.23)."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from pigou.kv.block import Bytes
from pigou.kv.tier_config import uri_below
from pigou.runtime.stores.page_store import Page, PageStore

_log = logging.getLogger(__name__)
_KV = str(PoolName.KV)
#: Attributes of a host pool that decide its pages' bytes, and of SGLang's ranks.
_SHAPE = (
    "layout", "page_size", "dtype", "start_layer", "end_layer", "head_num", "head_dim",
    "storage_format_tag",
)  # fmt: skip
_SHARD = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size",
          "dcp_rank", "dcp_size", "tp_lcm_size", "should_split_heads")  # fmt: skip
_T = TypeVar("_T")


class HiCacheConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`--hicache-storage-backend-extra-config`."""

    backend_name: str
    module_path: str
    class_name: str
    tiers: list[str]  # as `disk=100GiB@/DIR`, for transfer rank
    pools: dict[str, list[str]] = {}  # tiers of further pools (`mamba`, `swa`, `indexer`)
    prefill_tokens_per_s: float = 0.0  # pages that are computed sooner are not read; 0 reads all
    interface_v1: int = 0  # read by SGLang: 1 passes indices and the hashes before a batch


class _Pool:
    """One of SGLang's host pools, and the store of its pages."""

    def __init__(self, pool: Any, layout: str, tiers: Sequence[str], speed: float) -> None:
        self.pool, self.page_tokens = pool, int(pool.page_size)
        size = _bytes_of(pool.get_dummy_flat_data_page()).size
        self.store = PageStore(tiers, layout, size, page_tokens=self.page_tokens)
        if speed:
            self.store.learn(self.page_tokens / speed)

    def write(self, pages: Sequence[Page], tensors: Sequence[Any]) -> list[bool]:
        data = np.empty((len(pages), self.store.page_bytes), dtype=np.uint8)
        for row, tensor in zip(data, tensors, strict=True):
            flat = tensor.contiguous()
            row[:] = _bytes_of(flat)
        held: list[bool] = self.store.put(
            pages, data, np.arange(len(pages), dtype=np.int32)
        ).tolist()
        return held

    def read(self, pages: Sequence[Page]) -> tuple[Bytes, list[bool]]:
        """Return the pages' bytes, one a row, and which are right."""
        out = np.empty((len(pages), self.store.page_bytes), dtype=np.uint8)
        good = self.store.get(pages, out, np.arange(len(pages), dtype=np.int32))
        return out, good.tolist()

    def move(self, pages: Sequence[Page], indices: Any, *, read: bool) -> list[bool]:
        """Read pages to, or write them from, the host pool; return which are there."""
        if len(indices) != len(pages) * self.page_tokens:
            raise ValueError(f"{len(indices)} indices, {len(pages)} pages of {self.page_tokens}")
        rows = [int(index) for index in indices[:: self.page_tokens]]
        if not read:
            return self.write(pages, [self.pool.get_data_page(row, flat=True) for row in rows])
        out, good = self.read(pages)
        page = self.pool.get_dummy_flat_data_page()
        for i in np.flatnonzero(good).tolist():
            _bytes_of(page)[:] = out[i]
            self.pool.set_from_flat_data_page(rows[i], page)
        return good


class PigouStorage(HiCacheStorage):
    """Pages in Pigou's tiers, with checksums and eviction by price; a failing store is a miss.

    SGLang's page hashes begin with the request's `cache_salt` and `extra_key`: tenants share none.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ARG002
        try:
            self.config = msgspec.convert(storage_config.extra_config, HiCacheConfig)
        except msgspec.ValidationError as error:
            raise ValueError(f"hicache-storage-backend-extra-config: {error}") from error
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ValueError(
                f"rank 0 of {storage_config.tp_size} writes this model's pages for all ranks, and "
                "a tier has one owner: use --enable-dp-attention with as many ranks, or --tp 1"
            )
        self._ranks, self._pools = storage_config, dict[str, _Pool]()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers of the KV pool; raises ConfigError."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(_KV, mem_pool_host, self.config.tiers)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Open the tiers of another pool, if it has any."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in self.config.pools and name not in self._pools:
            self._open(name, host_pool, self.config.pools[name])

    def on_host_pools_registered(self) -> None:
        """Raise ValueError for a pool without tiers: nothing of its model would be restored."""
        registered = {str(name) for name in getattr(self, "registered_pools", ())}
        if lacking := ", ".join(sorted(registered - self._pools.keys())):
            raise ValueError(f'no tiers for {lacking}; add "pools": {{"NAME": ["disk=SIZE@/DIR"]}}')

    def _open(self, name: str, pool: Any, tiers: Sequence[str]) -> None:
        ranks = self._ranks
        shape = [str(getattr(pool, field, None)) for field in _SHAPE]
        shard = [getattr(ranks, field, None) for field in _SHARD]
        rank = f"tp{ranks.tp_rank}-pp{ranks.pp_rank}-cp{ranks.attn_cp_rank}-dp{ranks.dp_rank}"
        own = [uri_below(tier, f"{rank}-{name}") for tier in tiers]  # one process owns a folder
        layout = repr((ranks.model_name, name, shape, shard))
        self._pools[name] = _Pool(pool, layout, own, self.config.prefill_tokens_per_s)

    def _safe(self, otherwise: _T, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except Exception:
            _log.exception("a HiCache operation failed, and counts as a miss")
            return otherwise

    def _move(
        self, name: Any, keys: list[str], indices: Any, extra: Any, *, read: bool
    ) -> list[bool]:
        if not keys:
            return []
        return self._safe(
            [False] * len(keys),
            lambda: self._pools[str(name)].move(_pages(keys, extra), indices, read=read),
        )

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are held, and read sooner than computed."""
        store = self._pools[_KV].store
        return self._safe(0, lambda: store.worth_reading(_pages(keys, extra_info)))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool; return which are there."""
        return self._move(_KV, keys, host_indices, extra_info, read=True)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages from the host pool; return which are held."""
        return self._move(_KV, keys, host_indices, extra_info, read=False)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of several pools."""
        return self._move_all(transfers, extra_info, read=True)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        return self._move_all(transfers, extra_info, read=False)

    def _move_all(self, transfers: Any, extra: Any, *, read: bool) -> dict[str, list[bool]]:
        return {
            transfer.name: self._move(
                transfer.name, transfer.keys or [], transfer.host_indices, extra, read=read
            )
            for transfer in transfers
        }

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Return the longest prefix that every pool can restore, by its hit policy."""
        return self._safe(
            PoolTransferResult.empty(),
            lambda: self._restorable(_pages(keys, extra_info), pool_transfers or ()),
        )

    def _restorable(self, pages: Sequence[Page], transfers: Sequence[Any]) -> Any:
        held = self._pools[_KV].store.worth_reading(pages)
        hits, lengths = {PoolName.KV: held}, set(range(1, held + 1))
        for transfer in transfers:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # such a pool gates nothing
            store = self._pools[str(transfer.name)].store
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                able = set(range(1, store.held(pages[:held]) + 1))
            else:
                present = [bool(store.held([page])) for page in pages[:held]]
                last = max(1, len(transfer.keys or ()))
                able = {n for n in range(1, held + 1) if all(present[max(0, n - last) : n])}
            hits[transfer.name] = max(able, default=0)
            lengths &= able
        counts = {name: count for name, count in hits.items() if count}
        return PoolTransferResult(max(lengths, default=0), counts, sorted(lengths))

    def batch_get(self, keys: list[str], target_locations: Any = None, *_: Any) -> list[Any]:
        """Return pages, in `target_locations` where given; None for a miss."""
        missed: list[Any] = [None] * len(keys)
        return self._safe(missed, lambda: self._read(keys, target_locations or missed))

    def _read(self, keys: list[str], targets: Sequence[Any]) -> list[Any]:
        pool = self._pools[_KV]
        out, good = pool.read(_pages(keys, None))
        tensors: list[Any] = [None] * len(keys)
        for i in np.flatnonzero(good).tolist():
            flat = pool.pool.get_dummy_flat_data_page()
            _bytes_of(flat)[:] = out[i]
            target = targets[i]
            tensors[i] = flat if target is None else target.copy_(flat.view(target.shape))
        return tensors

    def batch_set(self, keys: list[str], values: Any = None, *_: Any) -> bool:
        """Store pages; return whether all are held."""
        return all(self._safe([False], lambda: self._pools[_KV].write(_pages(keys, None), values)))

    def get(self, key: str, target_location: Any = None, *_: Any) -> Any:
        """Return a page, or None."""
        return self.batch_get([key], [target_location])[0]

    def set(self, key: str, value: Any = None, *_: Any) -> bool:
        """Store a page; return whether it is held."""
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        """Return whether a page is held."""
        return self.batch_exists([key]) == 1

    def clear(self) -> bool:
        """Drop all pages; return whether that was done."""
        return self._safe(False, lambda: [at.store.clear() for at in self._pools.values()] != [])

    def close(self) -> None:
        """Close the tiers; their pages stay."""
        for at in self._pools.values():
            at.store.close()


def _bytes_of(tensor: Any) -> Bytes:
    """Return the memory of a contiguous tensor, which must outlive it."""
    size = tensor.numel() * tensor.element_size()
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(tensor.data_ptr()))


def _pages(keys: Sequence[str], extra_info: Any) -> list[Page]:
    """Return the pages of a chain; the hashes before it are known if SGLang passes them."""
    before = (getattr(extra_info, "prefix_keys", None) or []) if keys else []
    names = [None, *(key.encode() for key in (*before[-1:], *keys))][bool(before) :]
    return [Page(key, names[i], len(before) + i) for i, key in enumerate(names[1:]) if key]
