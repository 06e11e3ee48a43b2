"""The package has all of its files, and runs without the repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(out), str(ROOT)], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "pigou"
    tracked = subprocess.run(
        ["git", "ls-files", "src/pigou"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wanted = {line.removeprefix("src/") for line in tracked.stdout.splitlines()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wanted - names == set()
    for needed in ("gateway/web/page.html", "models/tiny/config.json", "report/page.html"):
        assert (package / needed).is_file()
        assert f"pigou/{needed}" in names


def test_the_wheel_runs_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Its own files come first; dependencies are those of this interpreter."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import pigou; assert pigou.__file__.startswith(sys.path[0]), pigou.__file__\n"
        "from pigou.models import bundled_path\n"
        "assert (bundled_path() / 'config.json').is_file()\n"
        "import pigou.gateway.app, pigou.fleet.serve\n"
        "from pigou.cli import main; main(['--version'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pigou ")
