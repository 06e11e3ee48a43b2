"""Journals of live fleets: recorded once, decided again by each `compare`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from .simulate import call
from .store import JOURNALS, without_wall_clock

_REQUESTS = 60
_CONNECTIONS = 12
_START_S = 180.0
#: The line of the banner that names the fleet's address.
_ADDRESS = re.compile(r"serves \S+ at (http://[\d.:]+)/v1")


class LiveRun(NamedTuple):
    """A live fleet whose journal is kept."""

    covers: str
    options: str
    kills: bool = False  # whether a decode worker is killed half way


JOURNALED = {
    "toll-1p2d": LiveRun(
        "toll on prefill and decode workers", "--prefill 1 --decode 2 --policy toll"
    ),
    "toll-killed": LiveRun(
        "toll while a worker dies", "--both 3 --max-inflight 4 --policy toll", kills=True
    ),
    "fair-power-of-two": LiveRun(
        "fair order, a short queue, softmax",
        "--both 2 --policy power-of-two --temperature 0.5 --admission fair --max-inflight 3 "
        "--max-queued 8 --queue-timeout 300",
    ),
    "llm-d-priority": LiveRun(
        "another policy, strict priorities", "--both 2 --policy llm-d --admission priority "
        "--max-inflight 2",
    ),
    "dynamo-regime": LiveRun(
        "learned parameters, conditional disaggregation",
        "--prefill 1 --decode 2 --policy dynamo-conditional --controller regime",
    ),
}  # fmt: skip


def record_journal(name: str) -> bytes:
    """Serve some requests live, and return the journal, packed."""
    run = JOURNALED[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        with serving(f"{run.options} --journal {path}") as (url, process):
            _load(url, process, run.kills)
        return gzip.compress(path.read_bytes(), mtime=0)


def replay_journal(name: str) -> dict[str, Any]:
    """Decide a stored journal again; return what `pigou replay` says of it."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "journal.jsonl", Path(folder) / "out.json"
        path.write_bytes(gzip.decompress((JOURNALS / f"{name}.jsonl.gz").read_bytes()))
        ended = call(["replay", str(path), "--json", str(out)])
        figures = json.loads(out.read_text()) if out.is_file() else None
        return {
            "status": ended.status,
            "errors": ended.errors.replace(folder, ""),
            "figures": without_paths(without_wall_clock(figures), folder),
        }


def without_paths(value: Any, folder: str) -> Any:
    """Return a document without the name of a temporary folder."""
    return json.loads(json.dumps(value).replace(folder, ""))


@contextlib.contextmanager
def serving(options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `pigou serve` with these options; yield its address and its process."""
    command = [sys.executable, "-m", "pigou", "serve", "--port", "0", *options.split()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield _address(process), process
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    end = time.monotonic() + _START_S
    for line in process.stdout:
        if match := _ADDRESS.search(line):
            return match[1]
        if time.monotonic() > end:
            break
    raise RuntimeError(f"{process.args!r} did not start")


def _load(url: str, process: subprocess.Popen[str], kills: bool) -> None:
    """Send requests of several kinds; how each ends does not matter."""
    with concurrent.futures.ThreadPoolExecutor(_CONNECTIONS) as pool:
        waiting = []
        for number in range(_REQUESTS):
            waiting.append(pool.submit(_ask, url, number))
            if kills and number == _REQUESTS // 2:
                kill_worker(process)
            time.sleep(0.02)
        for future in waiting:
            future.result()


def _ask(url: str, number: int) -> None:
    """Send one request: a stream, a whole reply, several sequences, or one that is broken off."""
    dice = random.Random(number)
    prompt = f"Topic {dice.randrange(4)}. " * 12 + f"Question {dice.randrange(100)}?"
    body: dict[str, Any] = {
        "model": "pigou-tiny", "prompt": prompt, "max_tokens": dice.randrange(2, 14),
        "temperature": 0, "stream": number % 3 != 0, "priority": number % 3,
        "n": 3 if number % 10 == 9 else 1,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=120) as reply:
        reply.read(200 if number % 7 == 6 else -1)


def kill_worker(process: subprocess.Popen[str], last: bool = False) -> None:
    """Kill the first worker that a gateway started, or the last one."""
    children = psutil.Process(process.pid).children()
    for child in sorted(children, key=lambda one: one.pid, reverse=last):
        with contextlib.suppress(psutil.Error):
            if "worker" in child.cmdline():
                child.kill()
                return
