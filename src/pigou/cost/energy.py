"""Energy: watts of a GPU by its use, joules of tokens.

P = P_idle + (P_max - P_idle) u^gamma. In decode, u is the part of the memory bandwidth that is
used (MBU). In prefill it is the part of the peak FLOP/s (MFU) over `FULL_MFU`, at most 1: power is
at its limit well before the peak of the data sheet is reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: Watts of each GPU's board at most, by data sheet. `cpu` is two cores of a server, assumed.
MAX_WATTS: Mapping[str, float] = MappingProxyType(
    {
        "A100": 400.0, "A100-SXM4-40GB": 400.0, "A100-PCIE-80GB": 300.0, "A100-PCIE-40GB": 250.0,
        "H100": 700.0, "H100-PCIE": 350.0, "H100-NVL": 400.0, "H200": 700.0, "H200-NVL": 600.0,
        "B200": 1000.0, "B300": 1400.0, "GB200": 1200.0, "H20": 400.0, "H800": 700.0,
        "MI300X": 750.0, "MI325X": 1000.0, "A10": 150.0, "A10G": 150.0, "L4": 72.0, "T4": 70.0,
        "RTX5090": 575.0, "L40S": 350.0, "RTX4090": 450.0, "RTXPRO6000": 600.0,
        "cpu": 14.0,
    }
)  # fmt: skip
#: Of the even half of the A100 configurations that Splitwise measured; on the other half, decode is
#: off by 4% on average (`python -m benchmarks.capacity.energy`). Other GPUs are assumed alike.
IDLE_SHARE, GAMMA, FULL_MFU = 0.217, 0.79, 0.44
KWH_JOULES = 3.6e6


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Watts of one GPU by its use."""

    max_w: float
    idle_share: float = IDLE_SHARE  # of `max_w`, without any
    gamma: float = GAMMA  # exponent of the use
    full_mfu: float = FULL_MFU  # MFU of prefill at which `max_w` is reached

    @property
    def idle_w(self) -> float:
        """Watts without use."""
        return self.max_w * self.idle_share

    def watts(self, use: float) -> float:
        """Return the watts at a use of 0 to 1; beyond, those of the nearer end."""
        part: float = min(max(use, 0.0), 1.0) ** self.gamma
        return self.idle_w + (self.max_w - self.idle_w) * part

    def decode_watts(self, mbu: float) -> float:
        """Return the watts while tokens are decoded at a part of the memory bandwidth."""
        return self.watts(mbu)

    def prefill_watts(self, mfu: float) -> float:
        """Return the watts while prompts are computed at a part of the peak FLOP/s."""
        return self.watts(mfu / self.full_mfu)


def joules_per_token(watts: float, tok_s: float) -> float:
    """Return the joules of a token: watts over tokens a second."""
    return watts / tok_s


def kwh_per_million(joules_of_token: float) -> float:
    """Return the kilowatt-hours of a million tokens: joules of one / 3.6."""
    return joules_of_token * 1e6 / KWH_JOULES
