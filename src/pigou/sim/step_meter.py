"""What the steps of a simulated worker took: those with prompts in them, and those without."""

from __future__ import annotations

from dataclasses import dataclass

from pigou.engine.plan import Plan


@dataclass(slots=True)
class StepMeter:
    """Counts of one worker, since its start."""

    prefill_steps: int = 0
    prefill_ns: int = 0
    prefill_tokens: int = 0
    # the longest step without a prompt since `take_stall`; of steps that were planned together, the
    # mean.
    decode_stall_ns: int = 0

    def count(self, plan: Plan, steps: int, ns: int) -> None:
        """Count so many steps of a plan, which took so many nanoseconds."""
        if plan.counts.item(-1) > 1:
            self.prefill_steps += steps
            self.prefill_ns += ns
            self.prefill_tokens += steps * plan.chunk_tokens
        elif steps and ns // steps > self.decode_stall_ns:
            self.decode_stall_ns = ns // steps

    def take_stall(self) -> int:
        """Return `decode_stall_ns`, and begin anew."""
        stall_ns, self.decode_stall_ns = self.decode_stall_ns, 0
        return stall_ns
