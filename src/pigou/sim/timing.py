"""Timing models: how long a step of a worker takes, by a law of its shape or by a roofline.

Roofline (Williams et al. 2009), each matrix product with T tokens on each of p GPUs:
    max(2 * T * parameters / p / (peak * compute),
        (bytes of weights / p + bytes of input and output) / (bandwidth * streaming))
Likewise attention, norms, the output layer and the ring sums of tensor parallelism. Efficiencies
are the GPU's (`pigou.models.gpus`); a layer adds its kernel launches.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.config import ConfigError, check_bounds
from pigou.engine.plan import Plan
from pigou.models.architecture import Architecture, LayerKind, Matrix
from pigou.models.gpus import Gpu, check_parallel
from pigou.models.parallelism import ParallelConfig, parallel_config
from pigou.request import SECOND, Ints, Nanos
from pigou.sim.timing_experts import ExpertTiming

_MASK = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: Seconds of each part of a step.
_HOUR_S = 3600
#: Model, GPU and GPUs of a worker of the preset fleets; they give its KV blocks.
PRESET_WORKERS = {"340b": ("nemotron-4-340b", "B200", 8), "70b": ("llama-3.1-70b", "B200", 4)}
#: Kernels of a decoder layer: two norms, four products, rotation with the cache's write,
#: attention with its reduction, activation; vLLM's layer tables list the same.
LAYER_KERNELS = 10
#: Bytes of an activation.
WIDTH = 2.0
#: Passes of the sampler over float32 logits: convert, scale, softmax, draw.
SAMPLER_PASSES = 4
Floats = NDArray[np.float64]
#: Columns of the matrix products: FLOPs of a token, bytes of weights, bytes of a token's input and
#: output, kind of layer, experts to choose from and chosen (0, 0: none). The output layer is last.
FLOPS, WEIGHT_BYTES, IO_BYTES, KIND, EXPERTS, ACTIVE = 0, 1, 2, 3, 4, 5
#: Columns of the kinds of layer: how many, sums over GPUs, seconds of launches, bytes of a token,
#: bytes of a sequence's state, FLOPs of a token besides matrix products.
COUNT, SUMS, LAUNCHES, TOKEN, STATE, SCAN_FLOPS = 0, 1, 2, 3, 4, 5
#: Columns of the kinds of cache: layers, FLOPs of a pair of tokens in prompts and in decodes, bytes
#: of an entry, tokens that are read at most (0: all).
LAYERS, PROMPT_FLOPS, DECODE_FLOPS, ENTRY_BYTES, WINDOW = 0, 1, 2, 3, 4
#: Indices into the vector of rates; all in seconds for one unit.
FLOP, BYTE, ATTENTION_FLOP, WORD, ROW, STEP, HOP, HOP_BYTE, SUM_BYTES, GATHER_BYTES, CACHE_BYTE = (
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
)  # fmt: skip
RATES = 11


class StepShape(msgspec.Struct):
    """Shape of one step; entry i is one sequence."""

    counts: Ints  # tokens to compute, shape (n,); 1 for a decode
    kv_lens: Ints  # cached tokens before the step, shape (n,)
    samples: np.ndarray  # whether a token is sampled, shape (n,)
    step_key: StepKey | None = None  # key of the first step's noise; None: the mean

    @property
    def tokens(self) -> int:
        """Tokens of the whole step."""
        return int(self.counts.sum())


class Timing(Protocol):
    """Seconds of computation, as integer nanoseconds."""

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of `repeat` steps, (repeat,), equal to as many single calls.

        Step i has i times `counts` more cached tokens.
        """
        ...


@bare_kernel
def accumulate(times: Nanos, start: int) -> None:
    """Turn durations of steps into their end times, in place; the first begins at `start`."""
    end = start
    for i in range(times.shape[0]):
        end += times[i]
        times[i] = end


class StepKey(NamedTuple):
    """Key of the random variation of a worker's step, and of the steps after it."""

    key: int
    step: int  # steps computed before
    age: int  # decode-only steps of the same sequences right before

    def uniforms(self, repeat: int) -> NDArray[np.float64]:
        """Return uniforms in [0, 1), (repeat,), by SplitMix64 (Steele, Lea, Flood 2014)."""
        start = (_mix(self.key & _MASK) + self.step) & _MASK
        state = np.uint64(start) + np.arange(repeat, dtype=np.uint64) + np.uint64(_STRIDE)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
        state ^= state >> np.uint64(31)
        return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52


