"""Startup and shutdown of the gateway: answers before a fleet serves, and after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pigou.wire.errors import APIError

#: Seconds after which a client may try again.
STARTING_RETRY_AFTER_S = 2

#: Takes the name of a part (a worker, or the gateway) and its stage.
StageListener = Callable[[str, str], None]
_LOOK_S = 0.02
#: Seconds after which a client may try again, at the gateway that replaces this one.
_SHUTDOWN_RETRY_AFTER_S = 1


class Startup:
    """Tracks the stages of a starting fleet's parts."""

    def __init__(self, listener: StageListener | None = None) -> None:
        self.active = False
        self.stages: dict[str, str] = {}  # the last stage of each part, by its name
        self._listener = listener

    def report(self, part: str, stage: str) -> None:
        """Record a part's stage."""
        if self.stages.get(part) == stage:
            return
        self.stages[part] = stage
        if self.active and self._listener is not None:
            self._listener(part, stage)

    def check(self, can_serve: bool) -> None:
        """Raise `APIError` 503 with the stages during startup."""
        if not self.active or can_serve:
            return
        stages = "; ".join(f"{part}: {stage}" for part, stage in self.stages.items())
        raise APIError(
            503,
            f"The fleet is starting ({stages or 'no worker has begun'}); send the request again "
            f"in {STARTING_RETRY_AFTER_S} seconds.",
            retry_after=STARTING_RETRY_AFTER_S,
        )


class Shutdown:
    """Tracks requests under way, and ends them with an error at shutdown."""

    def __init__(self) -> None:
        self.begun = False  # no more requests are taken
        self._over = False
        self._tasks: dict[asyncio.Task[object], int] = {}
        self._cut: set[asyncio.Task[object]] = set()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Track the current task's request (context)."""
        task = _current()
        self._tasks[task] = task.cancelling()
        try:
            yield
        finally:
            del self._tasks[task]
            self._cut.discard(task)

    @contextmanager
    def reports_end(self) -> Iterator[None]:
        """Raise the end once as `APIError` 503 within `under_way` (context)."""
        if self._over:
            raise _over()
        try:
            yield
        except asyncio.CancelledError:
            task = _current()
            if task in self._cut and task.uncancel() <= self._tasks[task]:
                self._cut.discard(task)
                raise _over() from None
            raise  # the client is gone

    def check_open(self) -> None:
        """Raise `APIError` 503 during shutdown."""
        if self.begun:
            raise APIError(
                503,
                "This gateway is shutting down: send the request to another, or again later.",
                retry_after=_SHUTDOWN_RETRY_AFTER_S,
            )

    async def idle(self, timeout_s: float) -> None:
        """Wait until no request is under way, up to a limit in seconds."""
        deadline = time.monotonic() + timeout_s
        while self._tasks and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)

    def cut(self) -> int:
        """Cut the requests under way; return their number."""
        self._over = True
        self._cut = set(self._tasks)
        for task in self._cut:
            task.cancel()
        return len(self._cut)


def _current() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _over() -> APIError:
    return APIError(
        503,
        "This gateway is shutting down, and the time for requests under way is over: send the "
        "request to another, or again later.",
        retry_after=_SHUTDOWN_RETRY_AFTER_S,
    )
