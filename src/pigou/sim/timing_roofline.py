"""Roofline timing: a step takes what its FLOPs and bytes need, whichever is more, part by part.

For each matrix product of a layer, with T tokens, on each of p GPUs (Williams et al. 2009):

    max(2 * T * parameters / p / (peak * compute),
        (bytes of weights / p + bytes of input and output) / (bandwidth * streaming))

and likewise attention over prompts (FLOPs at the `attention` efficiency, or bytes of the cache),
attention of decodes (bytes of the cache, as a rule), norms and activations (bytes), the output
layer for rows that are sampled, and the sums of tensor parallelism (ring). A layer adds the
launches of its kernels. Efficiencies are the GPU's (`pigou.sim.gpus`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.config import ConfigError
from pigou.request import Ints, Nanos
from pigou.sim.architecture import DTYPE_BYTES, Architecture
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
#: output, and their kind.
FLOPS, WEIGHT_BYTES, IO_BYTES, KIND = 0, 1, 2, 3
#: Kinds of matrix products: of each layer; of each layer's experts, with the weights of one of
#: them; of the output layer, for tokens that are sampled.
IN_LAYER, IN_EXPERTS, IN_HEAD = 0.0, 1.0, 2.0
#: Indices into the vector of rates; all in seconds for one unit.
FLOP, BYTE, ATTENTION_FLOP, LAYER, TOKEN, WORD, ROW = 0, 1, 2, 3, 4, 5, 6
STEP, HOP, HOP_BYTE, SUM_BYTES, GATHER_BYTES, LAYERS, READ_FLOPS, READ_BYTES, CACHE_BYTE = (
    7, 8, 9, 10, 11, 12, 13, 14, 15,
)  # fmt: skip
RATES = 16


class RooflineTiming:
    """Times of steps out of FLOPs and bytes."""

    def __init__(self, model: Architecture, device: Gpu, tp: int) -> None:
        """Work out what depends on the model and the GPU alone.

        Raises:
            ConfigError: the model's heads cannot be shared among `tp` GPUs, or no link joins them.
        """
        if tp < 1 or model.heads % tp:
            raise ConfigError(f"tp is {tp}; it must divide the {model.heads} heads of the model")
        device.check_tp(tp)
        self._products = _products(model, device, tp)
        self._rates = _rates(model, device, tp)
        self._experts, self._active = float(model.experts), float(model.active)

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        durations = np.empty(repeat, dtype=np.int64)
        roofline_durations(
            batch.counts, batch.kv_lens, batch.samples, repeat,
            self._products, self._rates, self._experts, self._active, durations,
        )  # fmt: skip
        return durations


def roofline(model: Architecture, device: Gpu, tp: int = 1) -> Timing:
    """Make a timing out of a model's shapes and a GPU's specification.

    Args:
        model: its architecture.
        device: each GPU.
        tp: GPUs that share each layer.
    """
    return RooflineTiming(model, device, tp)


def _products(model: Architecture, device: Gpu, tp: int) -> np.ndarray:
    """Return the matrix products of one GPU, shape (products, 4).

    The kernel counts FLOPs at the layers' peak. Those of the output layer, which is not quantised,
    are scaled to it.
    """
    weight, head = DTYPE_BYTES[model.dtype], DTYPE_BYTES[model.head_dtype]
    slower = device.peak(model.compute_dtype) / device.peak(model.head_dtype)

    def row(inner: float, outer: float, kind: float) -> list[float]:
        flops, size = 2.0 * inner * outer, inner * outer * weight
        return [flops, size, (inner + outer) * WIDTH, kind]

    queries = model.heads * model.head_dim / tp
    others = 2 * model.kv_heads * model.head_dim / min(tp, model.kv_heads)
    kind = IN_EXPERTS if model.experts else IN_LAYER
    rows = [
        row(model.hidden, queries + others, IN_LAYER),
        row(queries, model.hidden, IN_LAYER),
        row(model.hidden, (2 if model.gated else 1) * model.ffn / tp, kind),
        row(model.ffn / tp, model.hidden, kind),
        row(model.hidden, model.vocab / tp, IN_HEAD),
    ]
    rows[-1][FLOPS] *= slower
    rows[-1][WEIGHT_BYTES] *= head / weight
    if model.experts:
        rows.append(row(model.hidden, model.experts, IN_LAYER))
    return np.array(rows)


def _rates(model: Architecture, device: Gpu, tp: int) -> np.ndarray:
    """Return the rates that the kernel reads, shape (RATES,)."""
    rates = np.zeros(RATES)
    rates[FLOP] = 1.0 / (device.peak(model.compute_dtype) * device.compute)
    rates[BYTE] = 1.0 / (device.bandwidth * device.streaming)
    rates[CACHE_BYTE] = 1.0 / (device.bandwidth * device.cache)
    rates[ATTENTION_FLOP] = 1.0 / (device.peak("bfloat16") * device.attention)
    rates[LAYER] = LAYER_KERNELS * device.launch
    # Two norms read and write the stream and the residual; rotation and activation as they say.
    rates[TOKEN] = (8 * model.hidden + (2 * model.qkv_width + model.widest) / tp) * WIDTH
    rates[WORD] = SAMPLER_PASSES * 4.0 * model.vocab
    rates[ROW] = 2.0 * WIDTH * model.hidden
    rates[STEP] = device.step
    if tp > 1:
        rates[HOP] = 2 * (tp - 1) * device.link_latency
        rates[HOP_BYTE] = 1.0 / device.link_bandwidth
        rates[SUM_BYTES] = 2 * (tp - 1) / tp * model.hidden * WIDTH
        rates[GATHER_BYTES] = (tp - 1) / tp * model.vocab * WIDTH
    shared = min(tp, model.kv_heads)
    rates[LAYERS] = model.layers
    rates[READ_FLOPS] = 4.0 * model.heads * model.head_dim / tp
    rates[READ_BYTES] = model.kv_bytes / model.layers / shared
    return rates


@bare_kernel
def roofline_durations(
    counts: Ints,
    kv_lens: Ints,
    samples: NDArray[np.bool_],
    repeat: int,
    products: Floats,
    rates: Floats,
    experts: float,
    active: float,
    durations: Nanos,
) -> None:
    """Write the nanoseconds of each of `repeat` steps to `durations`, shape (repeat,).

    Args:
        counts: tokens that each entry computes.
        kv_lens: cache entries of each before the first step.
        samples: whether each yields a token.
        repeat: steps; in each, entries have as many more cached tokens as they computed before.
        products: matrix products, one a row, with the columns `FLOPS` to `KIND`.
        rates: with the indices `FLOP` to `CACHE_BYTE`.
        experts: of a layer, 0 for a dense model.
        active: of those, that compute a token.
        durations: takes the result.
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
    layer = rates[LAYER] + tokens * rates[TOKEN] * rates[BYTE]
    head = 0.0
    for i in range(products.shape[0]):
        kind = products[i, KIND]
        rows = sampled if kind == IN_HEAD else tokens
        if rows == 0:
            continue
        weights, units = products[i, WEIGHT_BYTES], float(rows)
        if kind == IN_EXPERTS:
            weights *= experts * (1.0 - (1.0 - active / experts) ** rows)
            units = rows * active
        compute = products[i, FLOPS] * units * rates[FLOP]
        move = (weights + products[i, IO_BYTES] * units) * rates[BYTE]
        if kind == IN_HEAD:
            head += max(compute, move) + rows * rates[WORD] * rates[BYTE]
        else:
            layer += max(compute, move)
    if rates[HOP] > 0.0:
        layer += 2.0 * (rates[HOP] + tokens * rates[SUM_BYTES] * rates[HOP_BYTE])
        head += rates[HOP] / 2.0 + sampled * rates[GATHER_BYTES] * rates[HOP_BYTE]
    fixed = rates[LAYERS] * layer + head + rates[STEP] + tokens * rates[ROW] * rates[BYTE]
    for step in range(repeat):
        decode_kv = float(decode_reads + decodes * step)
        prompt_reads = (twice + 2 * squares * step) / 2.0
        time = max(
            prompt_reads * rates[READ_FLOPS] * rates[ATTENTION_FLOP],
            (prompt_kv + step * prompt) * rates[READ_BYTES] * rates[CACHE_BYTE],
        )
        time += max(
            decode_kv * rates[READ_FLOPS] * rates[ATTENTION_FLOP],
            decode_kv * rates[READ_BYTES] * rates[CACHE_BYTE],
        )
        durations[step] = max(int((fixed + rates[LAYERS] * time) * 1e9 + 0.5), 1)
