"""CUDA's attention and decode graphs, rehearsed on the CPU: Triton's interpreter, a tape of ops."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pigou.config import EngineConfig
from pigou.engine.plan import Plan
from pigou.request import Ints, SamplingParams
from pigou.runtime.attention import cuda_attention
from pigou.runtime.attention.batch import StepBatch, make_batch
from pigou.runtime.attention.cuda_attention import CUDAAttention
from pigou.runtime.attention.kv_cache import KVCache, make_layout
from pigou.runtime.attention.paged_attention import HeadNorm, PagedAttention
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.decode_graphs import graph_sizes
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.models.model_config import LayerAttention, ModelConfig, parse_config
from pigou.runtime.ops import TorchOps
from pigou_lab.gpu_check.random_model import TINY, random_model

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are imported, which is in a test
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BLOCK, ROWS, TABLE = 16, 4, 6


def both(config: ModelConfig, seed: int) -> tuple[CUDAAttention, PagedAttention]:
    """Our kernels and torch's products, over caches of the same numbers."""
    layout = make_layout(config, model="m", digest="d", dtype=torch.float32, block_size=BLOCK)
    tables = np.random.default_rng(seed).permutation(ROWS * TABLE).astype(np.int32)
    tables = tables.reshape(ROWS, TABLE)
    numbers = torch.randn(KVCache(layout, ROWS * TABLE, DEVICE).data.shape, device=DEVICE)
    made = []
    for kind in (CUDAAttention, PagedAttention):
        cache = KVCache(layout, ROWS * TABLE, DEVICE)
        cache.data.copy_(numbers)
        made.append(kind(config, cache, tables, BLOCK * TABLE))
    return made[0], made[1]  # type: ignore[return-value]


def batch_of(spans: list[tuple[int, int, int]]) -> StepBatch:
    """Entries (row, start, count)."""
    rows, starts, counts = (np.array(column, dtype=np.int32) for column in zip(*spans, strict=True))
    plan = Plan(rows=rows, starts=starts, counts=counts, kv_lens=starts.copy(),
                samples=np.ones(len(rows), dtype=np.bool_))  # fmt: skip
    return make_batch(plan, [np.full(n, 5, dtype=np.int32) for n in counts.tolist()], DEVICE)


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 18)), min_size=1, max_size=3).map(
    lambda parts: [(row, past, count) for row, (past, count) in enumerate(parts)]
)


@given(spans, st.sampled_from(["llama", "qwen3"]), st.integers(0, 99))
@settings(max_examples=examples(6))
def test_kernels_rotate_store_and_attend_as_torch_does(
    entries: list[tuple[int, int, int]], family: str, seed: int
) -> None:
    torch.manual_seed(seed)
    config = parse_config(make_config(family))
    ours, theirs = both(config, seed)
    batch = batch_of(entries)
    width = config.head_dim
    norm = None
    if config.qk_norm:
        norm = HeadNorm(*torch.rand((2, width), device=DEVICE), 1e-6)
    qkv = torch.randn((batch.size, (config.heads + 2 * config.kv_heads) * width), device=DEVICE)
    with torch.inference_mode():
        results = []
        for attention in (ours, theirs):
            attention.begin(batch)
            results.append(attention(1, qkv.clone(), norm))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.cache.data, theirs.cache.data, rtol=1e-5, atol=1e-5)


@given(spans, st.sampled_from([0, 1, 7, 20]), st.sampled_from([0.0, 5.0]), st.booleans(),
       st.sampled_from([(4, 2, 24), (6, 2, 16), (3, 3, 40)]))  # fmt: skip
@settings(max_examples=examples(8))
def test_windows_soft_caps_sinks_and_odd_heads_are_those_of_torch(
    entries: list[tuple[int, int, int]], window: int, softcap: float, sinks: bool,
    shape: tuple[int, int, int],
) -> None:  # fmt: skip
    torch.manual_seed(window)
    heads, kv_heads, width = shape
    form = LayerAttention(heads, kv_heads, width, 0.3, window, softcap, sinks)
    plain = replace(parse_config(make_config("llama")), heads=heads, kv_heads=kv_heads,
                    head_dim=width, rope=None)  # fmt: skip
    config = replace(plain, attention=(form,) * plain.layers)
    ours, theirs = both(config, 3)
    batch = batch_of(entries)
    query = torch.randn((batch.size, heads, width), device=DEVICE)
    key, value = torch.randn((2, batch.size, kv_heads, width), device=DEVICE)
    sink = torch.randn(heads, device=DEVICE) if sinks else None
    with torch.inference_mode():
        results = []
        for attention in (ours, theirs):
            attention.begin(batch)
            results.append(attention.compute(1, query, key, value, sink))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.cache.data, theirs.cache.data)


def test_captured_sizes_hold_every_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 32, 40]


# --- graphs --------------------------------------------------------------------------------------


class Replays:
    count = 0


