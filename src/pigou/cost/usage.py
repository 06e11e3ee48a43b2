"""Usage: what requests of one tenant, model and class took of the fleet, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from pigou.cost.token_cost import number_or_none, usd_per_million


class UsageKey(NamedTuple):
    """Whose usage it is."""

    tenant: str
    model: str
    workload: str  # their class


@dataclass(slots=True)
class Usage:
    """Tokens, GPU-seconds, dollars and joules of some requests, so far.

    Attributes:
        prefill_gpu_s, restore_gpu_s, decode_gpu_s: GPUs x seconds of prompts, of reading their
            cached beginning, and of streams.
        prefill_joules, decode_joules: energy; restoring is within prefill.
    """

    requests: int = 0
    uncached_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_gpu_s: float = 0.0
    restore_gpu_s: float = 0.0
    decode_gpu_s: float = 0.0
    prefill_usd: float = 0.0
    restore_usd: float = 0.0
    decode_usd: float = 0.0
    # what these requests added: prompts whole, of steps what was read for them.
    marginal_usd: float = 0.0
    prefill_joules: float = 0.0
    decode_joules: float = 0.0

    @property
    def usd(self) -> float:
        """Dollars of GPUs in use."""
        return self.prefill_usd + self.restore_usd + self.decode_usd

    @property
    def joules(self) -> float:
        """Energy of GPUs in use."""
        return self.prefill_joules + self.decode_joules

    def add(self, other: Usage) -> None:
        """Add another usage to this one."""
        for field in fields(self):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def document(self) -> dict[str, Any]:
        """Return it as JSON builtins, with dollars for a million tokens of each kind."""
        figures = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **figures,
            "usage_usd": self.usd,
            "joules": self.joules,
            "usd_per_million": {
                "uncached_input": number_or_none(
                    usd_per_million(self.prefill_usd, self.uncached_tokens)
                ),
                "output": number_or_none(usd_per_million(self.decode_usd, self.output_tokens)),
            },
            "joules_per_output_token": (
                self.joules / self.output_tokens if self.output_tokens else None
            ),
        }


def total(usages: list[Usage]) -> Usage:
    """Return the sum of usages."""
    whole = Usage()
    for usage in usages:
        whole.add(usage)
    return whole
