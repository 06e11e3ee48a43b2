"""Runs commands of `pigou` in processes of their own, and returns what they computed."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .fleets import FLEETS
from .simulations import SIMULATIONS
from .store import compact, without_wall_clock
from .traces import INPUTS

#: Parts of the page's data that follow from the command line and the version of Pigou.
_NOT_REPORTED = ("config", "figures", "pigou", "title")


class Ended(NamedTuple):
    """What a command of `pigou` said, and its exit status."""

    status: int
    output: str
    errors: str


def call(arguments: Sequence[str]) -> Ended:
    """Run a command of `pigou` within this process."""
    from pigou.cli import main

    output, errors = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ended(status, output.getvalue(), errors.getvalue())


def checked(arguments: Sequence[str]) -> str:
    """Run a command of `pigou` that must succeed, and return its output.

    Raises:
        RuntimeError: it failed.
    """
    ended = call(arguments)
    if ended.status:
        raise RuntimeError(f"pigou {' '.join(arguments)} ended with {ended.status}: {ended.errors}")
    return ended.output


def simulate(name: str) -> dict[str, Any]:
    """Run the simulation of this name, and return its document."""
    run = SIMULATIONS[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        command = [_filled(word, folder) for word in run.command.split()]
        if command[0] == "experiment":
            checked([*command, "--out", str(folder / "out"), "--no-report"])
            result = json.loads((folder / "out" / "results.json").read_text())
            return _document(run.command, result=result)
        if run.report:
            command += ["--report", str(folder / "page")]
        checked([*command, "--json", str(folder / "out.json")])
        result = json.loads((folder / "out.json").read_text())
        if not run.report:
            return _document(run.command, result=result)
        page = json.loads((folder / "page" / "report.json").read_text())
        kept = {key: value for key, value in page.items() if key not in _NOT_REPORTED}
        return _document(run.command, result=result, report=kept)


def simulate_all(names: Sequence[str], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run simulations in `jobs` processes, and yield them in order."""
    with processes(jobs) as pool:
        yield from zip(names, pool.map(simulate, names), strict=True)


def processes(jobs: int) -> ProcessPoolExecutor:
    """Return new processes; sets and dicts of texts are ordered otherwise in each pool."""
    for name in [each for each in os.environ if each.startswith("PIGOU_")]:
        del os.environ[name]  # options could be among them
    os.environ["PYTHONHASHSEED"] = str(random.randrange(1, 2**32))
    os.environ["OMP_NUM_THREADS"] = "1"
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))


def _document(command: str, **parts: Any) -> dict[str, Any]:
    return {"command": command, **{k: compact(without_wall_clock(v)) for k, v in parts.items()}}


def _filled(word: str, folder: Path) -> str:
    """Write the files that a word names in braces, and put their paths in."""
    writers = {name: partial(writer, folder) for name, writer in INPUTS.items()}
    for name, writer in writers.items():
        if f"{{{name}}}" in word:
            word = word.replace(f"{{{name}}}", str(writer()))
    for name, fleet in FLEETS.items():
        if f"{{{name}}}" in word:
            path = folder / f"{name}.yaml"
            path.write_text(json.dumps(fleet))
            word = word.replace(f"{{{name}}}", str(path))
    return word
