"""What a grammar may cost: limits of the library, and CPU time of the engine's steps."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLParserLimits

from pigou.runtime.errors import GrammarError

_MILLISECOND = 1_000_000

#: Limits of one compilation and of one step. A step's fuel is the library's default: masks of
#: large vocabularies need it. `WorkBudget` bounds what they add up to.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    step_max_items=50_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    max_lexer_states=16_384,
    max_grammar_size=200_000,
    verbose_errors=False,
)


@dataclass(slots=True)
class Debt:
    """What one sequence's grammar took, in CPU nanoseconds.

    Attributes:
        ns: beyond its share of the steps so far.
        last_ns: for its last token.
    """

    ns: int = 0
    last_ns: int = 0


class WorkBudget:
    """Bounds the CPU time that grammars add to the engine's steps.

    A sequence's grammar may take `step_ns` for every token on average, and `burst_ns` beyond.
    All grammars together may take `shared_step_ns` for every step beyond `free_ns` for each
    sequence, and `shared_burst_ns` beyond. A grammar that overdraws either fails its own request.
    """

    def __init__(
        self,
        *,
        step_ns: int = _MILLISECOND,
        burst_ns: int = 100 * _MILLISECOND,
        free_ns: int = _MILLISECOND // 2,
        shared_step_ns: int = 2 * _MILLISECOND,
        shared_burst_ns: int = 200 * _MILLISECOND,
    ) -> None:
        """Begin without debts; all arguments are CPU nanoseconds."""
        self._step_ns, self._burst_ns = step_ns, burst_ns
        self._free_ns = free_ns
        self._shared_step_ns, self._shared_burst_ns = shared_step_ns, shared_burst_ns
        self._shared_debt_ns = 0

    def begin_step(self) -> None:
        """Note that the engine begins a step."""
        self._shared_debt_ns = max(0, self._shared_debt_ns - self._shared_step_ns)

    def check(self, debt: Debt) -> None:
        """Fail a costly sequence before its next mask, while all together took too much.

        Raises:
            GrammarError: that is so.
        """
        if self._shared_debt_ns > self._shared_burst_ns and debt.last_ns > self._free_ns:
            raise GrammarError(
                "the grammars of this worker's requests take too long together: this one's last "
                f"mask took {debt.last_ns / _MILLISECOND:.1f} ms of CPU time, and "
                f"{self._free_ns / _MILLISECOND:g} ms are free: make it simpler, or try again"
            )

    def charge(self, debt: Debt, cost_ns: int) -> None:
        """Charge the work for one token.

        Args:
            debt: of the sequence.
            cost_ns: CPU nanoseconds.

        Raises:
            GrammarError: the sequence took too much, or all together did and this is one of them.
        """
        debt.ns = max(0, debt.ns + cost_ns - self._step_ns)
        if debt.ns > self._burst_ns:
            raise GrammarError(
                "the grammar takes too long: its masks took "
                f"{(debt.ns + self._step_ns) / _MILLISECOND:.0f} ms of CPU time more than "
                f"{self._step_ns / _MILLISECOND:g} ms for every token, and at most "
                f"{self._burst_ns / _MILLISECOND:g} ms more are allowed: make it less ambiguous"
            )
        self._shared_debt_ns += max(0, cost_ns - self._free_ns)
        debt.last_ns = cost_ns
        self.check(debt)
