"""Every command of README.md runs as it is written, as far as one machine without a network can."""

from __future__ import annotations

import ast
import functools
import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pigou.cli import COMMANDS, build
from pigou.cli.worker import split_model
from pigou.workload.catalogue import listed
from tools import check_guides

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S):
        if language in languages:
            yield text


def commands(page: Path) -> list[list[str]]:
    """Return the shell commands of a page as words, without comments and variables before them."""
    found = []
    for command in check_guides.commands(page.read_text()):
        words = shlex.split(command.text, comments=True)
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return found


def of_pigou(page: Path) -> list[list[str]]:
    return [words[1:] for words in commands(page) if words[0] == "pigou" and len(words) > 1]


def parse(words: list[str]) -> None:
    """Parse a command as the command line does, without running it."""
    root: Any = get_command(build(words[:1]))
    command, rest = root.commands[words[0]], words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    cut = next(
        (at for at, word in enumerate(rest) if word in ("...", "|", ">", "&", "&&", ";")), None
    )
    context = command.make_context(words[0], list(rest[:cut]), resilient_parsing=cut is not None)
    if words[0] == "serve" and cut is None:  # refuses what neither serve nor its workers know
        split_model(context.params["worker_arguments"] or ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one_that_there_is(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of options are those that the page shows, their name in the first line."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "yaml"):
        if named := re.match(r"# ([\w-]+\.yaml)", block):
            (tmp_path / named[1]).write_text(block)
    for words in of_pigou(page):
        if words[0].startswith("-"):
            continue
        assert words[0] in COMMANDS, words
        try:
            parse(words)
        except Exception as error:
            raise AssertionError(f"pigou {shlex.join(words)}: {error}") from error


def test_what_the_readme_reads_was_downloaded_before() -> None:
    there: set[str] = set()
    read = 0
    for words in of_pigou(ROOT / "README.md"):
        if words[:2] == ["trace", "download"]:
            there.add(listed(words[2]).file)
        for word in words:
            if word.endswith("_trace.jsonl"):
                assert word in there, f"{word} is read before it is downloaded"
                read += 1
    assert read >= 2


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder to work in, and the address of a server that has the trace."""
    served = tmp_path / "served"
    served.mkdir()
    rows = [
        {"timestamp": 200 * i, "input_length": 600, "output_length": 8, "hash_ids": [0, i % 5 + 1]}
        for i in range(20)
    ]
    entry = listed("mooncake-conversation")
    (served / entry.file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    handler = functools.partial(Quiet, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}/{entry.file}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def pigou(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pigou", *words], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths}, check=False,
    )  # fmt: skip


def test_the_simulations_of_the_readme_run(workplace: tuple[Path, str]) -> None:
    """On a small trace of the same name, and the timing file of a worker profiled before."""
    folder, address = workplace
    done = pigou(folder, "trace", "download", "mooncake-conversation", "--address", address)
    # The owner's size and checksum are known, and a made-up file must not pass for it.
    assert done.returncode == 1
    assert "download again" in done.stderr
    name = address.rsplit("/", 1)[1]
    (folder / name).write_bytes((folder / "served" / name).read_bytes())
    timing = {
        "decodes": [[1, 0.01], [8, 0.02]], "cache": [[0, 0.0], [100000, 0.001]],
        "prompts": [[0, 0.0], [512, 0.05]], "context": 0.0, "prompt": 0.0, "alone": 0.005,
        "overhead": 0.001, "blocks": 4096, "block_size": 16,
    }  # fmt: skip
    (folder / "mine.json").write_text(json.dumps(timing))
    ran = 0
    for words in of_pigou(ROOT / "README.md"):
        if words[0] == "simulate":
            done = pigou(folder, *words)
            assert done.returncode == 0, f"pigou {shlex.join(words)}: {done.stderr}"
            assert "0 failed, 0 unfinished" in done.stdout
            ran += 1
    assert ran >= 2
    assert (folder / "out").is_dir()


def test_requests_of_the_readme_are_json_and_its_python_compiles() -> None:
    bodies = 0
    for words in commands(ROOT / "README.md"):
        if words[0] == "curl" and "-d" in words:
            body = json.loads(words[words.index("-d") + 1])
            assert body["messages"]
            bodies += 1
    assert bodies
    for block in blocks(ROOT / "README.md", "python"):
        ast.parse(block)


def test_the_make_targets_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w[\w-]*)", text, re.M))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target
