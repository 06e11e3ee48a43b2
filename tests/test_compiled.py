"""Compiled kernels are cached where they can be, and compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
