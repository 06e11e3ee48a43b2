"""A worker that ends when the process that started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time

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
