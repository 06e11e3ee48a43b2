"""The engine's heartbeat: tells slow from hung."""

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

#: Environment variable that enables heartbeats on stdout.
ENABLED_VARIABLE = "PIGOU_HEARTBEAT"
#: Seconds between heartbeats.
INTERVAL_S = 1.0
#: Environment variable with the parent's process id, to detect a parent gone before the first look.
PARENT = "PIGOU_PARENT"
#: Seconds between checks.
_INTERVAL = 0.25
#: Seconds between SIGTERM and the forced end.
_GRACE = 2.0


class Heartbeat:
    """Progress of the engine thread, its only writer; readable by any thread."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._last_ns = clock()
        self.beats = 0
        self.busy = False
        self.planned_tokens = 0
        self.steps = 0

    def beat(self) -> None:
        """Record progress."""
        self.beats += 1
        self._last_ns = self._clock()

    def work(self, planned_tokens: int = 0) -> None:
        """Record the start of work."""
        self.planned_tokens = planned_tokens
        self.busy = True
        self.beat()

    def rest(self) -> None:
        """Record that the thread waits for commands."""
        self.planned_tokens = 0
        self.busy = False
        self.beat()

    def view(self) -> dict[str, Any]:
        """Return the engine's part of `/health`; `age_s` is the time since the last beat."""
        return {
            "busy": self.busy,
            "beats": self.beats,
            "age_s": round((self._clock() - self._last_ns) / SECOND, 3),
            "steps": self.steps,
            "planned_tokens": self.planned_tokens,
        }


def publish(heartbeat: Heartbeat) -> None:
    """Print the heartbeat every second from a thread, if the parent process enabled it."""
    if os.environ.get(ENABLED_VARIABLE):
        threading.Thread(target=_print, args=(heartbeat,), name="heartbeat", daemon=True).start()


def _print(heartbeat: Heartbeat) -> None:
    while True:
        line = msgspec.json.encode({"heartbeat": heartbeat.view()}) + b"\n"
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except (OSError, ValueError):  # parent gone, or stream closed
            return
        time.sleep(INTERVAL_S)


def watch_parent() -> None:
    """Watch the parent process in a thread; end this process once it is gone."""
    parent = int(os.environ.get(PARENT) or os.getppid())
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL)
    # No need to drain: the second signal skips it.
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)
