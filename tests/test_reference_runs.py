"""A sample of the reference runs comes out as recorded (tools/reference_runs has the rest)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Cheap runs that pass through much: a toll, kills, tiers, another policy.
SAMPLE = ("killed-split", "tiers-of-each-worker", "toll-mixed-roles")


def reference_runs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.reference_runs", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_reference_run_comes_out_as_recorded(name: str) -> None:
    # Another processor may round otherwise; the refactoring itself is compared to the last digit.
    ended = reference_runs("compare", "--only", f"simulations/{name}", "--tolerance", "1e-6")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_recorded_journal_is_decided_as_it_was() -> None:
    ended = reference_runs("compare", "--only", "journals/toll-killed")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_difference_is_told_by_run_and_path() -> None:
    from tools.reference_runs.difference import differences

    found = list(differences({"a": [1, 2.0], "b": 1}, {"a": [1, 2.5]}))
    assert [(each.path, each.old, each.new) for each in found] == [
        ("$.a[1]", "2.0", "2.5"),
        ("$.b", "1", "(absent)"),
    ]
    assert not list(differences([1.0], [1.0 + 1e-9], tolerance=1e-6))


def test_a_pattern_that_names_no_run_is_refused() -> None:
    ended = reference_runs("compare", "--only", "no-such-run")
    assert ended.returncode == 2
    assert "no run's name matches" in ended.stderr
