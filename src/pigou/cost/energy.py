"""GPU energy: P = P_idle + (P_max - P_idle) u^gamma, with u the utilisation.

In decode u is MBU; in prefill MFU over `FULL_MFU`, at most 1: power peaks below full FLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

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
