"""`pigou profile` before a worker that sleeps by a known law."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

import aiohttp
import msgspec
import pytest
from tests.lib.forked_python import Popen
from tests.workload.stub import Behaviour, Stub

from pigou.cli import main
from pigou.cli.measure import fleet_token
from pigou.cli.progress import WorkProgress
from pigou.sim.timing_measured import WorkerProfile, seconds_at
from pigou.wire.fleet_secret import VARIABLE
from pigou.workload.bench_config import ProfileConfig
from pigou.workload.profiling.measure import find_target

STEP, EACH, TOKEN = 0.005, 0.0005, 0.0004
LAW = f"law:itl_a={STEP},itl_b={EACH},prefill_token={TOKEN}"

Start = Callable[..., str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a worker that sleeps; return its address."""
    started: list[subprocess.Popen[str]] = []

    def begin(*options: str) -> str:
        argv = [sys.executable, "-m", "pigou", "worker", "--port", "0", "--exit-with-parent",
                "--timing", LAW, "--blocks", "512", *options]  # fmt: skip
        started.append(Popen(argv, stdout=subprocess.PIPE, text=True))
        out = started[-1].stdout
        assert out is not None
        line = out.readline()
        assert line, "the worker ended"
        return str(json.loads(line)["url"])

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def profile(url: str, file: Path, *options: str) -> WorkerProfile:
    with pytest.raises(SystemExit) as ended:
        main(["profile", url, "--out", str(file), *options])
    assert ended.value.code == 0
    return msgspec.json.decode(file.read_bytes(), type=WorkerProfile)


def test_a_profile_is_a_timing_that_simulations_take(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = start("--max-model-len", "192", "--max-batched-tokens", "96", "--max-seqs", "2")
    file = tmp_path / "timing.json"
    found = profile(url, file, "--repeats", "1", "--steps", "8")
    assert "How well it fits" in capsys.readouterr().out
    assert [n for n, _ in found.decodes] == [1, 2]
    assert found.about["limits"]["tokens"] == 96
    assert (found.blocks, found.block_size) == (512, 16)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--timing", str(file), "--workload", "poisson:rate=5,in=32,out=8,n=20"])
    assert ended.value.code == 0
    assert "20 completed" in capsys.readouterr().out


def test_a_second_profile_has_prompts_that_no_cache_holds(start: Start) -> None:
    url = start()

    async def prompt(seed: int | None) -> list[int]:
        async with aiohttp.ClientSession() as session:
            return (await find_target(ProfileConfig(url=url, seed=seed), session)).prompt(32)

    first, second, third, fourth = (asyncio.run(prompt(seed)) for seed in (None, None, 1, 1))
    assert first != second
    assert third == fourth


@pytest.mark.slow
def test_a_known_law_is_recovered(start: Start, tmp_path: Path) -> None:
    url = start("--max-model-len", "512", "--max-batched-tokens", "256", "--max-seqs", "4")
    found = profile(url, tmp_path / "timing.json")
    for n, _ in found.decodes:
        said = seconds_at(found.decodes, n) + seconds_at(found.cache, 200 * n)
        assert said == pytest.approx(STEP + EACH * n, rel=0.05)
    for tokens in (128, 255):
        reads = tokens * (tokens + 1) / 2
        said = seconds_at(found.prompts, tokens) + found.context * reads + found.prompt
        assert said == pytest.approx(TOKEN * tokens, rel=0.15)
    assert found.alone < 0.01
    assert found.overhead < 0.02


@pytest.mark.parametrize(
    ("options", "words", "status"),
    [
        (["http://127.0.0.1:9", "--out", "x.json"], "does not answer", 1),
        (["http://127.0.0.1:9", "--out", "x.csv"], "name a .json file", 2),
        (["127.0.0.1:9"], "write for example http://127.0.0.1:8000", 2),
        (["http://127.0.0.1:9", "--repeats", "0"], "--repeats is 0", 2),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str],
    words: str,
    status: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["profile", *options])
    assert ended.value.code == status
    assert words in capsys.readouterr().err


def test_a_busy_worker_is_not_measured(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = start("--max-model-len", "4096")
    body = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(),
                      {"content-type": "application/json"})  # fmt: skip
    threading.Thread(target=swallow, args=(request,), daemon=True).start()
    wait_busy(url)
    with pytest.raises(SystemExit) as ended:
        main(["profile", url, "--out", str(tmp_path / "timing.json")])
    assert ended.value.code == 1
    assert "is busy" in capsys.readouterr().err


def swallow(request: Request) -> None:
    """Ask, and mind no answer: the worker ends with the test."""
    with suppress(OSError, HTTPException):
        urlopen(request).read()


def wait_busy(url: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with urlopen(f"{url}/load") as page:
            if json.load(page)["server_load"] == 1:
                return
        time.sleep(0.05)
    raise AssertionError("the worker has nothing to do")


def test_a_profile_beyond_its_budget_is_smaller_and_says_so(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    quick = functools.partial(WorkProgress, line_every_s=0.02)
    monkeypatch.setattr("pigou.cli.measure.WorkProgress", quick)
    url = start("--max-model-len", "192", "--max-batched-tokens", "96", "--max-seqs", "4")
    file = tmp_path / "timing.json"
    found = profile(url, file, "--steps", "8", "--budget", "0.001")
    assert found.about["repeats"] == 1
    assert [n for n, _ in found.decodes] == [1]
    first, second = found.about["notes"]
    assert "no more than 1 decodes" in first
    assert "1 of 5 rounds" in second
    out, err = capsys.readouterr()
    assert first in out
    assert " left" in err


@pytest.mark.parametrize("command", ["profile", "bench"])
def test_a_worker_of_ones_own_fleet_is_sent_the_fleets_token(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The worker and the command start from one shell; keys of other services do not get in."""
    monkeypatch.setenv(VARIABLE, "a secret of the fleet, long enough")
    url = start("--max-model-len", "192", "--max-batched-tokens", "96", "--max-seqs", "2")
    monkeypatch.setenv("OPENAI_API_KEY", "of somebody else")
    options = {
        "profile": ["--repeats", "1", "--steps", "8", "--out", str(tmp_path / "timing.json")],
        "bench": ["--requests", "1", "--warmup", "1", "--input", "8", "--output", "2"],
    }
    with pytest.raises(SystemExit) as ended:
        main([command, url, *options[command]])
    assert ended.value.code == 0


def test_a_server_that_does_not_prove_the_secret_is_sent_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "a secret of the fleet, long enough")
    with Stub(Behaviour()) as server:
        assert fleet_token(server.url) == ""
    assert VARIABLE not in os.environ
    assert fleet_token(server.url) == ""
