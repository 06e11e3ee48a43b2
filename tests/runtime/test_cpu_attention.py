"""The CPU's kernels compute what torch computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoints import make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from torch import Tensor

from pigou.engine.plan import Plan
from pigou.runtime.attention.batch import make_batch
from pigou.runtime.attention.cpu_attention import CPUAttention
from pigou.runtime.attention.kv_cache import KVCache, make_layout
from pigou.runtime.attention.paged_attention import HeadNorm, PagedAttention
from pigou.runtime.models.linear import Linear
from pigou.runtime.models.model_config import LayerAttention, ModelConfig, parse_config
from pigou.runtime.ops import KernelOps, TorchOps
from pigou.runtime.simd import exponential
from pigou.runtime.thread_pool import always_parallel, openmp_entry

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
#: Relative to the largest number: float32 rounds at 6e-8, bfloat16 at 4e-3.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


def close(ours: Tensor, theirs: Tensor) -> bool:
    limit = TOLERANCE[ours.dtype] * float(theirs.abs().max())
    return float((ours.float() - theirs.float()).abs().max()) <= limit


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 896), (40, 17)])
def test_norm_and_gate_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = noise(*shape).to(dtype), noise(*shape, seed=1).to(dtype)
    weight = noise(shape[1], seed=2).to(dtype)
    other = residual.clone()
    assert close(
        KernelOps().add_norm(x, residual, weight, 1e-6), TorchOps().add_norm(x, other, weight, 1e-6)
    )
    assert torch.equal(residual, other)
    both = (4 * noise(shape[0], 2 * shape[1])).to(dtype)
    assert close(KernelOps().gate(both), TorchOps().gate(both))


@settings(max_examples=examples(60))
@given(rows=st.integers(1, 5), width=st.integers(1, 300), seed=st.integers(0, 99))
def test_argmax_is_the_first_largest(rows: int, width: int, seed: int) -> None:
    for dtype in DTYPES:
        x = noise(rows, width, seed=seed).mul(3).round().to(dtype)
        assert KernelOps().argmax(x).tolist() == np.argmax(x.float().numpy(), axis=1).tolist()


def test_exponential_is_exact_to_a_few_units_in_the_last_place() -> None:
    x = np.linspace(-87, 87, 20_001, dtype=np.float32)
    ours = np.array([exponential(value) for value in x])
    assert np.abs(ours / np.exp(x.astype(np.float64)) - 1).max() < 3e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 32, 33, 61, 64])
def test_a_packed_product_equals_the_plain_one(dtype: torch.dtype, rows: int) -> None:
    weight, bias, x = (noise(*s).to(dtype) for s in ((96, 64), (96,), (rows, 64)))
    ours = Linear(weight.clone(), bias)(x)
    assert ours.shape == (rows, 96)
    assert ours.is_contiguous()
    assert close(ours, F.linear(x, weight, bias))


def build(heads: int, kv_heads: int, width: int, family: str = "qwen3") -> ModelConfig:
    return parse_config(
        make_config(family, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"),
    [(2, 2, 16), (4, 2, 32), (6, 2, 64), (4, 1, 48), (14, 2, 64), (8, 1, 128), (12, 1, 16)],
)
@pytest.mark.parametrize("block_size", [16, 32])
def test_attention_is_that_of_torch(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, block_size: int
) -> None:
    compare(build(heads, kv_heads, width), dtype, block_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_on_two_threads_is_that_of_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with always_parallel():
        compare(build(14, 2, 64), dtype, 16)


@pytest.mark.skipif(not openmp_entry(), reason="torch has no OpenMP threads that can be found")
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("rows", [2, 5, 64])
def test_threads_compute_every_row_as_one_does(
    threads: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = noise(rows, 96)
    alone = KernelOps().gate(x), KernelOps().argmax(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with always_parallel():
        together = KernelOps().gate(x), KernelOps().argmax(x)
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


@pytest.mark.parametrize("count", [2, 3, 8, 11])
def test_a_chunk_may_end_with_its_table(count: int) -> None:
    config = build(6, 2, 64, "llama")
    tables = np.arange(2, dtype=np.int32).reshape(1, 2)
    start = np.array([32 - count], dtype=np.int32)
    plan = Plan(
        rows=np.zeros(1, dtype=np.int32),
        starts=start,
        counts=np.array([count], dtype=np.int32),
        kv_lens=start.copy(),
        samples=np.ones(1, dtype=np.bool_),
    )
    batch = make_batch(plan, [np.zeros(count, dtype=np.int32)], CPU)
    qkv = noise(count, 10 * 64, seed=3)
    layout = make_layout(config, model="m", digest="d", dtype=torch.float32, block_size=16)
    results = []
    for kind in (CPUAttention, PagedAttention):
        cache = KVCache(layout, 2, CPU)
        cache.data.copy_(noise(*cache.data.shape, seed=4))
        attention = kind(config, cache, tables, 32)
        attention.begin(batch)
        results.append(attention(0, qkv.clone(), None))
    assert close(*results)


def compare(config: ModelConfig, dtype: torch.dtype, block_size: int) -> None:
    """Both kinds of attention, on decodes beside chunks with and without a past."""
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
    norm = HeadNorm(noise(width).to(dtype), noise(width, seed=1).to(dtype), 1e-6)
    rng = np.random.default_rng(0)
    starts = np.array([0, 15, 16, 40, 9, 0], dtype=np.int32)
    counts = np.array([1, 1, 1, 1, 20, 33], dtype=np.int32)
    tables = rng.permutation(6 * 8).astype(np.int32).reshape(6, 8)
    plan = Plan(
        rows=np.array([3, 1, 5, 0, 2, 4], dtype=np.int32),
        starts=starts,
        counts=counts,
        kv_lens=starts.copy(),
        samples=np.ones(6, dtype=np.bool_),
    )
    batch = make_batch(plan, [np.zeros(n, dtype=np.int32) for n in counts], CPU)
    qkv = noise(int(counts.sum()), (heads + 2 * kv_heads) * width, seed=3).to(dtype)
    layout = make_layout(config, model="m", digest="d", dtype=dtype, block_size=block_size)
    results = []
    for kind in (CPUAttention, PagedAttention):
        cache = KVCache(layout, 48, CPU)
        cache.data.copy_(noise(*cache.data.shape, seed=4))
        attention = kind(config, cache, tables, 128)
        attention.begin(batch)
        results.append((attention(1, qkv.clone(), norm), cache.data))
    assert close(results[0][0], results[1][0])
    assert close(results[0][1], results[1][1])


def test_a_sequence_with_evicted_entries_attends_by_slot() -> None:
    config = build(4, 2, 32, "llama")
    layout = make_layout(config, model="m", digest="d", dtype=torch.float32, block_size=16)
    qkv = noise(1, 8 * 32, seed=3)
    outputs = []
    for kind in (CPUAttention, PagedAttention):
        cache = KVCache(layout, 4, CPU)
        cache.data.copy_(noise(*cache.data.shape, seed=4))
        plan = Plan(
            rows=np.array([0], dtype=np.int32),
            starts=np.array([90], dtype=np.int32),
            counts=np.array([1], dtype=np.int32),
            kv_lens=np.array([20], dtype=np.int32),
            samples=np.ones(1, dtype=np.bool_),
        )
        attention = kind(config, cache, np.array([[2, 1]], dtype=np.int32), 128)
        attention.begin(make_batch(plan, [np.zeros(1, dtype=np.int32)], CPU))
        outputs.append(attention(0, qkv.clone(), None))
        slots = torch.cat((cache.keys(0)[2].mT, cache.keys(0)[1].mT), dim=1)
        assert torch.equal(
            slots[:, 21:], noise(*cache.data.shape, seed=4)[1, 0, 0].view(2, 32, 16).mT[:, 5:]
        )
    assert close(outputs[0], outputs[1])


FORMS = {
    "scale": LayerAttention(4, 2, 32, 0.3),
    "window": LayerAttention(4, 2, 32, 0.2, window=7),
    "wide window": LayerAttention(6, 2, 16, 0.2, window=33),
    "soft cap": LayerAttention(4, 4, 32, 0.5, softcap=2.0),
    "sinks": LayerAttention(6, 2, 32, 0.2, sinks=True),
    "all": LayerAttention(8, 1, 16, 0.4, window=18, softcap=3.0, sinks=True),
}


@pytest.mark.parametrize("kind", [CPUAttention, PagedAttention])
@pytest.mark.parametrize("name", FORMS)
def test_windows_caps_sinks_and_scales_are_the_formula(
    kind: type[PagedAttention], name: str
) -> None:
    form = FORMS[name]
    # The first layer is the widest, so that the second leaves room in its blocks.
    config = replace(build(8, 4, 32), rope=None, attention=(LayerAttention(8, 4, 32, 1.0), form))
    layout = make_layout(config, model="m", digest="d", dtype=torch.float32, block_size=16)
    cache = KVCache(layout, 16, CPU)
    tables = np.random.default_rng(1).permutation(16).astype(np.int32).reshape(4, 4)
    attention = kind(config, cache, tables, 64)
    total = 45
    parts = [noise(4, total, n, form.head_dim, seed=n)
             for n in (form.heads, form.kv_heads + 10, form.kv_heads + 20)]  # fmt: skip
    query, key, value = parts[0], parts[1][:, :, 10:], parts[2][:, :, 20:]
    sinks = noise(form.heads, seed=9) if form.sinks else None
    expected = formula(form, query, key, value, sinks)
    for start, count in ((0, 1), (1, 19), (20, 9), (29, 1), (30, 15)):
        rows = np.array([2, 0, 3], dtype=np.int32)
        starts = np.full(3, start, dtype=np.int32)
        plan = Plan(rows=rows, starts=starts, counts=np.full(3, count, dtype=np.int32),
                    kv_lens=starts.copy(), samples=np.ones(3, dtype=np.bool_))  # fmt: skip
        attention.begin(make_batch(plan, [np.zeros(count, dtype=np.int32)] * 3, CPU))
        own = [part[rows, start : start + count].flatten(0, 1) for part in (query, key, value)]
        out = attention.compute(1, *own, sinks)
        assert close(out, expected[rows, start : start + count].flatten(0, 1))


def formula(
    form: LayerAttention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    """Causal attention of whole sequences (rows, tokens, heads, head_dim), entry by entry."""
    group = form.heads // form.kv_heads
    keys, values = (part.repeat_interleave(group, 2) for part in (key, value))
    scores = torch.einsum("rqhd,rkhd->rhqk", query, keys) * form.scale
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    ahead = torch.arange(query.shape[1])[:, None] - torch.arange(query.shape[1])
    unseen = (ahead < 0) | (ahead >= (form.window or 10**6))
    weights = scores.masked_fill(unseen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("rhqk,rkhd->rqhd", weights / total, values)


def test_a_sink_takes_its_share() -> None:
    form = LayerAttention(1, 1, 16, 1.0, sinks=True)
    key = torch.zeros(1, 2, 1, 16)
    key[0, :, 0, 0] = torch.tensor([1.0, 2.0])
    value = torch.zeros(1, 2, 1, 16)
    value[0, 0, 0, 0] = value[0, 1, 0, 1] = 1.0
    query = torch.zeros(1, 2, 1, 16)
    query[..., 0] = 1.0
    out = formula(form, query, key, value, torch.zeros(1))[0, 1, 0]
    assert out[:2].tolist() == pytest.approx([0.244728, 0.665241], abs=1e-6)
