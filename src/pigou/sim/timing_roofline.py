"""Roofline timing: a step takes what its FLOPs and bytes need, whichever is more, part by part.

For each matrix product of a kind of layer, with T tokens, on each of p GPUs (Williams et al. 2009):

    max(2 * T * parameters / p / (peak * compute),
        (bytes of weights / p + bytes of input and output) / (bandwidth * streaming))

and likewise attention over prompts (FLOPs at the `attention` efficiency, or bytes of the cache),
attention of decodes (bytes of the cache, as a rule), norms and activations (bytes), the output
layer for rows that are sampled, and the sums of tensor parallelism (ring). A layer adds the
launches of its kernels. Layers with a window read no more than that; linear attention reads and
writes a sequence's state. Efficiencies are the GPU's (`pigou.sim.gpus`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.config import ConfigError
from pigou.models.architecture import Architecture, LayerKind, Matrix
from pigou.request import Ints, Nanos
from pigou.sim.gpus import Gpu
from pigou.sim.timing import StepShape, Timing

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


class RooflineTiming:
    """Times of steps out of FLOPs and bytes."""

    def __init__(self, model: Architecture, device: Gpu, tp: int) -> None:
        if tp < 1 or model.heads % tp:
            raise ConfigError(f"tp is {tp}; it must divide the {model.heads} heads of the model")
        device.check_tp(tp)
        self._products = _products(model, device, tp)
        self._kinds = _kinds(model, device, tp)
        self._caches = _caches(model, tp)
        self._rates = _rates(model, device, tp)

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        durations = np.empty(repeat, dtype=np.int64)
        roofline_durations(
            batch.counts, batch.kv_lens, batch.samples, repeat,
            self._products, self._kinds, self._caches, self._rates, durations,
        )  # fmt: skip
        return durations


def roofline(model: Architecture, device: Gpu, tp: int = 1) -> Timing:
    """Make a timing out of a model's shapes and a GPU's specification."""
    return RooflineTiming(model, device, tp)


def _products(model: Architecture, device: Gpu, tp: int) -> np.ndarray:
    """Return the matrix products of one GPU, shape (products, 6)."""
    base = device.peak(model.compute_dtype)
    rows: list[list[float]] = []
    for index, kind in enumerate(model.kinds):
        for group in _fused(kind):
            inner = group[0].inner * (group[0].share(tp) if group[0].rows else 1.0)
            outer = sum(m.outer * (1.0 if m.rows else m.share(tp)) for m in group)
            rows.append(_row(inner, outer, group[0], base / device.peak(group[0].format.compute)))
            rows[-1][KIND] = index
    head = Matrix("output layer", model.hidden, model.vocab, model.head)
    rows.append(_row(model.hidden, model.vocab / tp, head, base / device.peak(model.head.compute)))
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
    rates[FLOP] = 1.0 / (device.peak(model.compute_dtype) * device.compute)
    rates[BYTE] = 1.0 / (device.bandwidth * device.streaming)
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
    counts: Ints,
    kv_lens: Ints,
    samples: NDArray[np.bool_],
    repeat: int,
    products: Floats,
    kinds: Floats,
    caches: Floats,
    rates: Floats,
    durations: Nanos,
) -> None:
    """Write the nanoseconds of each of `repeat` steps to `durations`, shape (repeat,).

    Args:
        counts: tokens that each entry computes.
        kv_lens: cache entries of each before the first step.
        samples: whether each yields a token.
        repeat: steps; in each, entries have as many more cached tokens as they computed before.
        products: matrix products, one a row, with the columns `FLOPS` to `ACTIVE`.
        kinds: kinds of layer, with the columns `COUNT` to `SCAN_FLOPS`.
        caches: kinds of cache, with the columns `LAYERS` to `WINDOW`.
        rates: with the indices `FLOP` to `CACHE_BYTE`.
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
