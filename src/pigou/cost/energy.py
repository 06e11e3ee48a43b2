"""GPU energy: P = P_idle + (P_max - P_idle) u^gamma, with u the utilisation.

In decode u is MBU; in prefill MFU over `FULL_MFU`, at most 1: power peaks below full FLOP/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: Board power limits by data sheet, watts. `cpu` is two server cores, assumed.
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
#: Fitted to half of Splitwise's A100 configurations; decode is off by 4% on the other half (`python
#: -m benchmarks.capacity.energy`). Assumed for other GPUs.
IDLE_SHARE, GAMMA, FULL_MFU = 0.217, 0.79, 0.44
KWH_JOULES = 3.6e6


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Watts of one GPU by utilisation."""

    max_w: float
    idle_share: float = IDLE_SHARE  # idle watts over `max_w`
    gamma: float = GAMMA  # exponent of utilisation
    full_mfu: float = FULL_MFU  # prefill MFU at which `max_w` is reached

    @property
    def idle_w(self) -> float:
        """Idle watts."""
        return self.max_w * self.idle_share

    def watts(self, use: float) -> float:
        """Return the watts at a utilisation, clipped to 0..1."""
        part: float = min(max(use, 0.0), 1.0) ** self.gamma
        return self.idle_w + (self.max_w - self.idle_w) * part

    def decode_watts(self, mbu: float) -> float:
        """Return decode watts at a memory bandwidth utilisation."""
        return self.watts(mbu)

    def prefill_watts(self, mfu: float) -> float:
        """Return prefill watts at an MFU."""
        return self.watts(mfu / self.full_mfu)


def joules_per_token(watts: float, tok_s: float) -> float:
    """Return joules per token: watts over tokens a second."""
    return watts / tok_s


def kwh_per_million(joules_of_token: float) -> float:
    """Return kilowatt-hours per million tokens."""
    return joules_of_token * 1e6 / KWH_JOULES
