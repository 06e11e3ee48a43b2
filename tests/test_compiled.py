"""Compiled kernels are cached where they can be, and compiled once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from pigou import compiled


def test_numba_chooses_where_the_package_can_be_written(tmp_path: Path) -> None:
    assert compiled.cache_folder(tmp_path) is None


def test_kernels_are_cached_with_the_user_where_the_package_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = tmp_path / "file"
    sealed.write_text("no folder can be made under a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compiled.cache_folder(sealed) == tmp_path / "cache" / "pigou" / "numba"
    monkeypatch.setenv("XDG_CACHE_HOME", str(sealed))
    last = compiled.cache_folder(sealed)
    assert last is not None
    assert last.name == f"pigou-numba-{os.getuid()}"


def test_the_environment_has_the_last_word(tmp_path: Path) -> None:
    code = "import os, pigou.compiled; print(os.environ['NUMBA_CACHE_DIR'])"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path)


KERNELS = """
import os, sys, time
from numba.core import event
from pigou.compiled import kernel, on_compiling

compiled = []
class Count(event.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"].__name__)
    def on_end(self, event):
        pass
event.register("numba:compile", Count())

@kernel
def inner(x):
    return x + 1

@kernel
def outer(x):
    return inner(x) * 2

begun = []
with on_compiling(begun.append):
    assert outer(20) == 42
print(len(compiled), len(begun))
"""
THREADS = (
    KERNELS.split("begun = []", maxsplit=1)[0]
    + """
import threading
threads = [threading.Thread(target=f, args=(1,)) for f in (inner, outer) * 4]
[t.start() for t in threads]; [t.join(100) for t in threads]
print(len(compiled), any(t.is_alive() for t in threads))
"""
)


def _run(path: Path, cache: Path, output: Path) -> None:
    """Run a program over a cache of kernels, as a process that has imported numba."""
    numba.config.CACHE_DIR = str(cache)
    with output.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(path), run_name="kernels")


def _forked(path: Path, cache: Path, count: int = 1) -> list[str]:
    """Return what so many forks of this process print that run a program at once."""
    context = multiprocessing.get_context("fork")
    outputs = [cache.parent / f"output-{number}" for number in range(count)]
    processes = [context.Process(target=_run, args=(path, cache, output)) for output in outputs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0] * count
    return [output.read_text().strip() for output in outputs]


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A program of two kernels, and the cache of the one of three processes that compiled them."""
    folder = tmp_path_factory.mktemp("kernels")
    path = folder / "kernels.py"
    path.write_text(KERNELS)
    assert sorted(_forked(path, folder / "cache", 3)) == ["0 0", "0 0", "2 2"]
    return path, folder / "cache"


@pytest.fixture
def program(compiled_once: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The program, and a copy of its cache."""
    path, cache = compiled_once
    return path, Path(shutil.copytree(cache, tmp_path / "cache"))


def test_of_processes_that_start_together_one_compiles_a_kernel(
    program: tuple[Path, Path],
) -> None:
    """The fixture starts them."""
    assert _forked(*program) == ["0 0"]


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_damaged_cache_is_compiled_anew(ending: str, program: tuple[Path, Path]) -> None:
    for path in program[1].rglob(f"*.{ending}"):
        path.write_bytes(path.read_bytes()[:20] if ending == "nbc" else b"\x00damaged")
    assert _forked(*program) == ["2 2"]
    assert _forked(*program) == ["0 0"]


def test_what_blocks_or_has_no_end_is_no_cache(program: tuple[Path, Path]) -> None:
    for path in list(program[1].rglob("*.nb*")):
        path.unlink()
        if path.suffix == ".nbi":
            os.mkfifo(path)
        else:
            with path.open("wb") as file:
                file.truncate(2 << 30)
    assert _forked(*program) == ["2 2"]
    assert _forked(*program) == ["0 0"]


def test_a_cache_that_cannot_be_written_is_done_without(program: tuple[Path, Path]) -> None:
    """The index is a folder here: it can be neither read nor replaced, whoever runs this."""
    for path in list(program[1].rglob("*.nbi")):
        path.unlink()
        path.mkdir()
        (path / "file").touch()
    assert _forked(*program) == ["2 2"]


def test_threads_of_one_process_wait_for_each_other_without_a_deadlock(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(THREADS)
    assert _forked(path, tmp_path / "cache") == ["2 False"]


def test_a_direct_call_converts_numbers_and_refuses_items_of_another_size() -> None:
    @compiled.bare_kernel
    def count_above(values: np.ndarray, least: int) -> int:
        count = 0
        for value in values:
            count += value >= least
        return count

    calls = compiled.DirectCalls(count=(count_above, "i8(u8[::1], u8)"))
    values = np.arange(5, dtype=np.uint64)
    assert [calls.count(values, least) for least in (0, np.int32(2), True)] == [5, 3, 4]
    with pytest.raises((TypeError, ValueError)):
        calls.count(values.astype(np.uint32), 0)
    with pytest.raises(AttributeError, match="no kernel total"):
        calls.total(values)
