"""Loads a model and builds its executor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pigou.config import ConfigError, EplbConfig, EvictionConfig
from pigou.engine.plan import Plan, Started
from pigou.kv.block import KVLayout
from pigou.models import ModelError
from pigou.models.gguf_folder import find_gguf, gguf_folder
from pigou.models.hf_config import HfConfig
from pigou.models.hf_config import read_config as read_source
from pigou.models.read import choose_implementation
from pigou.models.weight_files import digest_model, find_model
from pigou.request import Ints, SamplingParams
from pigou.runtime.attention.cpu_attention import CPUAttention
from pigou.runtime.attention.cuda_attention import CUDAAttention
from pigou.runtime.attention.kv_cache import DTYPES, KVCache, make_layout
from pigou.runtime.attention.paged_attention import PagedAttention
from pigou.runtime.executor import TorchExecutor
from pigou.runtime.lora import LoRABank
from pigou.runtime.models.decode_graphs import DecodeGraphs
from pigou.runtime.models.decoder import DecoderModel, load_decoder
from pigou.runtime.models.expert_parallel import expert_loads
from pigou.runtime.models.gguf_file import GGUFWeights
from pigou.runtime.models.model_config import ModelConfig, read_config
from pigou.runtime.models.weights import Weights
from pigou.runtime.ops import KernelOps, TorchOps
from pigou.runtime.parallel import Group, Shard, share
from pigou.runtime.resources import keep_memory
from pigou.runtime.structured_output import read_grammars
from pigou.runtime.thread_pool import always_parallel
from pigou.runtime.token_eviction.evictor import Evictor
from pigou.runtime.token_eviction.policy import EvictionContext
from pigou.runtime.token_eviction.policy import load as load_policy

#: Tokens of the warm-up sequence.
WARM_UP_TOKENS = 4
_REQUEST = "warm-up"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory."""

    name: str
    folder: Path
    digest: str
    config: ModelConfig
    decoder: DecoderModel
    dtype: torch.dtype
    device: torch.device
    shard: Shard | None = None  # this rank's part of `config`; None for all
    kv_dtype: str = "auto"  # format of keys and values, `dtype` if auto

    def layout(self, block_size: int) -> KVLayout:
        """Describe this model's KV blocks of `block_size` tokens."""
        shared = self.shard is None or self.device.type == "cpu"
        return make_layout(
            self.config if shared else self.decoder.config, model=self.name, digest=self.digest,
            dtype=self.dtype, block_size=block_size, kv_dtype=self.kv_dtype,
        )  # fmt: skip

    def cache(
        self, blocks: int, block_size: int, host_blocks: int = 0, memory: memoryview | None = None
    ) -> KVCache:
        """Allocate an empty KV cache, optionally over `memory` (see `KVCache`)."""
        on_cpu = self.device.type == "cpu"
        heads = self.shard.kv_heads if self.shard is not None and on_cpu else None
        layout = self.layout(block_size)
        return KVCache(layout, blocks, self.device, host_blocks, memory, heads, self.dtype)

    def attention(self, cache: KVCache, tables: Ints, max_model_len: int) -> PagedAttention:
        """Build the attention of this rank's heads."""
        config = self.decoder.config.within(max_model_len)
        kinds: tuple[type[CPUAttention | CUDAAttention], ...] = (CPUAttention, CUDAAttention)
        fast = (kind for kind in kinds if kind.supports(config, cache))
        return next(fast, PagedAttention)(config, cache, tables, max_model_len)

    def executor(
        self, cache: KVCache, tables: Ints, max_model_len: int,
        eviction: EvictionConfig | None = None, lora: LoRABank | None = None,
        enforce_eager: bool = False,
    ) -> TorchExecutor:  # fmt: skip
        """Build an executor over an empty cache; raises ModelError or ConfigError.

        On CUDA decode steps are graphs unless `enforce_eager`, or a step's work depends on more
        than its tokens: adapters, token eviction, other ranks.
        """
        if max_model_len > self.config.context:
            raise ModelError(
                f"max_model_len is {max_model_len}, but {self.name} has a context of "
                f"{self.config.context} tokens; lower max_model_len"
            )
        if self.shard is not None and (eviction is not None or lora is not None):
            raise ModelError(
                "tensor_parallel_size is above 1, with token eviction or adapters, which one "
                "process alone can do; leave one of them out"
            )
        attention = self.attention(cache, tables, max_model_len)
        evictor = None
        if eviction is not None:
            turns = self.decoder.rotary_table(attention)
            setting = EvictionContext(eviction, self.config, self.folder, turns)
            policy = load_policy(eviction.policy, setting)
            evictor = Evictor(policy, eviction, cache, tables, self.config.group)
        model, graphs = self.decoder, None
        fixed = evictor is None and lora is None and self.shard is None
        fixed &= self.decoder.loads is None or not self.decoder.loads.needs_host
        if isinstance(attention, CUDAAttention) and fixed and not enforce_eager:
            model = graphs = DecodeGraphs(self.decoder, attention, len(tables))
        grammars = partial(read_grammars, self.folder, self.config.vocab, self.config.eos)
        executor = TorchExecutor(
            model=model, cache=cache, tables=tables, attention=attention, grammars=grammars,
            end_tokens=self.config.eos, evictor=evictor, lora=lora,
        )  # fmt: skip
        if self.shard is not None:  # ranks step together
            executor.steps_ahead = False
        if max_model_len >= WARM_UP_TOKENS:
            warm_up(executor)
            if graphs is not None:
                graphs.capture()
        return executor