class Tape(TorchDispatchMode):
    """A graph off the GPU: replays the operations that it saw, on the same tensors.

    Numbers of the host are as they were at the capture, as in a CUDA graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {leaf.untyped_storage().data_ptr()
                 for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}  # fmt: skip
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        fresh = [leaf for leaf in leaves if leaf.untyped_storage().data_ptr() not in given]
        mutates = any(argument.alias_info and argument.alias_info.is_write
                      for argument in func._schema.arguments)  # fmt: skip

        def again() -> None:
            made = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(leaves, made, strict=True):
                if any(old is leaf for leaf in fresh):
                    old.copy_(new)

        if (fresh or mutates) and "empty" not in str(func):
            self.calls.append(again)
        return out

    def launch(self, kernel: Any, grid: Any, args: Any, kwargs: Any) -> None:
        self.calls.append(lambda: kernel[grid](*args, **kwargs))

    def replay(self) -> None:
        Replays.count += 1
        for call in self.calls:
            call()

    def pool(self) -> None:
        return None


class Launches:
    """Kernels that note their launches on the tape that is being recorded."""

    tape: Tape | None = None

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._module, name)

        class Grid:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                def launch(*args: Any, **kwargs: Any) -> None:
                    if Launches.tape is not None:
                        Launches.tape.launch(kernel, grid, args, kwargs)
                    with _disable_current_modes():  # the interpreter copies by torch
                        kernel[grid](*args, **kwargs)

                return launch

        return Grid()


@contextmanager
def recording(graph: Tape, pool: Any = None) -> Iterator[None]:
    Launches.tape = graph
    with graph:
        yield
    Launches.tape = None


class Traced(CUDAAttention):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kernels = Launches(self._kernels)


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on the CPU take CUDA's attention and decode graphs."""

    def attention(self: LoadedModel, cache: KVCache, tables: Ints, length: int) -> PagedAttention:
        return Traced(self.decoder.config, cache, tables, length)

    monkeypatch.setattr(cuda_attention, "_PROGRAMS", 8)  # each takes a millisecond here
    monkeypatch.setattr(LoadedModel, "attention", attention)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


#: The interpreter takes a millisecond for a head of a token.
SMALL = TINY | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS = [[3 + i, 7, 11 * i + 5] * length for i, length in enumerate((4, 1, 2))]
CONFIG = EngineConfig(blocks=16, max_model_len=64, max_seqs=4, max_batched_tokens=16)


def generate(model: LoadedModel, **sampling: Any) -> list[list[int]]:
    params = [SamplingParams(max_tokens=3 + i, ignore_eos=True, **sampling) for i in range(3)]
    engine = LocalEngine(model, CONFIG)
    outputs = [engine.add(p, q) for p, q in zip(PROMPTS, params, strict=True)]
    while any(output.reason is None for output in outputs):
        engine.step()
    return [output.tokens for output in outputs]


@pytest.mark.skipif(ON_GPU, reason="the rehearsal is for machines without a GPU")
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}])
def test_replayed_steps_give_the_tokens_of_the_cpu(
    sampling: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pigou_lab.gpu_check.random_model.KernelOps", TorchOps)
    model = random_model(SMALL, "cpu", torch.float32)
    expected = generate(model, **sampling)
    request.getfixturevalue("rehearsal")
    assert generate(model, **sampling) == expected
    assert Replays.count > 0


# --- compiling -----------------------------------------------------------------------------------

_STRIDES = ("block_stride", "key_offset", "value_offset", "q_stride", "k_stride", "v_stride")
_INTS = ("tables", "tiles", "slots", "positions")
_FLOATS = ("turns", "sinks", "parts")


def compiled(capability: int, kernels: list[tuple[str, dict[str, int]]]) -> list[int]:
    """Bytes of kernels' machine code for a GPU, on bfloat16."""
    script = f"""
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from pigou.runtime.attention import triton_kernels
for kernel_name, constants in {kernels!r}:
    kernel = getattr(triton_kernels, kernel_name)
    kinds = dict.fromkeys({_STRIDES!r}, "i64") | dict.fromkeys({_INTS!r}, "*i32")
    kinds |= dict.fromkeys({_FLOATS!r}, "*fp32") | dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(("table_stride", "window"), "i32")
    kinds |= dict.fromkeys(("scale", "softcap", "eps"), "fp32")
    names = kernel.arg_names
    source = ASTSource(kernel, {{name: kinds.get(name, "*bf16") for name in names}},
                       {{(names.index(name),): value for name, value in constants.items()}})
    made = compile(source, target=GPUTarget("cuda", {capability}, 32))
    print(len(made.asm["cubin"]))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return [int(line) for line in done.stdout.split()]


SHAPE = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "BS": 16}
DECODE = SHAPE | {"GP": 16, "DP": 128, "BQ": 1, "N": 64, "SPLITS": 8, "SINKS": 1, "EXACT": 0}


KERNELS = [
    ("store_rotated", SHAPE | {"HP": 64, "NORM": 1, "ROTATE": 1}),
    ("store_rotated", SHAPE | {"HP": 64, "NORM": 0, "ROTATE": 0}),
    ("paged_attention", DECODE),
    ("combine", {"HEADS": 32, "D": 128, "DP": 128, "SPLITS": 8}),
]
PREFILL = [("paged_attention", DECODE | {"GP": 4, "BQ": 16, "SPLITS": 1, "SINKS": 0})]


@pytest.mark.parametrize(("capability", "kernels"), [
    (90, KERNELS),
    pytest.param(90, PREFILL, marks=pytest.mark.slow),
    pytest.param(80, KERNELS + PREFILL, marks=pytest.mark.slow),
])  # fmt: skip
def test_kernels_compile_for_gpus_that_are_not_here(
    capability: int, kernels: list[tuple[str, dict[str, int]]]
) -> None:
    sizes = compiled(capability, kernels)
    assert len(sizes) == len(kernels)
    assert min(sizes) > 0
