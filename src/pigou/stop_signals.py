"""Ends a process on SIGTERM or SIGINT: politely, within a limit, whatever its threads do.

The first signal asks, the second one ends the process at once. Signals are read by a thread of
their own, so that they count also while the event loop is stuck.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

_log = logging.getLogger("pigou.process")

#: Seconds that a server is given to end after its drain.
END_S = 12.0
#: Seconds that threads are given to end after everything else has.
THREADS_S = 2.0
#: Seconds after the limit until a thread is ended that never lets the interpreter go.
_LOCKED_S = 2.0
_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Takes SIGTERM, SIGINT and SIGHUP within `with`, in the main thread and a running loop.

    SIGHUP asks once, since terminals send it twice; where it was ignored (`nohup`), it stays so.
    """

    def __init__(
        self,
        stop: Callable[[], object],
        limit_s: float,
        insist: Callable[[], object] | None = None,
        insist_s: float = 0.0,
    ) -> None:
        """The process ends `limit_s` after the first signal, `insist_s` after the second one."""
        self._calls = (stop, insist)
        self._limits_s = (limit_s, insist_s)
        self._signals = 0
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = -1
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(_UnwaitedExecutor(thread_name_prefix="asyncio"))
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno())
        for number in _ASKING:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.getsignal(number)
        self.take()
        threading.Thread(target=self._read, name="signals", daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()  # a running limit stays: the process has yet to end

    def take(self) -> None:
        """Take the signals, also from a library that took them meanwhile."""
        for number in self._before:
            signal.signal(number, _noted)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def _read(self) -> None:
        with self._reader:
            while numbers := self._reader.recv(64):
                for number in numbers:
                    if number in self._before:
                        self._received(signal.Signals(number))

    def _received(self, number: signal.Signals) -> None:
        if self._signals and number is signal.SIGHUP:
            return
        turn = min(self._signals, 1)
        self._signals += 1
        call, limit_s = self._calls[turn], self._limits_s[turn]
        if self._signals > 2 or limit_s <= 0:
            _log.warning("%s again: the process ends at once", number.name)
            end_process(128 + number)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(limit_s, self._over, (number, limit_s))
        self._timer.daemon = True
        self._timer.start()
        with suppress(ValueError, OSError, AttributeError, RuntimeError):  # a captured stderr
            faulthandler.dump_traceback_later(limit_s + _LOCKED_S, exit=True)
        if call is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call)

    def _over(self, number: signal.Signals, limit_s: float) -> None:
        _log.error("the process did not end within %g s of %s, and is ended; its threads: %s",
                   limit_s, number.name, _threads())  # fmt: skip
        with suppress(ValueError, OSError, AttributeError, RuntimeError):
            faulthandler.dump_traceback(all_threads=True)
        end_process(1)


class _UnwaitedExecutor(ThreadPoolExecutor):
    """Threads whose end nobody waits for: one may be stuck in a read."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:  # noqa: ARG002
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def end_with_threads(status: int) -> None:
    """Return once all threads have ended, within `THREADS_S`, else end the process."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            break
    else:
        return
    waiting = threading.Timer(THREADS_S, _leave, (status,))
    waiting.daemon = True
    waiting.start()


def _leave(status: int) -> None:
    _log.warning("threads did not end, and are not waited for: %s", _threads())
    end_process(status)


def _threads() -> str:
    main = threading.main_thread()
    names = [t.name for t in threading.enumerate() if t is not main and not t.daemon]
    return ", ".join(names[:8]) or "none but the main one"


def end_process(status: int) -> None:
    """End the process now, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        # A stream that another thread is stuck in would be waited for: its end is not.
        flushing = threading.Thread(target=_flush, args=(stream,), daemon=True)
        flushing.start()
        flushing.join(0.2)
    os._exit(status)


def _flush(stream: Any) -> None:
    with suppress(Exception):
        stream.flush()


def _noted(number: int, frame: object) -> None:
    """Let the interpreter take a signal, which the thread reads."""
