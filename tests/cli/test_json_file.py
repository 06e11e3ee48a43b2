"""Where figures are to be written is checked before anything runs, by all commands alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pigou.cli import build

COMMANDS = (
    ("bench", "http://127.0.0.1:1"),
    ("replay", "nowhere.journal"),
    ("simulate", "--workload", "nowhere.jsonl"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda argv: argv[0])
def test_figures_are_not_made_for_a_file_that_cannot_be_written(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    for file, told in ((tmp_path / "no" / "x.json", "does not exist"), (tmp_path, "a folder")):
        done = CliRunner().invoke(build([command[0], "version"]), [*command, "--json", str(file)])
        assert done.exit_code == 2
        assert f"--json is {str(file)!r}" in done.output
        assert told in done.output
