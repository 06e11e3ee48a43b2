"""Builds a worker: model, core, executor, cache, transfers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pigou.config import ConfigError
from pigou.engine.core import EngineCore
from pigou.engine.preemption import RateMeter
from pigou.kv.block import KVLayout
from pigou.models import bundled_path
from pigou.models.architecture import Architecture
from pigou.models.read import architecture, read_architecture
from pigou.request import SECOND, Ints, Rehearsed
from pigou.runtime.stores.offloader import KVOffloader
from pigou.runtime.stores.store import DeviceBlocks
from pigou.sim.timing import Timing
from pigou.text.model_files import within
from pigou.text.tokenizer import Tokenizer
from pigou.wire.names import advertised
from pigou.wire.sampling_params import ModelLimits
from pigou.worker.adapters import AdapterStore, FillSlot, ReadAdapter
from pigou.worker.config import WorkerConfig
from pigou.worker.device_use import WorkEstimate, estimate_of
from pigou.worker.engine_thread.commands import Backend
from pigou.worker.engine_thread.kv_offload import WorkerTiers, open_tiers
from pigou.worker.engine_thread.mock_worker import (
    MockBackend,
    SimulatedLink,
    TimingLaw,
    read_mock_adapter,
    timed,
)
from pigou.worker.http.pooling import embedding_dimensions, pooling_of
from pigou.worker.http.served_model import (
    ServedModel,
    chat_template,
    read_spec,
    reasoning_family,
    sampling_defaults,
    seeds,
    tool_format,
)
from pigou.worker.http.structured_output_pool import (
    GrammarCompilePool,
    GrammarSandbox,
    GrammarSource,
)
from pigou.worker.kv_transfer.block_store import HEADER, HostBlockStore, SharedMemory
from pigou.worker.kv_transfer.transfer_params import TransferConfig

if TYPE_CHECKING:
    from pigou.runtime.memory_report import MemoryReport
    from pigou.runtime.ranks import Ranks
    from pigou.runtime.structured_output import Grammars

log = logging.getLogger(__name__)

#: Default max bytes of KV blocks on a CPU.
CPU_MEMORY = 2**30
#: Default max KV blocks, in full-length sequences.
SEQUENCES = 64
#: Bandwidth, in bytes per second, that disables swapping.
_SLOW = 1.0
#: Block bytes of the mock backend.
_SLEEP_BYTES = 4096


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of a worker."""

    model: ServedModel
    core: EngineCore
    backend: Backend
    store: DeviceBlocks  # KV blocks, for transfers
    memory: SharedMemory | None  # shared memory of the KV blocks, if any
    meter: RateMeter | None
    grammars: GrammarSource
    rest: Callable[[], None] | None = None  # called when idle
    link: SimulatedLink | None = None  # simulates the time of incoming blocks
    # names of the tiers beyond the device, and their offloader.
    tiers: tuple[list[str], KVOffloader] | None = None
    rehearsed: tuple[Rehearsed, ...] = ()  # startup profile
    work: WorkEstimate | None = None  # None if the model's shape is unknown
    # runs the startup profile and measures memory; None for the mock backend.
    measure: Callable[..., tuple[tuple[Rehearsed, ...], MemoryReport]] | None = None
    memory_report: MemoryReport | None = None  # result of `measure`
    experts: Callable[[], dict[str, Any]] | None = None  # reports loads; None without experts
    ranks: Ranks | None = None  # the other processes of tensor parallelism


def build(config: WorkerConfig) -> WorkerParts:
    """Load the model and build all parts; raises ConfigError, ModelError or TokenizerError."""
    return _build_sleeping(config) if config.sleeps else _build_torch(config)


def transfer_config(
    config: WorkerConfig, backends: tuple[str, ...], advertise: str = ""
) -> TransferConfig:
    """Return this worker's transfer limits; `advertise` is its address for other hosts."""
    lease = round(config.kv_lease * SECOND)
    return TransferConfig(
        host=config.host, advertise=advertised(config.host, advertise), backends=backends,
        tensor_parallel_size=max(config.tensor_parallel_size, config.timing_tp), lease=lease,
        max_hold=max(10 * lease, 300 * SECOND),
    )  # fmt: skip


# --- a real model -----------------------------------------------------------------------------


