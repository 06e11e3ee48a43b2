"""What computes tokens for the engine thread: an executor that keeps token ids and samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pigou.engine.plan import Plan, Result
from pigou.request import BlockHashes
from pigou.runtime.step_output import StepOutput
from pigou.sampling import SamplingParams

if TYPE_CHECKING:
    from pigou.runtime.structured_output import GrammarState

#: Is called after each step; returns whether the plan's next steps may go on.
OnStep: TypeAlias = Callable[[StepOutput], bool]


class Backend(Protocol):
    """Computes plans; called from the engine thread only. `TorchExecutor` is one."""

    def set_beat(self, beat: Callable[[], None]) -> None:
        """Call `beat` while a step makes progress, at least once a second where that is known."""

    def add(
        self,
        request: str,
        tokens: list[int],
        params: SamplingParams,
        *,
        seed: bytes,
        resume: int = 0,
        hashes: BlockHashes | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        """Take a request up, before it is planned.

        Args:
            hashes: that the core was told; None stands for all full blocks of `tokens`.
            grammar: state of `params.grammar` behind the resumed tokens; None without one.

        Raises:
            ValueError: a parameter cannot be honoured (a grammar, mostly); says which.
        """

    def drop(self, request: str) -> None:
        """Forget a request; nothing, if it is not known."""

    def execute(self, plan: Plan, on_step: OnStep | None = None) -> Result:
        """Do the plan's moves, then its steps; return early where a sequence ends."""
