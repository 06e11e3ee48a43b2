"""What the system says of a process: whether it is stopped, and whether it computes."""

from __future__ import annotations

from pathlib import Path


class ProcessFacts:
    """Looks at a process of this machine, by `/proc` (proc(5)); without one nothing is known."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/stat")
        self._ticks = -1

    def look(self) -> tuple[bool, bool]:
        """Return whether the process is stopped, and whether it has computed since last time."""
        try:
            text = self._path.read_text(encoding="ascii", errors="replace")
        except OSError:
            return False, False
        # The name, in parentheses, may hold anything.
        fields = text.rpartition(")")[2].split()
        if len(fields) < 13:
            return False, False
        ticks = int(fields[11]) + int(fields[12])
        computed = 0 <= self._ticks < ticks
        self._ticks = ticks
        return fields[0] == "T" and not computed, computed