def _build_torch(config: WorkerConfig) -> WorkerParts:
    from pigou.runtime.lora import attach
    from pigou.runtime.memory_report import measured, tensor_bytes
    from pigou.runtime.models.load import load
    from pigou.runtime.ranks import Ranks
    from pigou.runtime.resources import device_name, free_memory, kv_room, set_threads
    from pigou.runtime.speculation import DraftModel, make_proposer
    from pigou.runtime.structured_output import WorkBudget

    set_threads(config.threads)
    source = bundled_path() if config.model == "bundled" else config.model
    options: dict[str, Any] = {
        "model": str(source), "dtype": config.dtype, "device": config.device,
        "quantization": config.quantization, "kv_dtype": config.kv_cache_dtype,
        "expert_parallel": config.expert_parallel, "implementation": config.model_impl,
    }  # fmt: skip
    ranks = Ranks(config.tensor_parallel_size, options) if config.tensor_parallel_size > 1 else None
    loaded = load(**options) if ranks is None else ranks.load()
    layout = loaded.layout(config.block_size)
    max_tokens = config.max_model_len or loaded.config.context
    bank = None
    if config.enable_lora:
        bank = attach(loaded.decoder, config.max_loras, config.max_lora_rank, config.max_seqs)
    on_cpu = loaded.device.type == "cpu"
    free = free_memory(loaded.device)
    room = min(CPU_MEMORY, free // 4)
    if not on_cpu:
        room = kv_room(
            free, loaded.config, loaded.dtype.itemsize, config.max_seqs,
            config.max_batched_tokens, gathers=find_spec("triton") is None,
        )  # fmt: skip
    blocks = _blocks(config, layout, max_tokens, room)
    tiers = open_tiers(config, layout, blocks)
    core = _core(config, blocks, max_tokens, tiers)
    memory = _shared_memory(config, blocks * layout.block_bytes) if on_cpu else None
    if ranks is not None and memory is not None:
        ranks.share(memory.fileno(), HEADER)
    cache = loaded.cache(
        blocks,
        config.block_size,
        config.host_blocks,
        memory.buffer.data if memory is not None else None,
    )
    executor = loaded.executor(
        cache, core.tables, core.config.max_model_len, core.config.eviction, bank,
        enforce_eager=config.enforce_eager,
    )  # fmt: skip
    log.info("attention: %s", executor.path)
    decoders, cache_bytes = [loaded.decoder], blocks * layout.block_bytes
    if (drafting := config.speculation) is not None:
        executor.proposer = proposer = make_proposer(drafting, loaded, core.config)
        if isinstance(proposer, DraftModel):
            decoders.append(proposer.decoder)
            cache_bytes += proposer.cache_bytes
    model = _served(
        config, loaded.folder, eos=loaded.config.eos, digest=loaded.digest,
        limits=ModelLimits(core.config.max_model_len, loaded.config.vocab),
        lora=None if bank is None else (bank.read, bank.load),
    )  # fmt: skip
    meter = None
    if config.host_blocks or tiers is not None:
        swap = _swap_rate(cache.move, config.host_blocks, layout) if config.host_blocks else _SLOW
        meter = RateMeter(swap, layout.block_bytes)

    def grammars() -> Grammars:
        made = executor.grammars()
        made.budget = WorkBudget()
        return made

    def trials() -> GrammarSandbox:
        path = loaded.folder / "tokenizer.json"
        return GrammarSandbox(path, loaded.config.vocab, loaded.config.eos)

    pool = GrammarCompilePool(grammars, trials)
    name = str(loaded.dtype).removeprefix("torch.")
    loads = loaded.decoder.loads
    return WorkerParts(
        model, core, executor, cache, memory, meter, pool, tiers=_open(tiers, cache),
        experts=None if loads is None else loads.report,
        work=_work(
            lambda: read_architecture(loaded.folder, dtype=name), device_name(loaded.device)
        ),
        measure=partial(
            measured, device=loaded.device, weights=tensor_bytes(decoders), cache=cache_bytes,
            adapters=0 if bank is None else bank.bytes,
        ),
        ranks=ranks,
    )  # fmt: skip


def _work(read: Callable[[], Architecture], gpu: str, tp: int = 1) -> WorkEstimate | None:
    """Return the work estimate of a model; None if its layers are not described."""
    try:
        return estimate_of(read(), gpu, tp)
    except ConfigError as error:
        log.info("no estimate of work: %s", error)
        return None


def _swap_rate(
    move: Callable[[Ints, Ints, Ints], None], host_blocks: int, layout: KVLayout
) -> float:
    """Measure swap bandwidth with unused blocks, in bytes per second."""
    count = min(16, host_blocks)
    pairs = np.repeat(np.arange(count, dtype=np.int32)[:, None], 2, axis=1)
    none = np.empty((0, 2), dtype=np.int32)
    move(pairs, none, pairs)
    began = time.perf_counter()
    move(pairs, none, pairs)
    return 2 * count * layout.block_bytes / max(time.perf_counter() - began, 1e-9)


# --- no model ---------------------------------------------------------------------------------


def _build_sleeping(config: WorkerConfig) -> WorkerParts:
    folder = bundled_path() if config.model == "bundled" else Path(config.model)
    spec = _read_spec(folder)
    vocab = int(spec.get("vocab_size", 0))
    max_tokens = config.max_model_len or _context(spec)
    layout = KVLayout(
        model=config.model, digest="sleep", dtype="uint8", block_size=config.block_size, layers=1,
        kv_heads=1, head_dim=1, block_bytes=_SLEEP_BYTES,
    )  # fmt: skip
    blocks = _blocks(config, layout, max_tokens, CPU_MEMORY)
    tiers = open_tiers(config, layout, blocks)
    core = _core(config, blocks, max_tokens, tiers)
    memory = _shared_memory(config, blocks * layout.block_bytes)
    data = memory.buffer if memory is not None else np.zeros(blocks * _SLEEP_BYTES, dtype=np.uint8)
    tokenizer = Tokenizer.load(folder)
    vocab = vocab or len(tokenizer.vocabulary)
    timed_model = config.timing_model or str(folder)
    timing, link = _times(config, timed_model)
    hidden = tokenizer.eos | tokenizer.vocabulary.special
    backend = MockBackend(timing, config.block_size, len(tokenizer.vocabulary), hidden)
    limits = ModelLimits(core.config.max_model_len, vocab)
    model = _served(
        config, folder, eos=tokenizer.eos, digest="sleep", limits=limits,
        lora=(partial(read_mock_adapter, config.sleep_lora_read), lambda *_: None),
    )  # fmt: skip
    store = HostBlockStore(layout, data[: blocks * _SLEEP_BYTES].reshape(blocks, _SLEEP_BYTES))
    return WorkerParts(
        model, core, backend, store, memory, None, GrammarSource(backend.refuse), backend.rest,
        link, _open(tiers, store),
        work=_work(partial(architecture, timed_model), config.timing_gpu, config.timing_tp),
    )  # fmt: skip


def _times(config: WorkerConfig, model: str) -> tuple[Timing, SimulatedLink | None]:
    if not config.timing:
        law = TimingLaw(config.sleep_base, config.sleep_per_seq, config.sleep_prefill_rate)
        return law, None
    return timed(
        config.timing, model, config.timing_gpu, config.timing_tp, config.timing_link,
        config.block_size,
    )  # fmt: skip


def _context(spec: dict[str, Any]) -> int:
    from pigou.models import ModelError
    from pigou.models.rope_parameters import scaled_context

    spec = {"max_position_embeddings": 2048, **spec}
    try:
        return scaled_context(spec)
    except ModelError:
        return int(spec["max_position_embeddings"])


def _read_spec(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model is {str(folder)!r}, and has no config.json")
    return read_spec(path)


# --- both -------------------------------------------------------------------------------------


def _blocks(config: WorkerConfig, layout: KVLayout, max_tokens: int, room: int) -> int:
    """Return the number of KV blocks; `room` bytes are the default budget."""
    if config.blocks:
        return config.blocks
    if config.memory:
        fit = config.memory // layout.block_bytes
        if not fit:
            raise ConfigError(
                f"memory is {config.memory}; one block of {config.block_size} tokens takes "
                f"{layout.block_bytes} bytes"
            )
        return fit
    wanted = SEQUENCES * -(-max_tokens // config.block_size)
    return max(1, min(wanted, room // layout.block_bytes))


def _open(tiers: WorkerTiers | None, device: DeviceBlocks) -> tuple[list[str], KVOffloader] | None:
    return None if tiers is None else (tiers.names, tiers.offloader(device))


def _core(
    config: WorkerConfig, blocks: int, max_tokens: int, tiers: WorkerTiers | None
) -> EngineCore:
    """Create the core; a sequence fits in the cache."""
    limits = config.engine_config(blocks, max_tokens)
    epoch_ns = time.time_ns() - time.monotonic_ns()  # Unix time at monotonic time 0
    return EngineCore(limits, epoch_ns, tiers.tiers if tiers is not None else None)


def _shared_memory(config: WorkerConfig, size: int) -> SharedMemory | None:
    if config.kv_transfer != "auto" and "shm" not in config.kv_transfer.split(","):
        return None
    try:
        return SharedMemory(size)
    except OSError as error:
        if config.kv_transfer == "shm":
            raise ConfigError(f"kv_transfer is shm: {error}") from None
        log.warning("KV blocks will move by TCP: %s", error)
        return None


def _served(
    config: WorkerConfig, folder: Path, *, eos: frozenset[int], digest: str, limits: ModelLimits,
    lora: tuple[ReadAdapter, FillSlot] | None = None,
) -> ServedModel:  # fmt: skip
    tokenizer = Tokenizer.load(folder)
    bundled_name = "pigou-tiny" if config.model == "bundled" else config.model
    name = config.served_model_name or bundled_name
    template = chat_template(tokenizer)
    adapters = None
    if config.enable_lora and lora is not None:
        adapters = AdapterStore(*lora, config, name)
    return ServedModel(
        name=name, root=str(folder) if config.model != "bundled" else "bundled",
        created=int(time.time()), tokenizer=tokenizer, template=template,
        tool_format=tool_format(template, config.tool_call_parser),
        reasoning=reasoning_family(template, config.reasoning_parser),
        pooling="none" if config.sleeps else pooling_of(folder, config.pooling),
        dimensions=embedding_dimensions(_read_spec(folder)), eos=within(eos, limits.vocab_size),
        limits=limits, defaults=sampling_defaults(tokenizer.generation), seed=seeds(name, digest),
        release=digest, adapters=adapters,
    )  # fmt: skip