class StepKeys:
    """Makes the keys of one worker's plans, however many steps a plan has."""

    def __init__(self, seed: int, number: int) -> None:
        self._key = _mix(_mix(seed & _MASK) + number)
        self._rows: Ints | None = None
        self._since = 0

    def of(self, plan: Plan, step: int) -> StepKey:
        """Return the key of a plan's first step, after `step` steps."""
        rows = plan.rows
        if plan.started or plan.preempted or int(plan.counts.max()) > 1:
            self._rows = None
            return StepKey(self._key, step, 0)
        if self._rows is None or not np.array_equal(self._rows, rows):
            self._since = step
        self._rows = rows
        return StepKey(self._key, step, step - self._since)


def varies(timing: Any) -> bool:
    """Whether a timing model has random variation, and needs step keys."""
    return bool(getattr(timing, "varies", False))


def _mix(key: int) -> int:
    state = (key + _STRIDE) & _MASK
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)


@dataclass(frozen=True, slots=True)
class Slowed:
    """A timing model whose steps all take `factor` times as long."""

    timing: Timing
    factor: float

    @property
    def varies(self) -> bool:
        """Whether it has random variation."""
        return varies(self.timing)

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        nanos = self.timing.durations(batch, repeat) * self.factor
        slowed: Nanos = np.maximum(1, np.rint(nanos)).astype(np.int64)
        return slowed


def step_end_times(
    timing: Timing, now: int, plan: Plan, repeat: int, step_key: StepKey | None = None
) -> Nanos:
    """Return when each of a plan's steps ends, nanoseconds, (repeat,)."""
    shape = StepShape(plan.counts, plan.kv_lens, plan.samples, step_key)
    end_times = timing.durations(_verification(plan) if len(plan.drafts) else shape, repeat)
    accumulate(end_times, now)
    return end_times


def _verification(plan: Plan) -> StepShape:
    """Return drafts as decodes of empty contexts: the row's own reads its cache, once for all."""
    more = np.zeros(int(plan.drafts.sum()), dtype=np.int32)
    kv_lens = np.concatenate((plan.kv_lens + plan.drafts, more))
    return StepShape(np.ones_like(kv_lens), kv_lens, np.ones(len(kv_lens), dtype=np.bool_))


def step_nanos(
    timing: Timing, chunk: int, done: int, last: bool, streams: int, context: int
) -> int:
    """Return the ns of a step of `streams` decodes and a prompt chunk after `done` tokens."""
    prompt = int(chunk > 0)
    counts, kv_lens = (
        np.ones(streams + prompt, np.int32),
        np.full(streams + prompt, context, np.int32),
    )
    samples = np.ones(streams + prompt, np.bool_)
    if prompt:
        counts[-1], kv_lens[-1], samples[-1] = chunk, done, last
    return int(timing.durations(StepShape(counts, kv_lens, samples), 1)[0])


