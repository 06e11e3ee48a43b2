"""The engine's heartbeat: how a worker tells slow from hung."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from pigou.request import SECOND

#: Environment variable by which a fleet asks for heartbeats on the standard output.
ENABLED_VARIABLE = "PIGOU_HEARTBEAT"
#: Seconds between two of them.
INTERVAL_S = 1.0


class Heartbeat:
    """Progress of the engine thread, which alone writes it; any thread reads it."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._last_ns = clock()
        self.beats = 0
        self.busy = False
        self.planned_tokens = 0
        self.steps = 0

    def beat(self) -> None:
        """Note progress."""
        self.beats += 1
        self._last_ns = self._clock()

    def work(self, planned_tokens: int = 0) -> None:
        """Note that something begins."""
        self.planned_tokens = planned_tokens
        self.busy = True
        self.beat()

    def rest(self) -> None:
        """Note that the thread begins to wait for a command."""
        self.planned_tokens = 0
        self.busy = False
        self.beat()

    def view(self) -> dict[str, Any]:
        """Return what `/health` says of the engine; `age_s` is the last beat's."""
        return {
            "busy": self.busy,
            "beats": self.beats,
            "age_s": round((self._clock() - self._last_ns) / SECOND, 3),
            "steps": self.steps,
            "planned_tokens": self.planned_tokens,
        }


def publish(heartbeat: Heartbeat) -> None:
    """Print the heartbeat every second, from a thread of its own, if the parent asked for it.

    It reaches the parent also while the event loop is too slow to answer `/health`.
    """
    if os.environ.get(ENABLED_VARIABLE):
        threading.Thread(target=_print, args=(heartbeat,), name="heartbeat", daemon=True).start()


def _print(heartbeat: Heartbeat) -> None:
    while True:
        line = msgspec.json.encode({"heartbeat": heartbeat.view()}) + b"\n"
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except (OSError, ValueError):  # the parent is gone, or the stream closed
            return
        time.sleep(INTERVAL_S)


#: Environment variable with the parent's process id: a parent that is gone before this process
#: looks for the first time would not be missed otherwise.
PARENT = "PIGOU_PARENT"
#: Seconds between looks.
_INTERVAL = 0.25
#: Seconds from the polite signal to the end.
_GRACE = 2.0


def watch_parent() -> None:
    """Watch the parent in a thread; once it is gone, end this process, politely or not."""
    parent = int(os.environ.get(PARENT) or os.getppid())
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL)
    # Nobody is left to drain for: the second signal ends the wait.
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)
