"""Journal file: entries are encoded at once and written by another thread."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path

from pigou import __version__
from pigou.config import ConfigError, ControlConfig
from pigou.control.journal import VERSION, JournalEntry, JournalHead, encode
from pigou.small_file import check_regular

_log = logging.getLogger("pigou.gateway")

#: Seconds between two writes, and that the last one may take.
_FLUSH_S, _JOIN_S = 0.1, 5.0
#: Bytes that may wait for a disk that is slower than the gateway.
_MAX_WAITING_BYTES = 64 * 2**20


class Journal:
    """Appends a run to a file; an error of the file ends the journal, not the gateway."""

    def __init__(self, path: Path, config: ControlConfig) -> None:
        """Open the file with owner-only access, and write the head; raise `ConfigError`."""
        self.path = path
        self.failed = ""  # why it ended early; empty while it goes on
        self._lines: deque[bytes] = deque()
        self._put_bytes = 0  # written by the event loop alone
        self._done_bytes = 0  # written by the thread alone
        self._over = threading.Event()
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            if path.exists() and not path.is_char_device():  # as /dev/null
                check_regular(path.stat(), path, sys.maxsize)
            self._file = os.open(path, flags | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise ConfigError(
                f"journal is {str(path)!r}, and cannot be written ({error.strerror}); "
                "name another file"
            ) from error
        if _is_cut(self._file):
            self._lines.append(b"\n")
        now, unix = time.monotonic_ns(), time.time_ns()
        head = JournalHead(format=VERSION, pigou=__version__, now=now, unix=unix, config=config)
        self._put(encode(head))
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def write(self, entry: JournalEntry) -> None:
        """Append an entry, which reaches the file within about 0.1 s."""
        if self.failed:
            return
        try:
            line = encode(entry)
        except (ValueError, TypeError, OverflowError, NotImplementedError) as error:
            self._fail(f"{type(entry.message).__name__} of this kind cannot be written: {error}")
        else:
            self._put(line)

    def close(self) -> None:
        """Flush and close the file."""
        self._over.set()
        self._thread.join(_JOIN_S)  # a disk that hangs keeps no process

    def _put(self, line: bytes) -> None:
        if self._put_bytes - self._done_bytes > _MAX_WAITING_BYTES:
            self._fail("the disk is too slow")
            return
        self._put_bytes += len(line)
        self._lines.append(line)

    def _work(self) -> None:
        over = False
        while not (over or self.failed):
            over = self._over.wait(_FLUSH_S)
            try:
                self._flush()
            except OSError as error:
                self._fail(error.strerror or str(error))
            except Exception as error:
                _log.exception("the journal's thread failed")
                self._fail(repr(error))
        os.close(self._file)

    def _flush(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        data = memoryview(b"".join(lines))
        size = len(data)
        while data:
            data = data[os.write(self._file, data) :]
        self._done_bytes += size

    def _fail(self, why: str) -> None:
        self.failed = why
        self._lines.clear()
        _log.warning("the journal %s ends here, the gateway goes on: %s", self.path, why)


def _is_cut(file: int) -> bool:
    try:
        return os.lseek(file, -1, os.SEEK_END) >= 0 and os.read(file, 1) != b"\n"
    except OSError:  # empty, or no regular file
        return False