class Law(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of a step with n decodes, k prompts begun and t prompt tokens.

    (itl_a + itl_b n, if n > 0) + (prefill k + prefill_token t)
    """

    itl_a: float
    itl_b: float = 0.0  # per sequence that decodes
    few: int = 0  # maximum of sequences in a step that takes `itl_few`; 0 for none
    itl_few: float = 0.0  # seconds of such a step: engines use other kernels
    prefill: float = 0.0  # per prompt begun in the step
    prefill_token: float = 0.0  # per prompt token
    mixed: float | None = None  # `prefill` of a step that decodes as well; None: the same
    overhead: float = 0.0  # latency from client to worker; blocks no other request

    def __post_init__(self) -> None:
        for name in ("itl_b", "prefill", "prefill_token", "mixed", "overhead"):
            value = getattr(self, name)
            if value is not None:
                check_bounds(name, value, ge=0, le=_HOUR_S, unit=" seconds (an hour)")
        check_bounds("itl_a", self.itl_a, gt=0, le=_HOUR_S, unit=" seconds (an hour)")
        if self.few < 0 or (self.few > 0) != (0.0 < self.itl_few <= _HOUR_S):
            raise ConfigError(
                f"few is {self.few} and itl_few {self.itl_few}; give both, above 0 and itl_few at "
                f"most {_HOUR_S} seconds (an hour), or none"
            )

    def decode(self, sequences: int) -> float:
        """Return the seconds of a decode step of n >= 1 sequences."""
        if sequences <= self.few:
            return self.itl_few
        return self.itl_a + self.itl_b * sequences


#: Laws of the fleets in "The Price of Anarchy in Disaggregated Inference", fitted to its tables:
#: throughput and latency below the knee of Nemotron-4-340B (1P/2D) and Llama-3.1-70B (1P/5D).
PRESETS = {
    "340b": Law(itl_a=19.0e-3, itl_b=0.026e-3, prefill=45e-3, overhead=74e-3),
    "70b": Law(itl_a=7.15e-3, itl_b=0.0159e-3, prefill=18e-3, overhead=55e-3),
}


@dataclass(frozen=True, slots=True)
class LawTiming:
    """A `Law` as a timing model."""

    law: Law

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        law = self.law
        prompts = batch.counts > 1
        decodes = len(prompts) - int(np.count_nonzero(prompts))
        decode_s = law.decode(decodes) if decodes else 0.0
        if decodes == len(prompts):
            return np.full(repeat, _nanos(decode_s), dtype=np.int64)
        begun = int(np.count_nonzero(prompts & (batch.kv_lens == 0)))
        tokens = int(batch.counts.sum()) - decodes
        prompt_s = law.mixed if decodes and law.mixed is not None else law.prefill
        durations_ns = np.full(
            repeat, _nanos(decode_s + law.prefill_token * tokens), dtype=np.int64
        )
        durations_ns[0] = _nanos(decode_s + (prompt_s * begun + law.prefill_token * tokens))
        return durations_ns


def _nanos(seconds: float) -> int:
    return max(1, round(seconds * SECOND))


class RooflineTiming:
    """Times of steps out of FLOPs and bytes.

    Data-parallel ranks compute their sequences side by side, and wait for the slowest; experts are
    those of the whole step, and timed apart where they are spread over ranks or unevenly loaded.
    """

    def __init__(
        self, model: Architecture, device: Gpu, gpus: ParallelConfig | int = 1,
        expert_loads: NDArray[np.float64] | None = None, *, eplb: bool = False,
    ) -> None:  # fmt: skip
        split = parallel_config(gpus)
        check_parallel(split, model, device)
        tp, self._dp = split.tp, split.dp
        self.experts: ExpertTiming | None = None  # where timed apart
        self._equal_ranks = 1  # ranks that compute as much as the one that is timed
        self._products = _products(model, device, split)
        if split.ep or split.dp > 1 or (model.experts and expert_loads is not None):
            spread = self._products[:, EXPERTS] > 0.0
            rows = self._products[spread]
            counts = np.array([model.kinds[int(row[KIND])].count for row in rows])
            self._products = self._products[~spread]
            self.experts = ExpertTiming(
                model, device, split, expert_loads,
                np.column_stack([counts, rows[:, [KIND, FLOPS, IO_BYTES, WEIGHT_BYTES]]]),
                (_flop_s(model, device), _byte_s(device)), eplb=eplb,
            )  # fmt: skip
        self._kinds = _kinds(model, device, tp)
        self._caches = _caches(model, tp)
        self._rates = _rates(model, device, tp)

    def of_rank(self) -> RooflineTiming:
        """Return the timing of one data-parallel rank, where all compute as much."""
        rank = copy(self)
        rank._dp, rank._equal_ranks = 1, self._dp
        return rank

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        durations = np.empty(repeat, dtype=np.int64)
        if self._dp == 1:
            roofline_durations(
                batch.counts, batch.kv_lens, batch.samples, repeat,
                self._products, self._kinds, self._caches, self._rates, durations,
            )  # fmt: skip
        else:
            order, bounds = _ranks(batch.counts, self._dp)
            slowest_durations(
                batch.counts[order], batch.kv_lens[order], batch.samples[order], bounds, repeat,
                self._products, self._kinds, self._caches, self._rates, np.empty_like(durations),
                durations,
            )  # fmt: skip
        if self.experts is not None:
            durations += round(self.experts(batch.tokens * self._equal_ranks) * SECOND)
        return durations


def _ranks(counts: Ints, dp: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sequences in the order of their data-parallel ranks, and where each rank begins.

    Decodes take turns; a prompt goes to the rank with the fewest prompt tokens.
    """
    rank = np.arange(len(counts)) % dp
    loads = np.zeros(dp, dtype=np.int64)
    for i in np.flatnonzero(counts > 1):
        rank[i] = np.argmin(loads)
        loads[rank[i]] += counts[i]
    order = np.argsort(rank, kind="stable")
    return order, np.searchsorted(rank[order], np.arange(dp + 1))


def _products(model: Architecture, device: Gpu, split: ParallelConfig) -> np.ndarray:
    """Return the matrix products of one GPU, shape (products, 6)."""
    base = device.peak(model.compute_dtype)
    rows: list[list[float]] = []
    for index, kind in enumerate(model.kinds):
        for group in _fused(kind):
            if group[0].copies > 1 and (split.ep or split.dp > 1):  # each whole, or one of `gpus`
                tp = 1 if split.ep else split.gpus
            else:
                tp = split.tp
            inner = group[0].inner * (group[0].share(tp) if group[0].rows else 1.0)
            outer = sum(m.outer * (1.0 if m.rows else m.share(tp)) for m in group)
            rows.append(_row(inner, outer, group[0], base / device.peak(group[0].format.compute)))
            rows[-1][KIND] = index
    head = Matrix("output layer", model.hidden, model.vocab, model.head)
    rows.append(
        _row(model.hidden, model.vocab / split.tp, head, base / device.peak(model.head.compute))
    )
    return np.array(rows)


def _fused(kind: LayerKind) -> list[list[Matrix]]:
    """Return the matrices of a layer, those together that engines compute in one product."""
    groups: list[list[Matrix]] = []
    for matrix in kind.matrices:
        if matrix.fused and matrix.format == groups[-1][0].format:
            groups[-1].append(matrix)
        else:
            groups.append([matrix])
    return groups


def _row(inner: float, outer: float, matrix: Matrix, slower: float) -> list[float]:
    experts = (matrix.copies, matrix.active) if matrix.copies > 1 else (0, 0)
    flops, size = 2.0 * inner * outer * slower, inner * outer * matrix.format.size
    return [flops, size, (inner + outer) * WIDTH, -1.0, *map(float, experts)]


def _kinds(model: Architecture, device: Gpu, tp: int) -> np.ndarray:
    """Return the kinds of layer, shape (kinds, 6)."""
    rows = []
    for kind in model.kinds:
        # Each norm reads and writes the stream and the residual; rotation and activation as said.
        token = 4 * kind.sums * model.hidden + (2 * kind.qkv_width + kind.wide) / tp
        launches = LAYER_KERNELS * kind.sums / 2 * device.launch
        state, scan = 2.0 * kind.state / tp, kind.token_flops / tp
        rows.append([kind.count, kind.sums, launches, token * WIDTH, state, scan])
    return np.array(rows, dtype=np.float64)


def _caches(model: Architecture, tp: int) -> np.ndarray:
    """Return the kinds of cache as one GPU reads them, shape (caches, 5)."""
    rows = [
        [
            count, cache.prompt_flops / tp, cache.decode_flops / tp,
            cache.token_bytes(model.kv_dtype) / min(tp, cache.heads),
            cache.window or cache.selected,
        ]
        for cache, count in model.caches
    ]  # fmt: skip
    return np.array(rows, dtype=np.float64).reshape(len(rows), 5)


def _rates(model: Architecture, device: Gpu, tp: int) -> np.ndarray:
    """Return the rates that the kernel reads, shape (RATES,)."""
    rates = np.zeros(RATES)
    rates[FLOP] = _flop_s(model, device)
    rates[BYTE] = _byte_s(device)
    rates[CACHE_BYTE] = 1.0 / (device.bandwidth * device.cache)
    rates[ATTENTION_FLOP] = 1.0 / (device.peak("bfloat16") * device.attention)
    rates[WORD] = SAMPLER_PASSES * 4.0 * model.vocab
    rates[ROW] = 2.0 * WIDTH * model.hidden
    rates[STEP] = device.step
    if tp > 1:
        rates[HOP] = 2 * (tp - 1) * device.link_latency
        rates[HOP_BYTE] = 1.0 / device.link_bandwidth
        rates[SUM_BYTES] = 2 * (tp - 1) / tp * model.hidden * WIDTH
        rates[GATHER_BYTES] = (tp - 1) / tp * model.vocab * WIDTH
    return rates


def _flop_s(model: Architecture, device: Gpu) -> float:
    return 1.0 / (device.peak(model.compute_dtype) * device.compute)


def _byte_s(device: Gpu) -> float:
    return 1.0 / (device.bandwidth * device.streaming)


@inlined
def _product_seconds(products: Floats, i: int, rows: int, rates: Floats) -> float:
    """Return the seconds of a product by its number of rows; 0 without rows."""
    weights, units = products[i, WEIGHT_BYTES], float(rows)
    experts, active = products[i, EXPERTS], products[i, ACTIVE]
    if experts > 0.0:
        weights *= experts * (1.0 - (1.0 - active / experts) ** rows)
        units = rows * active
    compute = products[i, FLOPS] * units * rates[FLOP]
    move = (weights + products[i, IO_BYTES] * units) * rates[BYTE]
    return float(max(compute, move)) if rows else 0.0


@inlined
def _windowed_reads(
    counts: Ints, kv_lens: Ints, step: int, window: int
) -> tuple[float, float, float]:
    """Return pairs and entries that prompts read, and entries that decodes read, in a window."""
    reads, entries, decoded = 0.0, 0.0, 0.0
    for i in range(counts.shape[0]):
        count = int(counts[i])
        kv = int(kv_lens[i]) + step * count
        if count == 1:
            decoded += min(kv + 1, window)
            continue
        growing = min(max(window - kv, 0), count)  # tokens that see less than a window
        reads += growing * kv + growing * (growing + 1) / 2.0 + (count - growing) * window
        entries += min(kv, window) + count
    return reads, entries, decoded


@bare_kernel
def roofline_durations(
    counts: Ints, kv_lens: Ints, samples: NDArray[np.bool_], repeat: int, products: Floats,
    kinds: Floats, caches: Floats, rates: Floats, durations: Nanos,
) -> None:  # fmt: skip
    """Write the nanoseconds of each of `repeat` steps to `durations`, shape (repeat,).

    Columns: `products` `FLOPS` to `ACTIVE`, `kinds` `COUNT` to `SCAN_FLOPS`, `caches` `LAYERS` to
    `WINDOW`; `rates` by `FLOP` to `CACHE_BYTE`.
    """
    tokens, sampled, decodes, decode_reads = 0, 0, 0, 0
    prompt, squares, twice, prompt_kv = 0, 0, 0, 0
    for i in range(counts.shape[0]):
        count, kv = int(counts[i]), int(kv_lens[i])
        tokens += count
        sampled += 1 if samples[i] else 0
        if count == 1:
            decodes += 1
            decode_reads += kv + 1
        else:
            prompt += count
            squares += count * count
            twice += count * (2 * kv + count + 1)
            prompt_kv += kv + count
    fixed = 0.0
    for k in range(kinds.shape[0]):
        layer = kinds[k, LAUNCHES] + tokens * kinds[k, TOKEN] * rates[BYTE]
        for i in range(products.shape[0]):
            if products[i, KIND] == k:
                layer += _product_seconds(products, i, tokens, rates)
        if kinds[k, STATE] > 0.0:
            layer += counts.shape[0] * kinds[k, STATE] * rates[BYTE]
            layer += tokens * kinds[k, SCAN_FLOPS] * rates[ATTENTION_FLOP]
        layer += kinds[k, SUMS] * (rates[HOP] + tokens * rates[SUM_BYTES] * rates[HOP_BYTE])
        fixed += kinds[k, COUNT] * layer
    head = 0.0
    if sampled:
        head = _product_seconds(products, products.shape[0] - 1, sampled, rates)
        head += sampled * rates[WORD] * rates[BYTE]
    head += rates[HOP] / 2.0 + sampled * rates[GATHER_BYTES] * rates[HOP_BYTE]
    fixed += head + rates[STEP] + tokens * rates[ROW] * rates[BYTE]
    for step in range(repeat):
        total = fixed
        for c in range(caches.shape[0]):
            reads = (twice + 2 * squares * step) / 2.0
            entries, decoded = (
                float(prompt_kv + step * prompt),
                float(decode_reads + decodes * step),
            )
            if caches[c, WINDOW] > 0.0:
                window = int(caches[c, WINDOW])
                reads, entries, decoded = _windowed_reads(counts, kv_lens, step, window)
            time = max(
                reads * caches[c, PROMPT_FLOPS] * rates[ATTENTION_FLOP],
                entries * caches[c, ENTRY_BYTES] * rates[CACHE_BYTE],
            )
            time += max(
                decoded * caches[c, DECODE_FLOPS] * rates[ATTENTION_FLOP],
                decoded * caches[c, ENTRY_BYTES] * rates[CACHE_BYTE],
            )
            total += caches[c, LAYERS] * time
        durations[step] = max(int(total * 1e9 + 0.5), 1)


@bare_kernel
def slowest_durations(
    counts: Ints, kv_lens: Ints, samples: NDArray[np.bool_], bounds: NDArray[np.int64], repeat: int,
    products: Floats, kinds: Floats, caches: Floats, rates: Floats, scratch: Nanos,
    durations: Nanos,
) -> None:  # fmt: skip
    """Write the nanoseconds of each step on the slowest rank, whose rows are between `bounds`."""
    durations[:] = 0
    for r in range(bounds.shape[0] - 1):
        begin, end = bounds[r], bounds[r + 1]
        roofline_durations(
            counts[begin:end], kv_lens[begin:end], samples[begin:end], repeat, products, kinds,
            caches, rates, scratch,
        )  # fmt: skip
        for step in range(repeat):
            durations[step] = max(durations[step], scratch[step])
