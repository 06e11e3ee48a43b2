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

from pigou.config import ConfigError
from pigou.request import Nanos
from pigou.sim import timing_roofline_kernels as kernels
from pigou.sim.architecture import DTYPE_BYTES, Architecture
from pigou.sim.gpus import Gpu
from pigou.sim.timing import Batch, Timing

#: Kernels of a decoder layer: two norms, four products, rotation with the cache's write,
#: attention with its reduction, activation; vLLM's layer tables list the same.
LAYER_KERNELS = 10
#: Bytes of an activation.
WIDTH = 2.0
#: Passes of the sampler over float32 logits: convert, scale, softmax, draw.
SAMPLER_PASSES = 4


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

    def durations(self, batch: Batch, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        durations = np.empty(repeat, dtype=np.int64)
        kernels.roofline_durations(
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
    """Rows for `roofline_kernels.roofline_durations`, shape (products, 4), of one GPU.

    The kernel counts FLOPs at the layers' peak: those of the output layer, which is not
    quantised, are scaled to it.
    """
    weight, head = DTYPE_BYTES[model.dtype], DTYPE_BYTES[model.head_dtype]
    slower = device.peak(model.compute_dtype) / device.peak(model.head_dtype)

    def row(inner: float, outer: float, kind: int) -> list[float]:
        flops, size = 2.0 * inner * outer, inner * outer * weight
        return [flops, size, (inner + outer) * WIDTH, float(kind)]

    queries = model.heads * model.head_dim / tp
    others = 2 * model.kv_heads * model.head_dim / min(tp, model.kv_heads)
    kind = 1 if model.experts else 0
    rows = [
        row(model.hidden, queries + others, 0),
        row(queries, model.hidden, 0),
        row(model.hidden, (2 if model.gated else 1) * model.ffn / tp, kind),
        row(model.ffn / tp, model.hidden, kind),
        row(model.hidden, model.vocab / tp, 2),
    ]
    rows[-1][0] *= slower
    rows[-1][1] *= head / weight
    if model.experts:
        rows.append(row(model.hidden, model.experts, 0))
    return np.array(rows)


def _rates(model: Architecture, device: Gpu, tp: int) -> np.ndarray:
    """The vector of `roofline_kernels`, shape (RATES,)."""
    rates = np.zeros(kernels.RATES)
    rates[kernels.FLOP] = 1.0 / (device.peak(model.compute_dtype) * device.compute)
    rates[kernels.BYTE] = 1.0 / (device.bandwidth * device.streaming)
    rates[kernels.CACHE_BYTE] = 1.0 / (device.bandwidth * device.cache)
    rates[kernels.ATTENTION_FLOP] = 1.0 / (device.peak("bfloat16") * device.attention)
    rates[kernels.LAYER] = LAYER_KERNELS * device.launch
    # Two norms read and write the stream and the residual; rotation and activation as they say.
    wide = (3 if model.gated else 2) * model.ffn * max(model.active, 1)
    rates[kernels.TOKEN] = (8 * model.hidden + (2 * model.qkv_width + wide) / tp) * WIDTH
    rates[kernels.WORD] = SAMPLER_PASSES * 4.0 * model.vocab
    rates[kernels.ROW] = 2.0 * WIDTH * model.hidden
    rates[kernels.STEP] = device.step
    if tp > 1:
        rates[kernels.HOP] = 2 * (tp - 1) * device.link_latency
        rates[kernels.HOP_BYTE] = 1.0 / device.link_bandwidth
        rates[kernels.SUM_BYTES] = 2 * (tp - 1) / tp * model.hidden * WIDTH
        rates[kernels.GATHER_BYTES] = (tp - 1) / tp * model.vocab * WIDTH
    shared = min(tp, model.kv_heads)
    rates[kernels.LAYERS] = model.layers
    rates[kernels.READ_FLOPS] = 4.0 * model.heads * model.head_dim / tp
    rates[kernels.READ_BYTES] = model.kv_bytes / model.layers / shared
    return rates
