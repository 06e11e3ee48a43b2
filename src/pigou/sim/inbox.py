"""The inbox of a simulated worker: what reached it, and waits for the end of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pigou.sim.clock import Event


class Inbox:
    """Commands in the order in which they came, each after so many steps of the worker's life.

    Attributes:
        waiting: those that are still to be done, with the steps.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.waiting: deque[tuple[int, Event]] = deque()

    @property
    def next(self) -> int:
        """After how many steps the first is done; there must be one."""
        return self.waiting[0][0]

    def put(self, after: int, command: Event) -> None:
        """Let a command wait until so many steps were computed."""
        self.waiting.append((after, command))

    def until(self, steps: int) -> int:
        """Return how many will have been done once so many steps were computed."""
        return sum(after <= steps for after, _ in self.waiting)

    def open(self, steps: int, now: int, idle: Callable[[], bool]) -> None:
        """Do what had to wait until now, or everything once there is nothing to wait for.

        Args:
            steps: that were computed.
            now: nanoseconds.
            idle: whether nobody computes, so that no step will end.
        """
        waiting, rests = self.waiting, idle()
        while waiting and (rests or waiting[0][0] <= steps):
            waiting.popleft()[1](now)
            rests = rests or idle()
