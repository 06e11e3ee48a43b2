"""The command-line reference says what the commands say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_is_as_generated() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli_reference"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (ROOT / "docs" / "cli.md").read_text() == done.stdout, "run `make docs`"
