"""Runs the clients' programs against `pigou serve`, and prints which get what they ask for.

    python -m tools.clients_table --python VENV --node FOLDER

VENV has the Python packages, FOLDER the node_modules. Each program runs against the bundled model
and, where it is made for that, against one that reasons.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from pathlib import Path

from tests.fleet.harness import running
from tests.lib.reasoning_model import make
from tests.peers.test_clients import COMPUTES, MODEL, NODE, PROGRAMS, PYTHON, REASONING, run


async def table(python: str, node: str, work: Path) -> list[tuple[str, str, list[str]]]:
    """Return program, package and results of each, without and with reasoning."""
    if node:
        (work / "node_modules").symlink_to((Path(node) / "node_modules").resolve())
    commands: dict[str, list[str]] = {}
    for program in PYTHON if python else ():
        commands[program] = [f"{python}/bin/python", str(PROGRAMS / program)]
    for program in NODE if node else ():
        copy = shutil.copy(PROGRAMS / program, work)
        commands[program] = ["node", "--preserve-symlinks-main", str(copy)]
    results: dict[str, list[str]] = {program: [] for program in commands}
    for model, rest in (("bundled", []), (str(make(work / MODEL)), ["reasons"])):
        arguments = ("--model", model, "--served-model-name", MODEL, *COMPUTES)
        async with running(0, 0, 1, arguments=arguments) as (_, client):
            for program, command in commands.items():
                if rest and program not in REASONING:
                    results[program].append("-")
                    continue
                said = await run(*command, client.url, MODEL, *rest)
                results[program].append(said.strip().splitlines()[-1] if said else "yes")
    packages = PYTHON | NODE
    return [(program, packages[program], said) for program, said in results.items()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="", help="venv with the Python clients")
    parser.add_argument("--node", default="", help="folder with node_modules")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        rows = asyncio.run(table(given.python, given.node, Path(work)))
    print("| program | package | bundled model | model that reasons |\n|---|---|---|---|")
    for program, package, said in rows:
        print(f"| {program} | {package} | {' | '.join(said)} |")


if __name__ == "__main__":
    main()
