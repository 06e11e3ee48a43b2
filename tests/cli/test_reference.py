"""The command-line reference says what the commands say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cli_reference import parsers

ROOT = Path(__file__).parents[2]


def test_the_reference_is_as_generated() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli_reference"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == done.stdout, "run `make docs`"


def documented() -> dict[str, set[str]]:
    """Return the options of each command's table in the reference."""
    sections = (ROOT / "docs" / "reference" / "cli.md").read_text().split("\n## pigou ")[1:]
    found = {}
    for section in sections:
        rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
        found[section.splitlines()[0]] = set(re.findall(r"`(-[^`]+)`", " ".join(rows)))
    return found


@pytest.mark.parametrize("name", [name for name, _ in parsers()])
def test_the_reference_has_the_options_that_the_parser_has(name: str) -> None:
    parser = dict(parsers())[name]
    takes = {option for each in parser.params for option in [*each.opts, *each.secondary_opts]}
    assert documented()[name] == {option for option in takes if option.startswith("-")}
