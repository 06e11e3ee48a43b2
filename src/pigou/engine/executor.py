"""The face of whatever computes a plan: a model, or a timing model."""

from __future__ import annotations

from typing import Protocol

from pigou.engine.plan import Plan, Result


class Executor(Protocol):
    """Computes plans; a real one also keeps token ids and samples, a simulated one only time."""

    def execute(self, plan: Plan) -> Result:
        """Do the plan's moves, then its steps; return at the first sequence that ends.

        Args:
            plan: from `EngineCore.schedule`; block ids are read from `EngineCore.tables`.

        Returns:
            How far it came, and who ended.
        """
        ...
