"""A planner's entries of a journal: written, and replayed."""

from __future__ import annotations

from typing import Any

from pigou.config import ConfigError
from pigou.control.journal import JournalEntry, encoded_decisions
from pigou.control.planner.messages import PlannerDecision, PlannerWindow
from pigou.control.planner.planner import Planner
from pigou.control.planner.record import PlannerStarted, decide, writable


def planner_entry(
    message: PlannerStarted | PlannerWindow, now: int, decision: PlannerDecision | None = None,
    error: str = "",
) -> JournalEntry:  # fmt: skip
    """Return the entry of what a planner was made of, or of a window and its decision."""
    out = [] if decision is None else [decision]
    return JournalEntry(now=now, message=writable(message), out=out, error=error)


class PlannerReplay:
    """Makes a planner's decisions again, from the entries of a run."""

    def __init__(self) -> None:
        self._planner: Planner | None = None

    @staticmethod
    def takes(entry: JournalEntry) -> bool:
        """Whether an entry is a planner's."""
        return isinstance(entry.message, PlannerStarted | PlannerWindow)

    def replay(self, entry: JournalEntry) -> tuple[list[Any], str]:
        """Return the `encoded_decisions` of an entry, and the error that the planner raised.

        Raises:
            ConfigError: the planner is not there, or its start is missing.
        """
        message = entry.message
        if isinstance(message, PlannerStarted):
            self._planner = message.make()
            return [], ""
        assert isinstance(message, PlannerWindow)
        if self._planner is None:
            raise ConfigError("journal: a planner's window comes before the planner's start")
        try:
            return encoded_decisions([decide(self._planner, message)]), ""
        except Exception as error:
            return [], type(error).__name__
