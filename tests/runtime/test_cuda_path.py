"""What would run on CUDA, as far as it can be tested without: devices, waits, and queues.

The device "meta" has tensors without numbers: nothing can be read from it, as reading from CUDA
makes the host wait. A dispatch mode refuses operations that mix it with the CPU, except copies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, VOCAB, make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pigou.config import EngineConfig
from pigou.engine.plan import Plan
from pigou.request import SamplingParams
from pigou.runtime import tensor_io as upload_module
from pigou.runtime.attention.batch import make_batch
from pigou.runtime.attention.kv_cache import KVCache, make_layout, queue_moves
from pigou.runtime.attention.paged_attention import PagedAttention
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.decoder import Decoder, load_decoder
from pigou.runtime.models.load import LoadedModel, load
from pigou.runtime.models.model_config import ModelConfig, parse_config
from pigou.runtime.models.weights import WeightSource
from pigou.runtime.ops import TorchOps
from pigou.runtime.resources import kv_room
from pigou.runtime.sampling import Sampler
from pigou.runtime.sequence import make_sequence
from pigou.runtime.tensor_io import DeviceCopies
from pigou_lab.gpu_check.profile import waits_per_step
from pigou_lab.gpu_check.random_model import TINY, random_model

DEVICE = torch.device("meta")
RANDOM = random_model(TINY, "cpu", torch.float32)


class AnyWeights(WeightSource):
    """Weights of whatever shape is asked for, on a device that need not be there."""

    def __contains__(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of the device and of the CPU, except copies."""

    COPIES = ("aten._to_copy", "aten.copy_")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        if len(devices) > 1 and not str(func).startswith(self.COPIES):
            raise AssertionError(f"{func} mixes {sorted(devices)}")
        return func(*args, **(kwargs or {}))


def plan_of(spans: list[tuple[int, int, int]]) -> Plan:
    """Entries (row, start, count)."""
    rows, starts, counts = (np.array(column, dtype=np.int32) for column in zip(*spans, strict=True))
    return Plan(rows=rows, starts=starts, counts=counts, kv_lens=starts.copy(),
                samples=np.ones(len(rows), dtype=np.bool_))  # fmt: skip


def parts(family: str, device: torch.device) -> tuple[ModelConfig, Decoder, PagedAttention]:
    config = replace(parse_config(make_config(family)), tied=True)
    weights = AnyWeights(torch.bfloat16, device)
    decoder = load_decoder(replace(config, tied=False), weights, TorchOps())
    layout = make_layout(config, model="m", digest="d", dtype=torch.bfloat16, block_size=16)
    shape = (32, layout.layers, 2, layout.kv_heads, layout.head_dim * 16)
    cache = object.__new__(KVCache)
    cache.layout = layout
    cache.dtype, cache.quantised = torch.bfloat16, False
    cache.data = torch.empty(shape, dtype=torch.bfloat16, device=device)
    tables = np.arange(32, dtype=np.int32).reshape(4, 8)
    return config, decoder, PagedAttention(config, cache, tables, 128)


def step(family: str, params: list[SamplingParams]) -> None:
    """One mixed step on the fake device: three decodes, a first chunk, a later chunk."""
    config, decoder, attention = parts(family, DEVICE)
    plan = plan_of([(0, 20, 1), (1, 0, 9), (2, 40, 1), (3, 16, 12)])
    ids = [np.full(n, 5, dtype=np.int32) for n in plan.counts.tolist()]
    batch = make_batch(plan, ids, DEVICE)
    attention.begin(batch)
    wanted = upload_module.upload(batch.last[batch.entries], DEVICE)
    hidden = decoder.hidden(batch.tokens, attention, wanted)
    logits = decoder.logits(hidden)
    assert logits.device == DEVICE
    assert logits.shape == (4, config.vocab)
    sequences = [
        make_sequence(
            str(i), [3] * 40, p, seed=b"", resume=2, end_tokens=frozenset({2}), block_size=16
        )
        for i, p in enumerate(params)
    ]
    tokens, _ = Sampler(sequences, TorchOps(), DEVICE)(logits)
    assert tokens.device == DEVICE
    batch.advance(tokens[:1].to(batch.tokens.dtype))
    assert batch.tokens.device == DEVICE


GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
MIXES = {
    "greedy": [GREEDY] * 4,
    "random": [SamplingParams(max_tokens=8, temperature=0.7, seed=i) for i in range(4)],
    "top-k": [SamplingParams(max_tokens=8, temperature=1.0, top_k=5, min_p=0.1), GREEDY] * 2,
    "penalties": [
        SamplingParams(max_tokens=8, temperature=0.0, frequency_penalty=0.5, min_tokens=4),
        SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.2, logit_bias={3: 1.0}),
    ]
    * 2,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mix", MIXES)
def test_a_step_on_cuda_mixes_no_devices_and_never_waits(family: str, mix: str) -> None:
    with OneDevice(), torch.inference_mode():
        step(family, MIXES[mix])


def test_a_read_and_a_mix_of_devices_are_refused() -> None:
    """The test above can fail."""
    x = torch.empty(3, device=DEVICE)
    with OneDevice():
        with pytest.raises((RuntimeError, NotImplementedError)):
            x.max().item()
        with pytest.raises((RuntimeError, NotImplementedError)):
            x.nonzero()
        with pytest.raises((AssertionError, RuntimeError)):
            x + torch.empty(3)
        with pytest.raises(AssertionError):
            x[torch.tensor([0, 1])]


def test_a_nucleus_asks_the_device_one_question() -> None:
    """Whether the 512 best tokens are enough: to sort all would take longer than to ask."""
    params = [SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9)] * 4
    with OneDevice(), torch.inference_mode(), pytest.raises((RuntimeError, NotImplementedError)):
        step("llama", params)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.WAITS):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_general_path_reads_nothing_within_a_step(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("qwen3")
    cache = model.cache(32, 16)
    tables = np.arange(32, dtype=np.int32).reshape(4, 8)
    attention = PagedAttention(model.config, cache, tables, 128)
    plan = plan_of([(0, 0, 9), (1, 3, 1)])
    batch = make_batch(plan, [np.full(9, 5, np.int32), np.full(1, 6, np.int32)], model.device)
    with torch.inference_mode(), Reads() as reads:
        attention.begin(batch)
        logits = model.decoder.logits(model.decoder.hidden(batch.tokens, attention, None))
    assert reads.names == []
    assert logits.shape == (10, VOCAB)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.9]),
    st.sets(st.integers(0, 319), max_size=60),
)
@settings(max_examples=examples(12), deadline=None)
def test_a_step_queued_before_its_predecessor_is_read_changes_no_token(
    spans: list[tuple[int, int]], temperature: float, ends: set[int]
) -> None:
    outputs = []
    for ahead in (False, True):
        engine = LocalEngine(RANDOM, EngineConfig(blocks=32, max_model_len=64, max_seqs=4))
        engine.executor.steps_ahead = ahead
        made = []
        for i, (prompt, count) in enumerate(spans):
            params = SamplingParams(max_tokens=count, temperature=temperature, seed=i,
                                    stop_token_ids=tuple(ends), ignore_eos=True)  # fmt: skip
            made.append(engine.add([3 + i] * prompt, params))
        while any(output.reason is None for output in made):
            engine.step()
        engine.core.check_integrity()
        outputs.append([(output.tokens, output.reason) for output in made])
    assert outputs[0] == outputs[1]


# --- copies ------------------------------------------------------------------------------------


