"""The bill of a fleet: usage by tenant, and its allocation, which sums to the whole cost.

Idle GPUs and unfinished prompts are allocated by usage, storage by tokens saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pigou.cost.usage import Usage, UsageKey, total, usd_per_million

KWH_JOULES = 3.6e6
#: Fields that add up over fleets.
_SUMS = ("gpu_s", "gpu_usd", "idle_usd", "open_usd", "storage_usd", "joules", "idle_joules",
         "open_joules")  # fmt: skip


@dataclass(frozen=True, slots=True)
class FleetBill:
    """Cost of a fleet over some time."""

    seconds: float
    gpu_s: float  # GPU-seconds of running workers
    gpu_usd: float
    idle_usd: float
    open_usd: float
    storage_usd: float
    joules: float  # energy of all GPUs, the parts below included
    idle_joules: float
    open_joules: float
    usages: Mapping[UsageKey, Usage]
    attained: float | None = None  # share of requests inside the objective; None without one
    has_tolls: bool = True  # whether marginal dollars are known for all workers

    @property
    def usd(self) -> float:
        """Dollars of GPUs and storage."""
        return self.gpu_usd + self.storage_usd

    @property
    def total(self) -> Usage:
        """Usage of all keys."""
        return total(list(self.usages.values()))

    @property
    def utilisation(self) -> float:
        """Share of the GPU dollars that was not idle."""
        return 1.0 - self.idle_usd / self.gpu_usd if self.gpu_usd > 0 else 0.0

    def by(self, *labels: str) -> dict[tuple[str, ...], Usage]:
        """Return usages grouped by fields of `UsageKey`."""
        sums: dict[tuple[str, ...], Usage] = {}
        for key, usage in self.usages.items():
            own = tuple(getattr(key, label) for label in labels)
            sums.setdefault(own, Usage()).add(usage)
        return sums

    def allocation(self, usage: Usage, whole: Usage) -> tuple[float, float]:
        """Return dollars and joules of a usage with its part of the idle cost of `whole`."""
        share = usage.usd / whole.usd if whole.usd > 0 else 0.0
        stored = usage.cached_tokens / whole.cached_tokens if whole.cached_tokens else share
        usd = usage.usd + (self.idle_usd + self.open_usd) * share + self.storage_usd * stored
        energy = usage.joules / whole.joules if whole.joules > 0 else share
        return usd, usage.joules + (self.idle_joules + self.open_joules) * energy

    def document(self, shown: Callable[[UsageKey], bool] = lambda _: True) -> dict[str, Any]:
        """Return the bill as JSON builtins, with the usages that are `shown`; totals cover all."""
        whole = self.total
        rows = [
            {**key._asdict(), **self._row(usage, whole)}
            for key, usage in sorted(self.usages.items())
            if shown(key)
        ]
        cached_usd = whole.restore_usd + self.storage_usd
        inside = self.attained or 0.0
        output = usd_per_million(self.usd, whole.output_tokens)
        return {
            "seconds": self.seconds,
            "gpu_s": self.gpu_s,
            "usd": self.usd,
            "usage_usd": whole.usd,
            "idle_usd": self.idle_usd,
            "open_usd": self.open_usd,
            "storage_usd": self.storage_usd,
            "marginal_usd": whole.marginal_usd if self.has_tolls else None,
            "utilisation": self.utilisation,
            "attained": self.attained,
            "usd_per_million": {
                "uncached_input": usd_per_million(whole.prefill_usd, whole.uncached_tokens),
                "cached_input": usd_per_million(cached_usd, whole.cached_tokens),
                "output": usd_per_million(whole.decode_usd, whole.output_tokens),
                "all_per_output": output,
                "all_per_output_at_slo": output / inside if inside and output is not None else None,
            },
            "usages": rows,
        }

    def energy_document(self) -> dict[str, Any]:
        """Return the energy as JSON builtins."""
        whole = self.total
        tokens = whole.output_tokens
        return {
            "joules": self.joules,
            "idle_joules": self.idle_joules,
            "prefill_joules": whole.prefill_joules,
            "decode_joules": whole.decode_joules,
            "joules_per_output_token": self.joules / tokens if tokens else None,
            "kwh_per_million_output": self.joules / tokens * 1e6 / KWH_JOULES if tokens else None,
            "mean_watts": self.joules / self.seconds if self.seconds > 0 else 0.0,
        }

    def _row(self, usage: Usage, whole: Usage) -> dict[str, Any]:
        usd, joules = self.allocation(usage, whole)
        document = usage.document() | {"allocated_usd": usd, "allocated_joules": joules}
        if not self.has_tolls:
            document["marginal_usd"] = None
        return document


def sum_bills(bills: Sequence[FleetBill]) -> FleetBill:
    """Return the joint bill of several fleets; attainment is kept for one fleet alone."""
    if len(bills) == 1:
        return bills[0]
    usages: dict[UsageKey, Usage] = {}
    for bill in bills:
        for key, usage in bill.usages.items():
            usages.setdefault(key, Usage()).add(usage)
    return FleetBill(
        seconds=max((bill.seconds for bill in bills), default=0.0),
        **{field: sum(getattr(bill, field) for bill in bills) for field in _SUMS},
        usages=usages,
        has_tolls=all(bill.has_tolls for bill in bills),
    )