def load(
    model: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    group: Group | None = None,
    quantization: str = "auto",
    expert_parallel: EplbConfig | None = None,
    kv_dtype: str = "auto",
    implementation: str = "auto",
) -> LoadedModel:
    """Load a model from a Hugging Face folder or hub id; raises ModelError if that fails.

    With a group, its ranks share the model by tensor parallelism, and this one loads its part.
    `quantization` as in `WeightSource`, `kv_dtype` is auto or one of `FORMATS`. Experts are shared
    whole, if `expert_parallel`. The `implementation` is pigou, transformers, or auto: pigou where
    it knows the family.
    """
    gguf = find_gguf(model)
    folder = find_model(model) if gguf is None else gguf_folder(gguf)
    if gguf is not None and group is not None:
        raise ModelError(f"{gguf}: ranks share safetensors alone; give tensor_parallel_size 1")
    described = None
    if _implementation(folder, implementation) == "transformers":
        if group is not None:
            raise ModelError(f"{folder}: ranks share models of the pigou implementation alone")
        from pigou.runtime.models import transformers_decoder as theirs

        described = theirs.read_causal_model(folder)
    config = read_config(folder) if described is None else described.config
    chosen, torch_device = _dtype(dtype, config), _device(device)
    ops = KernelOps() if torch_device.type == "cpu" else TorchOps()
    shard = None if group is None else Shard(config, group.rank, group.size)
    make_loads = expert_loads(config, group, expert_parallel)
    if described is not None:
        with torch.inference_mode(), Weights(folder, chosen, torch_device, quantization) as weights:
            decoder: DecoderModel = theirs.load_transformers(described, weights, ops)
    else:
        part = None if shard is None else shard.part
        source = (
            Weights(folder, chosen, torch_device, quantization, part)
            if gguf is None
            else GGUFWeights(folder, chosen, torch_device, quantization)
        )
        with torch.inference_mode(), source:
            own = load_decoder(config if shard is None else shard.config, source, ops, make_loads)
        if group is not None:
            share(own, group)
        decoder = own
    if torch_device.type == "cpu":
        keep_memory()
    written = quantization if described is None else f"{quantization} transformers"
    digest = digest_model(folder, written, kv_dtype)
    return LoadedModel(
        str(model), folder, digest, config, decoder, chosen, torch_device, shard, kv_dtype
    )


def _implementation(folder: Path, wanted: str) -> str:
    if wanted == "pigou" or not (folder / "config.json").is_file():
        return "pigou"
    try:
        return choose_implementation(HfConfig(folder, read_source(folder)), wanted)
    except ConfigError as error:
        raise ModelError(str(error)) from None


def _dtype(name: str, config: ModelConfig) -> torch.dtype:
    if name == "auto":
        name = "fp32" if config.dtype == "float32" else "bf16"
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"device {name!r} is unknown; give cpu, cuda, or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is not supported; supported: cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' was asked for, but torch finds no CUDA device; give cpu")
    return device


def warm_up(executor: TorchExecutor) -> None:
    """Compute a few dummy tokens in block 0, before the core's first plan."""
    _run(executor)
    with always_parallel():
        _run(executor)


def _run(executor: TorchExecutor) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    executor.add(_REQUEST, [0, 0], params, b"")
    executor.execute(_plan(start=0, count=2))
    executor.execute(_plan(start=2, count=1))
    executor.drop(_REQUEST)


def _plan(start: int, count: int) -> Plan:
    starts = np.array([start], dtype=np.int32)
    return Plan(
        rows=np.zeros(1, dtype=np.int32), starts=starts, counts=np.array([count], dtype=np.int32),
        kv_lens=starts.copy(), samples=np.ones(1, dtype=np.bool_),
        started=[Started(_REQUEST, 0, 0)] if start == 0 else [],
    )  # fmt: skip
