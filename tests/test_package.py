"""Laws of the package and of what deploys it: all files are in, nothing names what is not there."""

from __future__ import annotations

import configparser
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from pigou.cli import build

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


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
        "from pigou.worker.build import bundled; assert (bundled() / 'config.json').is_file()\n"
        "import pigou.gateway.app, pigou.fleet.serve\n"
        "from pigou.cli import main; main(['--version'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pigou ")


# --- deploy/ -------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in lines]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            name = rest.split(" AS ")[1]
            found[name] = []
        elif name:
            found[name].append((word, rest))
    return found


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_an_image_runs_as_a_user_and_has_a_health_check(target: str) -> None:
    words = [word for word, _ in stages()[target]]
    users = [rest for word, rest in stages()[target] if word == "USER"]
    assert users[-1] not in ("root", "0")
    assert "HEALTHCHECK" in words
    assert words.index("USER") < words.index("ENTRYPOINT")


def test_what_the_dockerfile_copies_exists() -> None:
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source


def check_options(command: str, words: list[str]) -> None:
    """Refuse options that the command does not have."""
    root: Any = get_command(build([command]))
    parameters = root.commands[command].params
    known = {name for each in parameters for name in [*each.opts, *each.secondary_opts]}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"pigou {command} has no {word}"


def test_what_images_and_compose_and_systemd_run_has_the_options_that_it_is_given() -> None:
    runs = []
    for target in ("gateway", "worker"):
        told = dict(stages()[target])
        runs.append(yaml.safe_load(told["ENTRYPOINT"])[1:] + yaml.safe_load(told["CMD"]))
        runs += [shlex.split(rest)[1:] for word, rest in stages()[target]
                 if word == "RUN" and rest.startswith("pigou ")]  # fmt: skip
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    for name, service in compose["services"].items():
        target = service["build"]["target"]
        assert target == ("gateway" if name == "gateway" else "worker")
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert target in stages()
        runs.append(["serve" if target == "gateway" else "worker", *service["command"]])
    for name in ("pigou", "pigou-worker"):
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(DEPLOY / "systemd" / f"{name}.service")
        runs.append(unit["Service"]["ExecStart"].split()[1:])
    assert len(runs) == 9
    for command, *words in runs:
        check_options(command, words)


def test_every_host_of_the_compose_file_is_a_service_of_it() -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    hosts = re.findall(r"http://(\w+):(\d+)", " ".join(compose["services"]["gateway"]["command"]))
    assert {host for host, _ in hosts} == {"prefill", "decode"}
    assert {port for _, port in hosts} == {dict(stages()["worker"])["EXPOSE"]}
