"""GPUs: peaks of data sheets, the part of them that is reached, and the KV blocks that fit.

Peaks are of dense matrix products with float32 accumulation, from NVIDIA's and AMD's data sheets of
each product. Efficiencies are measured figures of others or of this project; each names its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pigou.config import ConfigError, check_bounds
from pigou.models.architecture import Architecture
from pigou.models.quantisation import DTYPE_BYTES

TERA, GIGA, GIB = 1e12, 1e9, 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    name: str
    flops: Mapping[str, float] = field(hash=False)  # FLOP/s at most, by number format
    bandwidth: float  # bytes a second from its memory at most
    memory: int  # bytes of its memory, as the driver reports them
    link_bandwidth: float  # bytes a second to another device of its node, one way
    link_latency: float  # seconds until the first byte arrives there, software included
    compute: float  # part of `flops` that large matrix products reach
    streaming: float  # part of `bandwidth` that reading weights reaches
    cache: float  # part of `bandwidth` that reading the KV cache of many short sequences reaches
    attention: float  # part of `flops` that attention over prompts reaches
    launch: float = 2e-6  # seconds that a kernel adds to its work, within a CUDA graph
    step: float = 0.0  # seconds that a step adds besides
    source: str = ""
    link_gpus: int = 8  # GPUs of an NVLink domain, or the PCIe slots of a host

    def all_reduce(self, size: float, devices: int) -> float:
        """Seconds to sum `size` bytes over devices in a ring.

        2 (p - 1) hops of size / p bytes (reduce-scatter, then all-gather).
        """
        hop = self.link_latency + size / devices / self.link_bandwidth
        return 2 * (devices - 1) * hop

    def all_gather(self, size: float, devices: int) -> float:
        """Seconds until each device has all `size` bytes: p - 1 hops of size / p."""
        return (devices - 1) * (self.link_latency + size / devices / self.link_bandwidth)

    def check_tp(self, tp: int) -> None:
        """Refuse tensor parallelism that reaches beyond the devices which the links join."""
        if not 1 <= tp <= self.link_gpus:
            raise ConfigError(
                f"tp is {tp}; links of {self.link_bandwidth / GIGA:g} GB/s join {self.link_gpus} "
                f"x {self.name}; give 1 to {self.link_gpus}, and more workers"
            )

    def peak(self, dtype: str) -> float:
        """FLOP/s at most for weights of a number format.

        Formats that the device does not compute in are converted to bfloat16, or float32.
        """
        for name in (dtype, "bfloat16", "float32"):
            if name in self.flops:
                return self.flops[name]
        raise ConfigError(f"gpu {self.name!r} has no peak for dtype {dtype!r}")


def _tensor(
    half: float, eight: float = 0.0, single: float = 0.0, four: float = 0.0
) -> dict[str, float]:
    """Peaks in TFLOP/s by format: 16 bits, 8 bits, 32 bits, 4 bits (float); 0 for none."""
    peaks = {"bfloat16": half * TERA, "float16": half * TERA}
    if eight:
        peaks |= {"fp8": eight * TERA, "int8": eight * TERA}
    if single:
        peaks["float32"] = single * TERA
    if four:
        peaks["fp4"] = four * TERA
    return peaks


_A100 = _tensor(312, single=19.5) | {"int8": 624 * TERA}
#: Efficiencies in the order of the fields: compute, streaming, cache, attention.
_AMPERE = (0.859, 0.90, 0.80, 0.60)
_HOPPER = (0.803, 0.90, 0.80, 0.60)
_BLACKWELL = (0.776, 0.90, 0.80, 0.50)
_CDNA = (0.546, 0.80, 0.70, 0.40)
#: Cards without NVLink.
_INFERENCE = (0.80, 0.92, 0.73, 0.60)
_MAMF = "compute: MAMF table of stas00/ml-engineering"
_FA2, _FA3 = "attention: FlashAttention-2 paper", "attention: FlashAttention-3 paper"
#: GB/s one way of PCIe with 16 lanes, of which about 80% arrive, and seconds of a hop over it.
_PCIE4, _PCIE5, _PCIE_HOP = 25 * GIGA, 50 * GIGA, 16e-6
_HOP = 0.7e-6

GPUS = {
    "a100": Gpu(
        "A100", _A100, 2039 * GIGA, int(79.15 * GIB), 300 * GIGA, _HOP, *_AMPERE,
        source=f"{_MAMF}; {_FA2}",
    ),
    "a100-40gb": Gpu(
        "A100-SXM4-40GB", _A100, 1555 * GIGA, int(39.39 * GIB), 300 * GIGA, _HOP, *_AMPERE,
        source="as A100",
    ),
    "a100-pcie-80gb": Gpu(
        "A100-PCIE-80GB", _A100, 1935 * GIGA, int(79.15 * GIB), _PCIE4, _PCIE_HOP, *_AMPERE,
        source="as A100; without NVLink bridges",
    ),
    "a100-pcie-40gb": Gpu(
        "A100-PCIE-40GB", _A100, 1555 * GIGA, int(39.39 * GIB), _PCIE4, _PCIE_HOP, *_AMPERE,
        source="as A100; without NVLink bridges",
    ),
    "h100": Gpu(
        "H100", _tensor(989.5, 1979, 67), 3350 * GIGA, int(79.11 * GIB), 450 * GIGA, _HOP,
        *_HOPPER, source=f"{_MAMF}; {_FA3}",
    ),
    "h100-pcie": Gpu(
        "H100-PCIE", _tensor(756, 1513, 51), 2039 * GIGA, int(79.11 * GIB), _PCIE5, _PCIE_HOP,
        *_HOPPER, source="as H100; without NVLink bridges",
    ),
    "h100-nvl": Gpu(
        "H100-NVL", _tensor(835, 1671, 60), 3938 * GIGA, int(93.58 * GIB), 300 * GIGA, _HOP,
        *_HOPPER, source="as H100", link_gpus=2,
    ),
    "h200": Gpu(
        "H200", _tensor(989.5, 1979, 67), 4800 * GIGA, int(139.81 * GIB), 450 * GIGA, _HOP,
        *_HOPPER, source=f"{_MAMF}; {_FA3}",
    ),
    "h200-nvl": Gpu(
        "H200-NVL", _tensor(835, 1671, 60), 4800 * GIGA, int(139.81 * GIB), 450 * GIGA, _HOP,
        *_HOPPER, source="as H200", link_gpus=4,
    ),
    "b200": Gpu(
        "B200", _tensor(2250, 4500, 75, 9000), 8000 * GIGA, int(178.36 * GIB), 900 * GIGA, _HOP,
        *_BLACKWELL, source=f"{_MAMF}; attention: as H100, less mature",
    ),
    "gb200": Gpu(
        "GB200", _tensor(2500, 5000, 80, 10_000), 8000 * GIGA, int(184.0 * GIB), 900 * GIGA, _HOP,
        *_BLACKWELL, source="as B200; a rack (NVL72) is one NVLink domain", link_gpus=72,
    ),
    "b300": Gpu(
        "B300", _tensor(2250, 4500, 75, 13_500), 8000 * GIGA, int(268.59 * GIB), 900 * GIGA, _HOP,
        *_BLACKWELL, source="as B200",
    ),
    "h20": Gpu(
        "H20", _tensor(148, 296, 44), 4000 * GIGA, int(95.58 * GIB), 450 * GIGA, _HOP,
        *_HOPPER, source="as H100",
    ),
    "h800": Gpu(
        "H800", _tensor(989.5, 1979, 67), 3350 * GIGA, int(79.11 * GIB), 200 * GIGA, _HOP,
        *_HOPPER, source="as H100",
    ),
    "mi300x": Gpu(
        "MI300X", _tensor(1307.4, 2614.9, 163.4), 5300 * GIGA, int(191.98 * GIB), 448 * GIGA, _HOP,
        *_CDNA, source=f"{_MAMF}; bandwidths and attention: assumed",
    ),
    "mi325x": Gpu(
        "MI325X", _tensor(1307.4, 2614.9, 163.4), 6000 * GIGA, int(255.98 * GIB), 448 * GIGA, _HOP,
        *_CDNA, source="as MI300X",
    ),
    "a10": Gpu(
        "A10", _tensor(125, single=31.2) | {"int8": 250 * TERA}, 600 * GIGA, int(22.49 * GIB),
        _PCIE4, _PCIE_HOP, *_INFERENCE, source="assumed, as L40S",
    ),
    "a10g": Gpu(
        "A10G", _tensor(70, single=35.0) | {"int8": 140 * TERA}, 600 * GIGA, int(22.49 * GIB),
        _PCIE4, _PCIE_HOP, *_INFERENCE, source="assumed, as L40S",
    ),
    "l4": Gpu(
        "L4", _tensor(121, 242.5, 30.3), 300 * GIGA, int(22.49 * GIB), _PCIE4, _PCIE_HOP,
        *_INFERENCE, source="assumed, as L40S",
    ),
    "t4": Gpu(  # float16 in place of bfloat16, which it has not
        "T4", _tensor(65, single=8.1) | {"int8": 130 * TERA}, 320 * GIGA, int(14.75 * GIB),
        _PCIE4 / 2, _PCIE_HOP, *_INFERENCE, source="assumed, as L40S",
    ),
    "l40s": Gpu(
        "L40S", _tensor(362, 733, 91.6), 864 * GIGA, int(44.4 * GIB), _PCIE4, _PCIE_HOP,
        *_INFERENCE, source="assumed, between RTX4090 and RTXPRO6000",
    ),
    "rtx5090": Gpu(
        "RTX5090", _tensor(209.5, 419, 104.8, 1676) | {"int8": 838 * TERA}, 1792 * GIGA,
        int(31.84 * GIB), _PCIE5, _PCIE_HOP, *_INFERENCE, source="assumed, as L40S",
    ),
    "rtx4090": Gpu(
        "RTX4090", _tensor(165.2, 330.3, 82.6), 1008 * GIGA, 25_250_627_584, 12 * GIGA, 16e-6,
        compute=0.98, streaming=0.93, cache=0.735, attention=0.65,
        source="layer tables of vLLM 0.19 (LLMServingSim): Llama-3.1-8B at 2,048 and 1 tokens",
    ),
    "rtxpro6000": Gpu(
        "RTXPRO6000", _tensor(503.8, 1007.6, 126, 2015.2), 1597 * GIGA, int(94.97 * GIB),
        17.6 * GIGA, 16.1e-6, compute=0.80, streaming=0.92, cache=0.706, attention=0.42,
        source="layer tables of vLLM 0.19 (LLMServingSim): Llama-3.1-8B at 2,048 and 1 tokens; "
        "links: 16.37 GiB/s and 16.1 us a hop, measured by LLMServingSim",
    ),
    "cpu": Gpu(
        "cpu", {"float32": 195e9, "bfloat16": 195e9}, 39.7e9, 24 * GIB, 20 * GIGA, 5e-6,
        compute=1.0, streaming=0.56, cache=0.56, attention=0.5, launch=5e-6, step=200e-6,
        source="measured on 2 cores of an AMD EPYC (Zen): float32 product of 2,048 x 2,048, sum "
        "over 256 MiB, product of one row with 256 MiB of weights",
    ),
}  # fmt: skip

#: Other names of the same devices, the driver's among them, as `_normalized` writes them.
_ALIASES = {
    "a100": ("a10080gb", "a100sxm", "a100sxm480gb", "a100sxm80gb"),
    "a100-40gb": ("a100sxm440gb", "a100sxm40gb"),
    "a100-pcie-80gb": ("a10080gbpcie", "a100pcie"),
    "a100-pcie-40gb": ("a10040gbpcie",),
    "h100": ("h10080gbhbm3", "h100sxm", "h100sxm5", "h10080gb", "h100sxm580gb", "h100sxm80gb"),
    "h100-pcie": ("h10080gbpcie", "h100pcie80gb"),
    "h100-nvl": ("h10094gbnvl", "h100nvl94gb"),
    "h200": ("h200sxm", "h200sxm141gb", "h200141gb"),
    "h200-nvl": ("h200nvl141gb",),
    "b200": ("b200sxm", "b200180gb", "b200192gb"),
    "gb200": ("gb200nvl72",),
    "b300": ("b300sxm", "b300sxm6ac"),
    "h20": ("h2096gb", "h20sxm"),
    "h800": ("h80080gbhbm3", "h800sxm"),
    "mi300x": ("mi300xoam",),
    "a10": ("a1024gb", "a10pcie"),
    "l4": ("l424gb",),
    "t4": ("t416gb",),
    "rtx5090": ("5090", "rtx509032gb"),
    "l40s": ("l40s48gb",),
    "rtx4090": ("4090", "rtx409024gb"),
    "rtxpro6000": (
        "rtxpro6000blackwell", "rtxpro6000blackwellserveredition", "rtxpro6000serveredition",
        "rtxpro600096gb",
    ),
}  # fmt: skip


def gpu(name: str) -> Gpu:
    """Find a GPU by its name; case, spaces and dashes do not matter ("RTX PRO 6000").

    A name of another device of the family ("RTX 4090 D", "H20-3e") is not taken for its neighbour.
    """
    wanted = _normalized(name)
    for prefix in ("nvidia", "tesla", "geforce", "amd", "instinct"):
        wanted = wanted.removeprefix(prefix)
    for key, device in GPUS.items():
        if wanted in (_normalized(key), *_ALIASES.get(key, ())):
            return device
    raise ConfigError(f"gpu is {name!r}; it must be one of {', '.join(GPUS)}")


def _normalized(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


#: Bytes for each token and word while vLLM's sampler runs on its dummy batch: logits (2), in
#: float32 (4), sorted (4) with their indices (8), probabilities (4), their sums (4), mask (1),
#: scattered back (4).
SAMPLER_BYTES = 31


def layer_bytes(hidden: int, wide: float, max_batched_tokens: int) -> int:
    """Return the bytes of the widest moment of a layer on a GPU.

    It holds the residual stream and its copy, and `wide` numbers of the feed-forward layer.
    """
    return int(max_batched_tokens * (2 * hidden + wide) * DTYPE_BYTES["bfloat16"])


def reserve(model: Architecture, tp: int, max_batched_tokens: int, max_seqs: int) -> int:
    """Return the bytes of activations that a GPU keeps free for the largest step.

    That is the widest moment of a layer; the sampler's tensors are kept until it is over.
    """
    layer = layer_bytes(model.hidden, model.wide / tp, max_batched_tokens)
    return layer + max_seqs * model.vocab * SAMPLER_BYTES


def kv_blocks(
    model: Architecture, device: Gpu, tp: int = 1, *, block_size: int = 16,
    utilization: float = 0.9, max_batched_tokens: int = 2048, max_seqs: int = 256,
) -> int:  # fmt: skip
    """Return the blocks of one worker: `tp` GPUs that share weights and KV heads.

    Args:
        tp: GPUs of the worker. Where it is more than the KV heads, these are held several times.
        utilization: part of the memory that the engine may take, 0 to 1.
    """
    check_bounds("utilization", utilization, gt=0, le=1)
    if tp < 1 or model.heads % tp:
        raise ConfigError(f"tp is {tp}; it must divide the {model.heads} heads of the model")
    device.check_tp(tp)
    weights = sum(size for part, size in model.parts(tp).items() if part != "norms")  # below 0.01%
    kv_memory = device.memory * utilization - weights
    kv_memory -= reserve(model, tp, max_batched_tokens, max_seqs)
    kv_memory -= max_seqs * model.state_bytes / tp
    block_bytes = model.token_bytes(tp) * block_size
    blocks = int(kv_memory // block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"model {model.name!r} ({model.weight_bytes_on(tp) / 2**30:.1f} GiB of weights a GPU) "
            f"leaves no room for KV on {tp} x {device.name} ({device.memory / 2**30:.1f} GiB); "
            f"raise tp, or take a larger gpu"
        )
    return blocks
