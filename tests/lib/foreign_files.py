"""Files that a shared folder may hold beside what belongs there; reading some of them blocks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

#: Nested more deeply than any decoder goes.
DEEP = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
_CONTENTS = {
    "deep.json": DEEP,
    "list.json": b"[" * 20_000 + b"]" * 20_000,
    "latin.json": '{"value": "é"}'.encode("latin-1"),
    "empty.json": b"",
    "cut.json": b'{"value": "x',
    "number.json": b"1e999",
    "my notes.json": b'{"note": "buy milk"}',
    "._w0.json": b"\x00\x05\x16\x07",
    "README": b"what this folder is for",
}


def scatter(folder: Path) -> int:
    """Put files of every kind into a folder; return how many."""
    before = len(os.listdir(folder))
    for name, content in _CONTENTS.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "fifo.json")
    (folder / "folder.json").mkdir()
    with (folder / "sparse.json").open("wb") as file:
        file.truncate(2 << 30)
    (folder / "dangling.json").symlink_to(folder / "nowhere")
    (folder / "loop.json").symlink_to(folder / "loop.json")
    (folder / "device.json").symlink_to("/dev/zero")
    bind_socket(folder / "socket.json")
    return len(os.listdir(folder)) - before


def bind_socket(path: Path) -> None:
    """Leave a socket at a path, also where that is longer than an address may be."""
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)
