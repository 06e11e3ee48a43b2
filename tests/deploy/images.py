"""Images, services and units of `deploy/`, as what they run: commands, environments, checks."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from typing import Any

import yaml
from tests.lib.source_tree import ROOT

DEPLOY = ROOT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in lines]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            name = rest.split(" AS ")[1]
            found[name] = []
        elif name:
            found[name].append((word, rest))
    return found


def entry(target: str) -> tuple[list[str], list[str]]:
    """Return the entry point of an image, and its default arguments."""
    told = dict(stages()[target])
    return json.loads(told["ENTRYPOINT"]), json.loads(told["CMD"])


def health_check(target: str) -> list[str]:
    """Return the command of an image's health check."""
    check = dict(stages()[target])["HEALTHCHECK"]
    command: list[str] = json.loads(check.partition("CMD ")[2])
    return command


def environment(target: str) -> dict[str, str]:
    """Return the variables of an image."""
    rest = [rest for stage in ("base", target) for word, rest in stages()[stage] if word == "ENV"]
    return dict(pair.split("=", 1) for line in rest for pair in shlex.split(line))


def compose() -> dict[str, Any]:
    """Return the Compose file."""
    file: dict[str, Any] = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    return file


def unit(name: str) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return the command of a systemd unit, its environment, and its credentials' files."""
    parser = configparser.RawConfigParser(strict=False, dict_type=_Repeated)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "systemd" / f"{name}.service")
    service = {key: value.splitlines() for key, value in parser["Service"].items()}
    variables = dict(line.split("=", 1) for line in service.get("Environment", ()))
    credentials = dict(line.split(":", 1) for line in service.get("LoadCredential", ()))
    return shlex.split(service["ExecStart"][0]), variables, credentials


class _Repeated(dict[str, Any]):
    """Options that come several times, as a list of all."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, list) and key in self:
            self[key].extend(value)
        else:
            super().__setitem__(key, value)
