"""Price lists: dollars per GPU-hour and per gigabyte of storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from pigou.config import ConfigError, key_values
from pigou.models.gpus import GPUS

#: Hours of a month as clouds count them: 8,760 / 12.
MONTH_HOURS = 730.0
HOUR_S = 3600.0
GB = 1e9
#: Dollars per GPU-hour.
GPU_HOUR_USD: Mapping[str, float] = MappingProxyType(
    {device.name: device.usd_hour for device in GPUS.values()}
)
#: Dollars per gigabyte (10^9 bytes) and month by storage kind; assumed.
STORAGE_USD: Mapping[str, float] = MappingProxyType({"dram": 3.0, "nvme": 0.1, "object": 0.023})
#: Storage kind of a tier by its name; others count as `nvme`.
TIER_STORAGE: Mapping[str, str] = MappingProxyType(
    {
        "host": "dram", "dram": "dram", "cpu": "dram", "memory": "dram", "bucket": "object",
        "object": "object", "s3": "object",
    }
)  # fmt: skip


class PriceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prices of GPUs and storage. GPU memory is paid with the GPU-hour."""

    # dollars per GPU-hour by kind, as in `GPU_HOUR_USD`
    gpu_hour: dict[str, float] = msgspec.field(default_factory=lambda: dict(GPU_HOUR_USD))
    # dollars per gigabyte and month, as in `STORAGE_USD`
    storage: dict[str, float] = msgspec.field(default_factory=lambda: dict(STORAGE_USD))

    def gpu(self, kind: str) -> float:
        """Return dollars per GPU-hour; raises ConfigError for an unlisted kind."""
        if kind not in self.gpu_hour:
            raise ConfigError(
                f"prices has none for GPU {kind!r}; give it: --prices {kind or 'NAME'}=DOLLARS"
            )
        return self.gpu_hour[kind]

    def byte_second(self, storage: str) -> float:
        """Return dollars per byte and second of storage."""
        return self.storage[storage] / GB / (MONTH_HOURS * HOUR_S)

    def tier_usd_per_s(self, tiers: Mapping[str, float]) -> float:
        """Return dollars a second of provisioned tiers: bytes by tier name."""
        return sum(
            size * self.byte_second(TIER_STORAGE.get(name, "nvme")) for name, size in tiers.items()
        )


def read_price_list(text: str, gpu_name: Callable[[str], str]) -> PriceList:
    """Read `default`, or overrides like `H100=2.5,dram=3`; raises ConfigError for others."""
    prices = {} if text.strip() == "default" else read_prices(text, gpu_name)
    gpus = {name: usd for name, usd in prices.items() if name not in STORAGE_USD}
    storage = {name: usd for name, usd in prices.items() if name in STORAGE_USD}
    return PriceList(gpu_hour={**GPU_HOUR_USD, **gpus}, storage={**STORAGE_USD, **storage})


def read_prices(text: str, gpu_name: Callable[[str], str]) -> dict[str, float]:
    """Read `H100=2.5,dram=3,...` without defaults; raises as `read_price_list`."""
    prices: dict[str, float] = {}
    form = (
        "default, or NAME=DOLLARS: a GPU's hour (H100=2.5), or a gigabyte-month of "
        f"{', '.join(STORAGE_USD)}"
    )
    for given, value in key_values("prices", text, form).items():
        try:
            usd = float(value)
        except ValueError:
            usd = -1.0
        if not 0.0 <= usd < math.inf:
            raise ConfigError(f"prices has {given}={value}; write {form}")
        name = given if given in STORAGE_USD else gpu_name(given)
        if name in prices:
            raise ConfigError(f"prices has {name} twice; give it once")
        prices[name] = usd
    return prices
