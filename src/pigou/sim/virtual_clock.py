"""The virtual clock: a heap of events in integer nanoseconds, in one order whatever happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Protocol

from pigou.request import SECOND

#: When simulations begin: the cores take a time of 0 for "never".
EPOCH = SECOND

Event = Callable[[int], None]


class Completion(Protocol):
    """A wait condition."""

    @property
    def done(self) -> bool:
        """Whether it is."""
        ...


class Phase(IntEnum):
    """Order of simultaneous events: workers plan last, so plans can be cut at step ends."""

    FAULT = 0
    STEP = 1
    LINK = 2
    SEND = 3
    TICK = 4
    PLAN = 9


class Clock:
    """Runs events in the order of (time, phase, key); keys are owners, such as workers."""

    def __init__(self) -> None:
        self.now = EPOCH
        self.position: tuple[int, int] = (0, 0)
        self.events = 0
        self._heap: list[tuple[int, int, int, int, Event]] = []
        self._count = 0

    def at(self, time: int, phase: int, key: int, event: Event) -> None:
        """Schedule `event(time)`; raises ValueError for a past time."""
        if time < self.now:
            raise ValueError(f"time is {time}; now it is {self.now} already")
        self._count += 1
        heappush(self._heap, (time, phase, key, self._count, event))

    def last(self, now: int) -> bool:
        """Whether no other event is scheduled for this time."""
        return not self._heap or self._heap[0][0] > now

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._heap:
            return False
        time, phase, key, _, event = heappop(self._heap)
        self.now = time
        self.position = (phase, key)
        self.events += 1
        event(time)
        return True

    def run(self, until: Completion, max_events: int) -> bool:
        """Run at most `max_events` events until `until.done`; return whether it is."""
        heap, pop = self._heap, heappop
        for _ in range(max_events):
            if until.done or not heap:
                break
            time, phase, key, _, event = pop(heap)
            self.now = time
            self.position = (phase, key)
            self.events += 1
            event(time)
        return until.done


class Inbox:
    """Commands of a worker, in order, each due after a number of steps."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Event]] = deque()

    @property
    def next(self) -> int:
        """After how many steps the first is done; there must be one."""
        return self.waiting[0][0]

    def put(self, after: int, command: Event) -> None:
        """Queue a command until `after` more steps are computed."""
        self.waiting.append((after, command))

    def until(self, steps: int) -> int:
        """Return how many are done after `steps` computed steps."""
        return sum(after <= steps for after, _ in self.waiting)

    def open(self, steps: int, now: int, idle: Callable[[], bool]) -> None:
        """Run the calls due after `steps` steps, or all of them once the worker is idle."""
        waiting, rests = self.waiting, idle()
        while waiting and (rests or waiting[0][0] <= steps):
            waiting.popleft()[1](now)
            rests = rests or idle()
