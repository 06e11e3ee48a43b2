"""Laws of the HiCache backend, driven as SGLang's controller does, with fakes of its types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.sglang_fakes import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    HostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    chain,
    fake_sglang,
)

PAGES = 8
NAMES = {
    "backend_name": "pigou", "module_path": "pigou.integrations.sglang",
    "class_name": "PigouStorage", "interface_v1": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _sglang() -> Iterator[None]:
    with fake_sglang():
        yield


def config(tier: str, **fields: Any) -> HiCacheStorageConfig:
    extra = NAMES | {"tiers": [tier]} | fields.pop("extra", {})
    return HiCacheStorageConfig(extra_config=extra, **fields)


def opened(settings: HiCacheStorageConfig, pool: Any = None, **pools: Any) -> Any:
    from pigou.integrations.sglang import PigouStorage

    storage = PigouStorage(settings, {})
    storage.register_mem_pool_host(pool or HostPool())
    for name, other in pools.items():
        storage.register_mem_host_pool_v2(other, PoolName(name))
    storage.on_host_pools_registered()
    return storage


def indices(pages: int = PAGES, first: int = 0, size: int = 4) -> torch.Tensor:
    return torch.arange(first * size, (first + pages) * size)


def disk(folder: Path, size: str = "64MiB") -> str:
    return f"disk={size}@{folder}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_pages_come_back_bit_by_bit_after_a_restart(tmp_path: Path, dtype: torch.dtype) -> None:
    pool, keys = HostPool(dtype=dtype), chain(PAGES)
    before = pool.kv_buffer.clone().view(torch.uint8)
    storage = opened(config(disk(tmp_path)), pool)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, indices()) == [True] * PAGES
    storage.close()
    other = HostPool(dtype=dtype)
    other.kv_buffer.view(torch.uint8).zero_()
    storage = opened(config(disk(tmp_path)), other)
    assert storage.batch_exists([*keys, *chain(1, seed=9)]) == PAGES
    assert storage.batch_get_v1(keys, indices(first=16)) == [True] * PAGES
    found = other.kv_buffer.view(torch.uint8)[:, :, 64 : 64 + 4 * PAGES]
    assert torch.equal(found, before[:, :, : 4 * PAGES])
    storage.close()


def test_the_older_interface_has_the_same_pages(tmp_path: Path) -> None:
    pool, keys = HostPool(), chain(2)
    storage = opened(config(disk(tmp_path)), pool)
    assert storage.batch_set(keys, [pool.get_data_page(0), pool.get_data_page(4)])
    assert storage.exists(keys[0])
    target = pool.get_dummy_flat_data_page()
    found = storage.batch_get([*keys, *chain(1, seed=9)], [target, None, None])
    assert found[0] is target
    assert torch.equal(target, pool.get_data_page(0))
    assert torch.equal(found[1], pool.get_data_page(4))
    assert found[2] is None
    assert storage.set(keys[0], pool.get_data_page(0))
    assert torch.equal(storage.get(keys[1]), pool.get_data_page(4))
    assert storage.clear()
    assert not storage.exists(keys[0])


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [({"model_name": "other"}, {}), ({"tp_size": 2}, {}), ({"tp_size": 2, "tp_rank": 1}, {}),
     ({"pp_size": 2}, {}), ({"attn_cp_size": 2}, {}), ({}, {"dtype": torch.float16}),
     ({}, {"layout": "page_first"}), ({}, {"head_num": 4, "head_dim": 4}),
     ({}, {"start_layer": 2, "end_layer": 4})],
)  # fmt: skip
def test_pages_of_other_bytes_under_the_same_hashes_are_misses(
    tmp_path: Path, ranks: dict[str, Any], shape: dict[str, Any]
) -> None:
    """The file backend's keys lack dtype and layout, and give such pages out."""
    keys, settings = chain(PAGES), config(disk(tmp_path))
    storage = opened(settings)
    assert all(storage.batch_set_v1(keys, indices()))
    storage.close()
    other = opened(replace(settings, **ranks), HostPool(**shape))
    assert other.batch_exists(keys) == 0
    assert other.batch_get_v1(keys, indices()) == [False] * PAGES
    other.close()


def test_a_salt_shares_nothing_with_another(tmp_path: Path) -> None:
    storage = opened(config(disk(tmp_path)))
    assert all(storage.batch_set_v1(chain(PAGES, salt="a"), indices()))
    assert storage.batch_exists(chain(PAGES, salt="b")) == 0
    storage.close()


def test_altered_pages_are_misses_and_the_others_are_right(tmp_path: Path) -> None:
    pool, keys = HostPool(), chain(PAGES)
    storage = opened(config(disk(tmp_path)), pool)
    assert all(storage.batch_set_v1(keys, indices()))
    page = bytes(pool.get_data_page(12).view(torch.uint8).tolist())
    (segment,) = [path for path in tmp_path.rglob("*")
                  if path.is_file() and page in path.read_bytes()]  # fmt: skip
    data = bytearray(segment.read_bytes())
    data[data.index(page)] ^= 255
    segment.write_bytes(data)
    assert storage.batch_get_v1(keys, indices()) == [i != 3 for i in range(PAGES)]
    assert storage.batch_exists(keys) == 3
    storage.close()


