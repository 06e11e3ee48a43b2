"""The command line loads what it runs, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pigou.cli import main


def test_importing_the_command_line_imports_neither_torch_nor_a_command() -> None:
    code = (
        "import sys, pigou.cli;"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('pigou.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_names_pigou_torch_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["version"])
    assert end.value.code == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["pigou", "torch", "python"]


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["version", "--nope"])
    assert end.value.code == 2
    assert "--nope" in capsys.readouterr().err
