"""Files that others write are checked by type, size and depth; reading one never blocks."""

from __future__ import annotations

import ast
import os
import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.lib.foreign_files import scatter
from tests.lib.source_tree import modules, name, parsed

from pigou.small_file import FileRefused, parse_json, read_bytes, read_json, read_text


def test_no_foreign_file_blocks_or_fills_the_memory(tmp_path: Path) -> None:
    count = scatter(tmp_path)
    memory, began, read = _peak(), time.monotonic(), []
    for path in tmp_path.iterdir():
        with suppress(OSError, ValueError):
            read_json(path)
            read.append(path.name)
    assert sorted(read) == ["my notes.json", "number.json"]  # JSON of somebody else's
    assert count > 12
    assert time.monotonic() - began < 60.0
    assert _peak() - memory < 64 << 20


def test_an_error_tells_what_is_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"x" * 11)
    (tmp_path / "link").symlink_to(tmp_path / "large")
    with pytest.raises(FileRefused, match="it is a FIFO; a regular file is needed"):
        read_bytes(tmp_path / "fifo")
    with pytest.raises(FileRefused, match="it is a directory"):
        read_bytes(tmp_path)
    with pytest.raises(FileRefused, match="it has 11 bytes; at most 10 are read"):
        read_bytes(tmp_path / "large", 10)
    assert read_bytes(tmp_path / "link", 11) == b"x" * 11
    with pytest.raises(FileRefused, match="it is a symbolic link"):
        read_bytes(tmp_path / "link", follow=False)


def test_a_file_without_a_size_is_bounded_as_it_is_read() -> None:
    assert read_text("/proc/self/comm")
    with pytest.raises(FileRefused, match="more than 10 bytes"):
        read_bytes("/proc/self/status", 10)


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'\xef\xbb\xbf{"port": 1}')
    os.close(writing)
    assert read_text(f"/dev/fd/{reading}") == '{"port": 1}'
    os.close(reading)


@pytest.mark.parametrize(("depth", "fits"), [(128, True), (129, False), (900, False)])
def test_depth_is_bounded(depth: int, fits: bool) -> None:
    text = b"[" * depth + b"]" * depth
    if fits:
        parse_json(text)
    else:
        with pytest.raises(ValueError, match="128 levels"):
            parse_json(text)


#: Modules that read the kernel's own files, and none that others write.
_KERNEL_FILES = {
    "small_file.py", "worker/device_use.py", "runtime/memory_report.py",
}  # fmt: skip


def test_files_are_read_by_the_one_reader() -> None:
    wrong = [
        f"{name(path)}:{node.lineno}"
        for path in modules()
        if name(path) not in _KERNEL_FILES
        and any(f".{call}(" in path.read_text() for call in ("read_text", "read_bytes"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("read_text", "read_bytes")
        and "/proc/" not in (own := ast.unparse(node.func.value))
        and not own.startswith("files(")
    ]  # fmt: skip
    assert not wrong, "use pigou.small_file"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
