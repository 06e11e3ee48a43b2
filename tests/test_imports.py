"""Laws of the slim installation: it serves, simulates and loads; what is missing has a remedy."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pigou.registry import EXTRAS

ROOT = Path(__file__).parents[1]
#: Runs a command where the modules of some extras cannot be imported.
PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from pigou.cli import main
main(sys.argv[2:])
"""
ALL = ",".join(module for modules in EXTRAS.values() for module in modules)


def run(blocked: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, blocked, *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["serve", "--port", "0"], "worker"),
        (["worker", "--port", "0"], "worker"),
        (["warm"], "worker"),
        (["report", "x.json", "--out", "OUT"], "report"),
        (["simulate", "--workload", "poisson:rate=5,in=64,out=8,n=5", "--report", "OUT"], "report"),
    ],
)
def test_a_missing_extra_is_told_in_one_line_with_the_remedy(
    arguments: list[str], extra: str, tmp_path: Path
) -> None:
    done = run(ALL, *(str(tmp_path / "out") if each == "OUT" else each for each in arguments))
    assert done.returncode == 2
    assert f"pip install '.[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"pigou {arguments[0]}: ")
    assert not (tmp_path / "out").exists()


def test_what_is_found_missing_late_has_the_remedy_too() -> None:
    done = run("msgspec_is_here", "version")
    assert done.returncode == 0
    program = PROGRAM.replace("main(sys", "import pigou.cli\npigou.cli.build = broken\nmain(sys")
    program = "def broken(names):\n    raise ModuleNotFoundError(name='torch.nn')\n" + program
    late = subprocess.run(
        [sys.executable, "-c", program, "-", "simulate"], capture_output=True, text=True
    )
    assert late.returncode == 1
    assert late.stderr == (
        "pigou simulate: torch.nn is not installed; "
        "pip install '.[worker]' in a checkout of Pigou\n"
    )


def test_the_slim_installation_simulates(tmp_path: Path) -> None:
    done = run(
        ALL, "simulate", "--workload", "poisson:rate=5,in=64,out=8,n=5", "--fleet", "1xboth",
        "--timing", "law:itl_a=0.01,itl_b=0.001,prefill=0.1", "--blocks", "1000",
        "--json", str(tmp_path / "figures.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "5 completed" in done.stdout


def test_the_slim_installation_imports_gateway_and_bench() -> None:
    program = PROGRAM.partition("from pigou.cli")[0] + (
        "import pigou.fleet.serve, pigou.gateway.app\n"
        "import pigou.workload.bench, pigou.workload.bench\n"
        "import pigou.sim.simulation, pigou_lab.experiments.registry, pigou.worker.process\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, ALL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_versions_are_told_without_torch() -> None:
    done = run(ALL, "--version")
    assert done.returncode == 0


def test_the_extras_of_the_package_are_those_that_the_remedies_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {_name(each) for each in project["dependencies"]}
    for extra, modules in EXTRAS.items():
        assert {_name(each) for each in project["optional-dependencies"][extra]} == set(modules)
        assert not base & set(modules)
    assert project["optional-dependencies"]["all"] == [f"pigou[{','.join(EXTRAS)}]"]


def test_numba_and_others_whose_insides_are_used_have_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounded = {_name(each) for each in project["dependencies"] if "<" in each}
    assert {"numba", "aiohttp", "typer"} <= bounded


def _name(requirement: str) -> str:
    name = "".join(each if each.isalnum() else " " for each in requirement).split()[0]
    return {"grpcio": "grpc", "xds": "envoy"}.get(name, name)  # modules named otherwise