class FakeCUDA:
    """Streams and events that note their order, and do at once what is queued."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def Stream(self, device: torch.device) -> FakeCUDA:
        return self

    def default_stream(self, device: torch.device) -> str:
        return "compute"

    def wait_stream(self, other: str) -> None:
        self.notes.append(f"wait for {other}")

    @contextmanager
    def stream(self, other: FakeCUDA) -> Any:
        self.notes.append("begin")
        yield
        self.notes.append("end")

    def record_event(self) -> FakeCUDA:
        self.notes.append("record")
        return self

    def synchronize(self) -> None:
        self.notes.append("synchronize")


ORDER = ["wait for compute", "begin", "record", "end", "synchronize"]


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True), seed=st.integers(0, 9)
)
@settings(max_examples=examples(50))
def test_copies_wait_for_the_steps_before_and_are_done_when_they_return(
    ids: list[int], seed: int
) -> None:
    raw = torch.randint(0, 256, (10, 32), dtype=torch.uint8)
    before, cuda = raw.clone(), FakeCUDA()
    copies = DeviceCopies(raw, cuda)
    assert np.array_equal(copies.read(np.array(ids, dtype=np.int32)), before[ids].numpy())
    assert cuda.notes == ORDER
    cuda.notes.clear()
    data = np.random.default_rng(seed).integers(0, 256, (len(ids), 32), dtype=np.uint8)
    copies.write(np.array(ids, dtype=np.int32), data)
    assert cuda.notes == ORDER
    assert np.array_equal(raw[ids].numpy(), data)
    others = [i for i in range(10) if i not in ids]
    assert torch.equal(raw[others], before[others])


def test_swaps_on_cuda_queue_whole_blocks_without_an_index_or_a_wait() -> None:
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    pairs = np.array([[0, 1], [2, 0]], dtype=np.int32)
    none = np.empty((0, 2), dtype=np.int32)
    raw = torch.arange(256, dtype=torch.uint8).view(4, 64)
    before, host = raw.clone(), torch.zeros((4, 64), dtype=torch.uint8)
    with Names():
        queue_moves(raw, host, pairs, none, pairs)
    assert torch.equal(host[1], before[0])
    assert torch.equal(host[0], before[2])
    assert torch.equal(raw[1], before[2]), "host block 0 came back to 1"
    copies = [name for name in names if "copy_" in name]
    assert len(copies) == 4
    assert not [name for name in names if "index" in name or "_to_copy" in name]


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("free_gib", [2, 8, 80])
def test_kv_blocks_leave_room_for_a_full_step(free_gib: int) -> None:
    config = parse_config({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
                           "num_hidden_layers": 28, "num_attention_heads": 16,
                           "num_key_value_heads": 8, "intermediate_size": 3072})  # fmt: skip
    free = free_gib << 30
    room = kv_room(free, config, 2, 256, 2048)
    gathered = 3 * room / config.layers
    assert kv_room(free, config, 2, 256, 2048, gathers=False) >= room
    logits = 256 * config.vocab * 18
    assert 0 <= room < free
    assert room + gathered + logits < free or room == 0
    assert kv_room(free, config, 2, 64, 2048) > room


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.mark.gpu
def test_blocks_come_back_from_a_gpu_as_they_went(gpu: str) -> None:
    model = random_model(TINY, gpu, torch.bfloat16)
    cache = model.cache(8, 16, host_blocks=4)
    data = np.random.default_rng(0).integers(0, 256, (3, cache.layout.block_bytes), dtype=np.uint8)
    ids = np.array([5, 0, 7], dtype=np.int32)
    cache.write(ids, data)
    assert np.array_equal(cache.read(ids), data)
    none = np.empty((0, 2), dtype=np.int32)
    out, back = np.array([[5, 1], [7, 3]]), np.array([[3, 2], [1, 4]])
    cache.move(out.astype(np.int32), none, back.astype(np.int32))
    assert np.array_equal(cache.read(np.array([4, 2], dtype=np.int32)), data[[0, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES)
def test_a_gpu_chooses_the_tokens_of_the_cpu_whatever_the_sampling(gpu: str, mix: str) -> None:
    outputs = []
    for device in ("cpu", gpu):
        model = random_model(TINY, device, torch.float32)
        engine = LocalEngine(model, EngineConfig(blocks=64, max_model_len=128))
        prompts = [[3 + i, 7, 11 * i + 5] * 9 for i in range(4)]
        outputs.append([o.tokens for o in engine.generate(prompts, MIXES[mix])])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("eager", [False, True])
def test_a_gpu_chooses_the_tokens_of_the_cpu_for_every_family(
    gpu: str, family: str, eager: bool, loaded: Callable[[str], LoadedModel]
) -> None:
    on_cpu = loaded(family)
    config = EngineConfig(blocks=64, max_model_len=128, max_batched_tokens=32)
    outputs = []
    for model in (on_cpu, load(on_cpu.folder, "fp32", gpu)):
        engine = LocalEngine(model, config, enforce_eager=eager)
        prompts = [[3 + i, 7, 11 * i + 5] * 9 for i in range(4)]
        outputs.append([o.tokens for o in engine.generate(prompts, GREEDY)])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_a_greedy_step_waits_for_its_token_alone(gpu: str) -> None:
    assert waits_per_step(random_model(TINY, gpu, torch.bfloat16), 8) <= 1