def test_a_store_that_fails_is_a_miss(tmp_path: Path) -> None:
    storage = opened(config(disk(tmp_path)))
    keys = chain(2)
    assert all(storage.batch_set_v1(keys, indices(2)))
    store = storage._pools["kv"].store
    for name in ("put", "get", "held", "worth_reading", "clear"):
        setattr(store, name, None)
    assert storage.batch_set_v1(keys, indices(2)) == [False, False]
    assert storage.batch_get_v1(keys, indices(2)) == [False, False]
    assert storage.batch_get(keys) == [None, None]
    assert not storage.batch_set(keys, [HostPool().get_data_page(0)] * 2)
    assert (storage.batch_exists(keys), storage.clear()) == (0, False)
    transfer = PoolTransfer(PoolName.KV, indices(2), keys)
    assert storage.batch_get_v2([transfer]) == {PoolName.KV: [False, False]}
    assert storage.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0


@pytest.mark.parametrize("wrong", [indices(3), None])
def test_indices_of_another_number_of_pages_move_nothing(tmp_path: Path, wrong: Any) -> None:
    storage = opened(config(disk(tmp_path)))
    assert storage.batch_set_v1(chain(2), wrong) == [False, False]
    assert storage.batch_exists(chain(2)) == 0


def test_a_full_tier_never_exceeds_its_size_and_keeps_heads_of_chains(tmp_path: Path) -> None:
    storage = opened(config(disk(tmp_path, "40KiB") + ",policy=lru"), HostPool())
    for seed in range(12):
        keys = chain(PAGES, seed=seed)
        for first in (0, 4):
            info = HiCacheStorageExtraInfo(prefix_keys=keys[:first])
            storage.batch_set_v1(keys[first : first + 4], indices(4, first), info)
        stats = storage._pools["kv"].store.stats()
        assert stats["tiers"][0]["used_bytes"] <= 40 * 1024
    assert stats["tiers"][0]["evicted"] > 0
    held = [storage.batch_exists(chain(PAGES, seed=seed)) for seed in range(12)]
    assert sum(held) == stats["pages"], "a page without those before it was kept"


def test_pages_that_are_computed_sooner_are_not_read(tmp_path: Path) -> None:
    keys = chain(PAGES)
    for speed, expected in ((1.0, PAGES), (1e12, 0)):
        storage = opened(config(disk(tmp_path), extra={"prefill_tokens_per_s": speed}))
        assert all(storage.batch_set_v1(keys, indices()))
        assert storage.batch_exists(keys) == expected
        storage.close()


def test_pools_hit_by_their_policies(tmp_path: Path) -> None:
    tiers = {"pools": {"mamba": [disk(tmp_path)], "indexer": [disk(tmp_path)]}}
    mamba, indexer = HostPool(page_size=1, head_num=3), HostPool(head_dim=4)
    storage = opened(config(disk(tmp_path), extra=tiers), mamba=mamba, indexer=indexer)
    keys = chain(PAGES)
    assert all(storage.batch_set_v1(keys, indices()))
    states = PoolTransfer(
        PoolName.MAMBA, torch.tensor([1, 2]), [keys[2], keys[5]], PoolHitPolicy.TRAILING_PAGES
    )
    index = PoolTransfer(PoolName.INDEXER, indices(7), keys[:7])
    groups = PoolTransfer(PoolName.KV, None, None, PoolHitPolicy.BLOCK_GROUPS)
    assert storage.batch_set_v2([states, index]) == {
        PoolName.MAMBA: [True] * 2, PoolName.INDEXER: [True] * 7,
    }  # fmt: skip
    one = replace(states, keys=keys[:1], host_indices=None)
    found = storage.batch_exists_v2(keys, [one, index, groups])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.MAMBA: 6, PoolName.INDEXER: 7}
    before = mamba.kv_buffer.clone()
    mamba.kv_buffer.zero_()
    assert storage.batch_get_v2([states]) == {PoolName.MAMBA: [True, True]}
    assert torch.equal(mamba.kv_buffer[:, :, 1:3], before[:, :, 1:3])
    storage.close()


def test_options_are_honoured_or_refused(tmp_path: Path) -> None:
    good = disk(tmp_path)
    with pytest.raises(ValueError, match="tyers"):
        opened(config(good, extra={"tyers": []}))
    with pytest.raises(ValueError, match="dp-attention"):
        opened(config(good, is_mla_model=True, tp_size=2))
    with pytest.raises(ValueError, match="no tiers for mamba"):
        opened(config(good), mamba=HostPool())
    with pytest.raises(ValueError, match="room for no page"):
        opened(config("host=256"))
    opened(config("host=1MiB", is_mla_model=True)).close()
