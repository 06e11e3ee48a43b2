"""The product runs without the lab, and says how to install it to whoever asks for a name of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tests.lib.server_process import free_ports
from tests.lib.source_tree import ROOT

from pigou.registry import LAB_NAMES

SRC = ROOT / "src"


def entry_points(file: Path) -> dict[str, dict[str, str]]:
    points: dict[str, dict[str, str]] = tomllib.loads(file.read_text())["project"]["entry-points"]
    return points


#: Makes the lab absent in each Python that reads it, child processes included.
HIDE_THE_LAB = """
import importlib.metadata, sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pigou_lab":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
every = importlib.metadata.distributions
importlib.metadata.distributions = lambda **about: (
    each for each in every(**about) if each.metadata["Name"] != "pigou-lab"
)
"""


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a Python in which only the product is installed."""
    site = tmp_path_factory.mktemp("site")
    folder = site / "pigou-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pigou\nVersion: 0.1.0\n")
    groups = entry_points(ROOT / "pyproject.toml")
    (folder / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
            for group, points in groups.items()
        )
    )
    assert Distribution.at(folder).entry_points
    (site / "sitecustomize.py").write_text(HIDE_THE_LAB)
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{SRC}"}


PIGOU = (sys.executable, "-m", "pigou")


def run(product: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PIGOU, *arguments], env=product, capture_output=True, text=True, check=False
    )


def iter_until(lines: Iterable[str], end: str) -> Iterator[str]:
    """Yield lines up to the first that has `end` in it, or all."""
    for line in lines:
        yield line
        if end in line:
            return


WORKLOAD = ("--workload", "poisson:rate=5,in=64,out=8,n=5", "--fleet", "1p+1d", "--blocks", "1000",
            "--timing", "law:itl_a=0.01,itl_b=0.001,prefill=0.1")  # fmt: skip


def test_the_product_simulates_alone(product: dict[str, str]) -> None:
    done = run(product, "simulate", *WORKLOAD)
    assert done.returncode == 0, done.stderr
    assert "5 completed" in done.stdout


def test_the_product_plans_alone(product: dict[str, str]) -> None:
    done = run(
        product, "plan", "--workload", "mix=1:1024/64,rate=2", "--model", "llama-3.1-8b",
        "--gpus", "H200:2", "--slo", "ttft=1,itl=0.05", "--jobs", "1", "--top", "1",
        "--kv-dtype", "bfloat16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_product_serves_alone(product: dict[str, str]) -> None:
    port = free_ports(1)[0]
    options = ("--both", "1", "--executor", "sleep", "--rehearse", "0", "--port", str(port))
    with subprocess.Popen(
        [*PIGOU, "serve", *options], env=product, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            printed = list(iter_until(server.stdout, "Ctrl-C ends it."))
            assert "Ctrl-C ends it." in printed[-1], printed
            chat = {"messages": [{"role": "user", "content": "Good morrow"}], "max_tokens": 4}
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(url, json.dumps(chat).encode(), headers), timeout=60) as reply:
                answer = json.load(reply)
        finally:
            server.terminate()
            server.communicate()  # what it still prints
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 4
    assert server.returncode == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["simulate", *WORKLOAD, "--policy", "dynamo"], "policy 'dynamo'"),
        (["simulate", *WORKLOAD, "--planner", "hpa-cpu"], "planner 'hpa-cpu'"),
        (["serve", "--port", "0", "--policy", "llm-d"], "policy 'llm-d'"),
        (["experiment", "knee", "--out", "x"], "command 'experiment'"),
    ],
)
def test_a_name_of_the_lab_is_told_with_the_remedy(
    product: dict[str, str], options: list[str], what: str
) -> None:
    done = run(product, *options)
    assert done.returncode == 2, done.stderr
    assert f"{what} is part of pigou-lab, which is not installed; pip install ./lab" in done.stderr


def test_the_names_that_messages_know_are_those_of_the_lab() -> None:
    points = entry_points(ROOT / "lab" / "pyproject.toml")
    assert {group: " ".join(sorted(names)) for group, names in points.items()} == LAB_NAMES
    for group, names in entry_points(ROOT / "pyproject.toml").items():
        assert not names.keys() & points.get(group, {}).keys()
