"""KV caches in int8 per token and head, and in FP8: attention, moves and identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.checkpoints import make_config
from tests.runtime.reference import make_prompts

from pigou.config import EngineConfig
from pigou.engine.plan import Rates
from pigou.request import SamplingParams
from pigou.runtime.attention import kv_cache
from pigou.runtime.attention.cpu_attention import CPUAttention
from pigou.runtime.attention.kv_cache import KVCache, make_layout
from pigou.runtime.attention.paged_attention import PagedAttention
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.models.model_config import parse_config
from pigou.runtime.simd import fast, narrow, widen
from pigou.runtime.token_eviction.entry_stats import CPUEntryStats, EntryStats

CPU = torch.device("cpu")
FORMATS = ("int8_per_token_head", "fp8_e4m3")
#: e4m3 roundings, ties to even; more than 448 saturates.
ROUNDED = {0.3: 0.3125, 1.1: 1.125, 17.0: 16.0, 0.001: 0.001953125, 240.0: 240.0, -3.3: -3.25,
           500.0: 448.0, -1e9: -448.0, 0.0: 0.0}  # fmt: skip


@fast
def convert(numbers: np.ndarray, stored: np.ndarray, back: np.ndarray) -> None:
    for i in range(len(numbers)):
        stored[i] = narrow(numbers[i], stored)
        back[i] = widen(stored[i])


def converted(numbers: np.ndarray, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    stored, back = np.empty(len(numbers), dtype), np.empty(len(numbers), np.float32)
    convert(numbers.astype(np.float32), stored, back)
    return stored, back


def test_e4m3_has_the_known_roundings() -> None:
    _, back = converted(np.array(list(ROUNDED)), np.uint8)
    assert back.tolist() == list(ROUNDED.values())


@given(st.lists(st.floats(-600, 600, width=32), min_size=1))
def test_e4m3_codes_are_torch_s(numbers: list[float]) -> None:
    codes, back = converted(np.array(numbers), np.uint8)
    wanted = torch.tensor(numbers).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(codes, wanted.view(torch.uint8).numpy())
    assert np.array_equal(back, wanted.float().numpy())


@given(st.lists(st.floats(-200, 200, width=32), min_size=1))
def test_int8_codes_are_torch_s(numbers: list[float]) -> None:
    codes, _ = converted(np.array(numbers), np.int8)
    assert np.array_equal(codes, torch.tensor(numbers).round().clamp(-127, 127).numpy())


def cache_of(kv_dtype: str, blocks: int = 8, host: int = 0) -> KVCache:
    config = parse_config(make_config("qwen3"))
    layout = make_layout(
        config, model="m", digest="d", dtype=torch.float32, block_size=16, kv_dtype=kv_dtype
    )
    return KVCache(layout, blocks, CPU, host, dtype=torch.float32)


@pytest.mark.parametrize(("kv_dtype", "low", "high"), [
    ("int8_per_token_head", 0.006, 0.0072), ("fp8_e4m3", 0.025, 0.028),
])  # fmt: skip
def test_gaussian_keys_and_values_round_trip_with_the_known_error(
    kv_dtype: str, low: float, high: float
) -> None:
    cache = cache_of(kv_dtype)
    numbers = torch.randn(4000, 2, 128, generator=torch.Generator().manual_seed(0))
    codes, scales = cache.encode(numbers)
    back = cache.decode(codes, None if scales is None else scales.unsqueeze(-1))
    assert low < float((back - numbers).norm() / numbers.norm()) < high


def test_block_bytes_count_numbers_and_scales() -> None:
    sizes = {d: cache_of(d).layout.block_bytes for d in ("fp32", "bf16", *FORMATS)}
    numbers = 2 * 2 * 2 * 16  # keys and values, layers, heads, tokens
    assert sizes == {
        "fp32": numbers * 32 * 4, "bf16": numbers * 32 * 2, "fp8_e4m3": numbers * 32,
        "int8_per_token_head": numbers * (32 + 2),
    }  # fmt: skip


def test_formats_have_fingerprints_of_their_own() -> None:
    prints = {cache_of(d).layout.fingerprint() for d in ("fp32", "bf16", *FORMATS)}
    assert len(prints) == 4


def tokens_of(model: LoadedModel, **limits: int) -> list[list[int]]:
    config = EngineConfig(**{"blocks": 100, "max_model_len": 128, "max_seqs": 16, **limits})
    engine = LocalEngine(model, config)
    if config.host_blocks:
        engine.core.rates = Rates(prefill=1.0, swap=1e12, block_bytes=1)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(make_prompts(12, model.config.vocab, 40), params)
    engine.core.check_integrity()
    assert any(output.preemptions for output in outputs) == (config.blocks < 100)
    assert bool(engine.core.stats.swaps) == bool(config.host_blocks)
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("kv_dtype", [*FORMATS, pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_tokens_depend_on_no_path_of_the_engine(
    family: str, kv_dtype: str, loaded: Callable[[str], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Chunks, batches, repeats, recomputation, swapping and torch's path give the same tokens."""
    model = replace(loaded(family), kv_dtype=kv_dtype)
    wanted = tokens_of(model)
    assert tokens_of(model, max_batched_tokens=9) == wanted
    assert tokens_of(model, max_seqs=1, max_repeat=4) == wanted
    assert tokens_of(model, blocks=14) == wanted
    assert tokens_of(model, blocks=14, host_blocks=64) == wanted
    monkeypatch.setattr(CPUAttention, "supports", staticmethod(lambda *_: False))
    assert tokens_of(model) == wanted


