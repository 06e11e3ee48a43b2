"""Background tasks of a process: a failure is logged, counted, and the task starts again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

_log = logging.getLogger("pigou.background")
_R = TypeVar("_R")

#: Seconds before the first restart; doubled by each further one, up to the latter.
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 30.0
#: Characters of an error that are kept for `/workers`.
_MAX_TEXT = 200


class Backoff:
    """Waits longer after each failure, until what failed has lived for long."""

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s, self._max_s, self._next_s = min_s, max_s, min_s

    def failed(self, lived_s: float) -> float:
        """Return the backoff in seconds after a life of `lived_s`."""
        wait_s = self._min_s if lived_s > 2 * self._max_s else self._next_s
        self._next_s = min(2 * wait_s, self._max_s)
        return wait_s


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait for their ends, whatever these are."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, `timeout_s` seconds at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


@dataclass(slots=True)
class TaskState:
    """What is known of one background task."""

    name: str  # unique among the live tasks of the process
    state: str = "running"  # running, or backoff while it waits for its restart
    restarts: int = 0  # times that it failed and was started again
    error: str = ""  # last failure's message; empty before one


class Background:
    """Runs tasks and threads that must not end; each failure is logged with its traceback."""

    def __init__(
        self, min_backoff_s: float = MIN_BACKOFF_S, max_backoff_s: float = MAX_BACKOFF_S
    ) -> None:
        self._min_s = min_backoff_s
        self._max_s = max_backoff_s
        self._states: dict[str, TaskState] = {}
        self._lock = threading.Lock()

    def start(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `work` until it returns or is cancelled; restart it when it raises."""
        state = self._add(name)
        return asyncio.create_task(self._run(state, work), name=state.name)

    def thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Return a daemon thread, not started, that runs `work` in the same way."""
        return threading.Thread(target=self._run_thread, args=(name, work), name=name, daemon=True)

    def failed(self, name: str, error: BaseException) -> None:
        """Count the failure of a callback or of a task that runs once."""
        with self._lock:
            state = self._states.setdefault(name, TaskState(name))
        self._note(state, error, None)

    @property
    def restarts(self) -> int:
        """Failures of all live tasks so far."""
        return sum(state.restarts for state in self._snapshot())

    @property
    def failing(self) -> list[str]:
        """Names of tasks that wait for their restart."""
        return [state.name for state in self._snapshot() if state.state == "backoff"]

    def view(self) -> list[dict[str, Any]]:
        """Return name, state, restarts and last error of each task, for `/workers`."""
        return [
            {"name": s.name, "state": s.state, "restarts": s.restarts, "error": s.error}
            for s in self._snapshot()
        ]

    def health(self) -> dict[str, Any]:
        """Return the tasks' part of `/health`."""
        return {"restarts": self.restarts, "failing": self.failing}

    def _snapshot(self) -> list[TaskState]:
        with self._lock:
            return list(self._states.values())

    def _add(self, name: str) -> TaskState:
        with self._lock:
            unique, number = name, 2
            while unique in self._states:
                unique, number = f"{name}-{number}", number + 1
            state = self._states[unique] = TaskState(unique)
        return state

    def _drop(self, state: TaskState) -> None:
        with self._lock:
            if self._states.get(state.name) is state:
                del self._states[state.name]

    async def _run(self, state: TaskState, work: Callable[[], Awaitable[None]]) -> None:
        task, backoff = asyncio.current_task(), Backoff(self._min_s, self._max_s)
        try:
            while True:
                began = time.monotonic()
                try:
                    await work()
                    return
                except asyncio.CancelledError as error:
                    if task is None or task.cancelling():
                        raise
                    failure: BaseException = error
                except Exception as error:
                    failure = error
                wait_s = backoff.failed(time.monotonic() - began)
                self._note(state, failure, wait_s)
                await asyncio.sleep(wait_s)
                state.state = "running"
        finally:
            self._drop(state)

    def _run_thread(self, name: str, work: Callable[[], None]) -> None:
        state, backoff = self._add(name), Backoff(self._min_s, self._max_s)
        try:
            while True:
                began = time.monotonic()
                try:
                    work()
                    return
                except Exception as error:
                    wait_s = backoff.failed(time.monotonic() - began)
                    self._note(state, error, wait_s)
                time.sleep(wait_s)
                state.state = "running"
        finally:
            self._drop(state)

    def _note(self, state: TaskState, error: BaseException, wait_s: float | None) -> None:
        state.restarts += 1
        state.error = f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        then = "" if wait_s is None else f"; it starts again in {wait_s:g} s"
        if wait_s is not None:
            state.state = "backoff"
        _log.error("background task %s failed%s", state.name, then, exc_info=error)


def run_async(main: Coroutine[Any, Any, _R]) -> _R:
    """Run a coroutine on uvloop, or on asyncio's own loop where the platform has no other."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
