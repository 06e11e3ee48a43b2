"""Blocks are runs of bytes, and moves move whole blocks."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from checkpoints import make_config

from pigou.kv.block import KVLayout
from pigou.runtime.attention.kv_cache import KVCache, make_layout
from pigou.runtime.models.model_config import parse_config

CPU = torch.device("cpu")


def layout(dtype: torch.dtype = torch.bfloat16) -> KVLayout:
    config = parse_config(make_config("llama"))
    return make_layout(config, model="m", digest="d", dtype=dtype, block_size=16)


def filled(blocks: int = 6, host_blocks: int = 4) -> KVCache:
    cache = KVCache(layout(), blocks, CPU, host_blocks)
    data = np.random.default_rng(0).integers(0, 256, (blocks, cache.layout.block_bytes))
    cache.write(np.arange(blocks, dtype=np.int32), data.astype(np.uint8))
    return cache


def pairs(*moves: tuple[int, int]) -> np.ndarray:
    return np.array(moves, dtype=np.int32).reshape(-1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_is_one_run_of_bytes_over_all_layers(dtype: torch.dtype) -> None:
    cache = KVCache(layout(dtype), 5, CPU)
    view = cache.as_bytes()
    assert view is not None
    assert view.shape == (5, 2 * 2 * 2 * 16 * 16 * dtype.itemsize)
    for layer in range(2):
        cache.keys(layer)[3] = 1.0
        cache.values(layer)[3] = 1.0
    assert (view[3].view(np.uint8) != 0).any()
    assert not view[[0, 1, 2, 4]].any()
    assert torch.equal(cache.data[3], torch.ones_like(cache.data[3]))


def test_bytes_are_a_view_and_read_and_write_copy() -> None:
    cache = filled()
    view = cache.as_bytes()
    assert view is not None
    ids = np.array([4, 1], dtype=np.int32)
    copy = cache.read(ids)
    assert np.array_equal(copy, view[ids])
    cache.write(np.array([0, 2], dtype=np.int32), copy)
    assert np.array_equal(view[[0, 2]], copy)
    copy[:] = 0
    assert view[[0, 2]].any()


def test_a_cache_lives_in_the_memory_it_is_given() -> None:
    size = 3 * layout().block_bytes
    with mmap.mmap(-1, size + 100) as memory:
        cache = KVCache(layout(), 3, CPU, memory=memoryview(memory))
        cache.keys(0)[0] = 2.0
        assert any(memory[: layout().block_bytes])
        with pytest.raises(ValueError, match="it must have"):
            KVCache(layout(), 4, CPU, memory=memoryview(memory))
        del cache


def test_moves_are_made_in_order_out_copy_in() -> None:
    cache = filled()
    view = cache.as_bytes()
    assert view is not None
    before = view.copy()
    cache.move(pairs((1, 0), (2, 3)), pairs((3, 1), (0, 2)), pairs((0, 5), (3, 0)))
    assert np.array_equal(view[5], before[1])
    assert np.array_equal(view[1], before[3])
    assert np.array_equal(view[2], before[0])
    assert np.array_equal(view[0], before[2])
    assert np.array_equal(view[[3, 4]], before[[3, 4]])


def test_layouts_of_other_types_have_other_fingerprints() -> None:
    assert layout().fingerprint() != layout(torch.float32).fingerprint()