@given(st.permutations(range(6)), st.sampled_from(FORMATS))
def test_scales_move_with_their_blocks(order: list[int], kv_dtype: str) -> None:
    """Copies, swaps, and reads and writes of bytes keep every key and value."""
    cache = cache_of(kv_dtype, host=6)
    cache._raw.copy_(torch.randint(0, 256, cache._raw.shape, dtype=torch.uint8))
    if kv_dtype == "int8_per_token_head":
        cache.scales(cache.data).uniform_(0.1, 1.0)
    before = [whole(cache, block) for block in range(8)]
    none = np.empty((0, 2), dtype=np.int32)
    pairs = np.array([(block, at) for at, block in enumerate(order)], dtype=np.int32)
    cache.move(pairs, np.array([[7, order[0]]], dtype=np.int32), none)
    cache.move(none, none, pairs[1:, ::-1])
    assert torch.equal(whole(cache, order[0]), before[7])
    assert all(torch.equal(whole(cache, block), before[block]) for block in order[1:])
    other = cache_of(kv_dtype)
    other.write(np.array([2, 5]), cache.read(np.array([7, order[1]])))
    assert torch.equal(whole(other, 2), before[7])
    assert torch.equal(whole(other, 5), before[order[1]])


@given(st.integers(0, 2**31), st.sampled_from(FORMATS))
def test_compaction_moves_entries_with_their_scales(seed: int, kv_dtype: str) -> None:
    """By kernel and by torch; every head moves its own entries, others stay."""
    rng, cache = np.random.default_rng(seed), cache_of(kv_dtype)
    cache._raw.copy_(torch.from_numpy(rng.integers(0, 127, cache._raw.shape).astype(np.uint8)))
    other = cache_of(kv_dtype)
    other._raw.copy_(cache._raw)
    before = [whole(cache, block) for block in range(8)]
    table, heads = rng.permutation(8).astype(np.int32)[:3], 4
    sides = rng.permuted(np.tile(np.arange(48, dtype=np.int32), (heads, 1)), axis=1)
    moves = np.ascontiguousarray(sides[:, :10].reshape(heads, 5, 2))  # sources and targets differ
    counts = rng.integers(0, 6, heads).astype(np.int32)
    CPUEntryStats(cache.layout, 1, 8, CPU).fill(cache, table, moves, counts)
    EntryStats(cache.layout, 1, 8, CPU).fill(other, table, moves, counts)
    assert torch.equal(cache._raw, other._raw)
    for head in range(heads):
        for source, target in moves[head, : counts[head]].tolist():
            for axis in range(2):
                now = whole(cache, table[target // 16])[axis, head // 2, head % 2, target % 16]
                was = before[table[source // 16]][axis, head // 2, head % 2, source % 16]
                assert torch.equal(now, was)


def whole(cache: KVCache, block: int) -> torch.Tensor:
    """Decoded keys and values of a block, (2, layers, kv_heads, block size, head_dim)."""
    some = cache.data[block : block + 1]
    keys, values = cache.split(some)
    scales = cache.scales(some)
    units = scales.unsqueeze(-1).unbind(2) if len(scales) else (None, None)
    first, second = cache.decode(keys.mT, units[0]), cache.decode(values, units[1])
    return torch.nan_to_num(torch.cat((first, second)))


def test_a_cache_of_heads_that_differ_by_layer_is_refused() -> None:
    config = parse_config(make_config("qwen3"))
    form = config.layer_attention(0)
    mixed = replace(config, attention=(form, replace(form, head_dim=16)))
    cache = cache_of("int8_per_token_head")
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        PagedAttention(mixed, cache, np.zeros((1, 1), dtype=np.int32), 16)
    assert kv_cache.FORMATS.keys() >= set(FORMATS)
