"""GPUs: what their makers say that they can do, and what part of it is reached.

Peaks are of dense matrix products with float32 accumulation, from NVIDIA's data sheets of each
product. Efficiencies are measured figures of others or of this project; each names its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pigou.config import ConfigError

TERA, GIGA, GIB = 1e12, 1e9, 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device.

    Attributes:
        name: of the device.
        flops: FLOP/s at most, by number format.
        bandwidth: bytes a second from its memory at most.
        memory: bytes of its memory, as the driver reports them.
        link_bandwidth: bytes a second to another device of its node, one way.
        link_latency: seconds until the first byte arrives there, software included.
        compute: part of `flops` that large matrix products reach.
        streaming: part of `bandwidth` that reading weights reaches.
        cache: part of `bandwidth` that reading the KV cache of many short sequences reaches.
        attention: part of `flops` that attention over prompts reaches.
        launch: seconds that a kernel adds to its work, within a CUDA graph.
        step: seconds that a step adds besides.
        source: where the efficiencies are from.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int
    link_bandwidth: float
    link_latency: float
    compute: float
    streaming: float
    cache: float
    attention: float
    launch: float = 2e-6
    step: float = 0.0
    source: str = ""

    def all_reduce(self, size: float, devices: int) -> float:
        """Seconds to sum `size` bytes over devices in a ring.

        2 (p - 1) hops of size / p bytes (reduce-scatter, then all-gather).
        """
        hop = self.link_latency + size / devices / self.link_bandwidth
        return 2 * (devices - 1) * hop

    def all_gather(self, size: float, devices: int) -> float:
        """Seconds until each device has all `size` bytes: p - 1 hops of size / p."""
        return (devices - 1) * (self.link_latency + size / devices / self.link_bandwidth)

    def peak(self, dtype: str) -> float:
        """FLOP/s at most for weights of a number format.

        Formats that the device does not compute in are converted to bfloat16, or float32.
        """
        for name in (dtype, "bfloat16", "float32"):
            if name in self.flops:
                return self.flops[name]
        raise ConfigError(f"gpu {self.name!r} has no peak for dtype {dtype!r}")


def _tensor(half: float, eight: float = 0.0, single: float = 0.0) -> dict[str, float]:
    """Peaks in TFLOP/s by format: 16 bits, 8 bits, 32 bits; 0 for none."""
    peaks = {"bfloat16": half * TERA, "float16": half * TERA}
    if eight:
        peaks |= {"fp8": eight * TERA, "int8": eight * TERA}
    if single:
        peaks["float32"] = single * TERA
    return peaks


GPUS = {
    "a100": Gpu(
        "A100", _tensor(312, single=19.5), 2039 * GIGA, int(79.15 * GIB), 300 * GIGA, 0.7e-6,
        compute=0.859, streaming=0.90, cache=0.80, attention=0.60,
        source="compute: MAMF table of stas00/ml-engineering; attention: FlashAttention-2 paper",
    ),
    "h100": Gpu(
        "H100", _tensor(989.5, 1979, 67), 3350 * GIGA, int(79.11 * GIB), 450 * GIGA, 0.7e-6,
        compute=0.803, streaming=0.90, cache=0.80, attention=0.60,
        source="compute: MAMF table of stas00/ml-engineering; attention: FlashAttention-3 paper",
    ),
    "h200": Gpu(
        "H200", _tensor(989.5, 1979, 67), 4800 * GIGA, int(139.81 * GIB), 450 * GIGA, 0.7e-6,
        compute=0.803, streaming=0.90, cache=0.80, attention=0.60,
        source="compute: MAMF table of stas00/ml-engineering; attention: FlashAttention-3 paper",
    ),
    "b200": Gpu(
        "B200", _tensor(2250, 4500, 75), 8000 * GIGA, int(178.36 * GIB), 900 * GIGA, 0.7e-6,
        compute=0.776, streaming=0.90, cache=0.80, attention=0.50,
        source="compute: MAMF table of stas00/ml-engineering; attention: as H100, less mature",
    ),
    "rtx4090": Gpu(
        "RTX4090", _tensor(165.2, 330.3, 82.6), 1008 * GIGA, 25_250_627_584, 12 * GIGA, 16e-6,
        compute=0.98, streaming=0.93, cache=0.735, attention=0.65,
        source="layer tables of vLLM 0.19 (LLMServingSim): Llama-3.1-8B at 2,048 and 1 tokens",
    ),
    "rtxpro6000": Gpu(
        "RTXPRO6000", _tensor(503.8, 1007.6, 126), 1597 * GIGA, int(94.97 * GIB), 17.6 * GIGA,
        16.1e-6, compute=0.80, streaming=0.92, cache=0.706, attention=0.42,
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


def gpu(name: str) -> Gpu:
    """Find a GPU by its name; case, spaces and dashes do not matter ("RTX PRO 6000").

    Raises:
        ConfigError: it is not known.
    """
    wanted = "".join(c for c in name.lower() if c.isalnum())
    for prefix in ("nvidia", "geforce"):
        wanted = wanted.removeprefix(prefix)
    for key, found in GPUS.items():
        if wanted.startswith(key):
            return found
    raise ConfigError(f"gpu is {name!r}; it must be one of {', '.join(GPUS)}")
