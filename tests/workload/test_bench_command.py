"""`pigou bench` as it is called: exit status, table, JSON, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.workload.stub import Stub

from pigou.cli import main

Start = Callable[..., Stub]
SMALL = ["--input", "8", "--output", "4", "--requests", "5"]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_good_run_prints_its_table_and_exits_with_0(
    stub: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(stub().url, "--rate", "200", *SMALL) == 0
    assert call(stub().url, "--rate", "200@0/400@0.1", *SMALL) == 0
    seen = capsys.readouterr()
    for word in ("open loop", "Offered", "TTFT", "ITL", "TPOT", "End-to-end", "Client queue wait"):
        assert word in seen.out
    assert seen.err == ""


def test_the_document_has_stable_keys_and_no_secret(
    stub: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert call(stub().url, *SMALL, "--json", str(path), "--api-key", "s3cret") == 0
    text = path.read_text()
    found = json.loads(text)
    assert "s3cret" not in text + capsys.readouterr().out
    assert list(found) == [
        "version", "load", "prompts", "fields", "interrupted", "notes", "seconds", "offered",
        "completed", "failed", "cancelled", "failures", "output_tokens_per_second",
        "requests_per_second", "output_tokens", "output_tokens_asked", "prompt_tokens",
        "cached_tokens", "tokens_per_chunk", "counted_by", "ttft_ms", "itl_ms", "tpot_ms",
        "e2e_ms", "queue_wait_ms", "server_ttft_ms", "server_e2e_ms", "attained",
    ]  # fmt: skip
    assert list(found["ttft_ms"]) == ["mean", "p50", "p90", "p95", "p99"]
    assert (found["version"], found["load"]["requests"], found["load"]["model"]) == (1, 5, "stub")


def test_a_failed_request_makes_the_status_1(
    stub: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(stub(fault=lambda n: "503" if n == 2 else "").url, *SMALL) == 1
    assert "1 failed: HTTP 503" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [["--rate", "1", "--concurrency", "2"], ["--cv", "2"], ["--json", "/nowhere/at/all.json"]],
)
def test_options_that_contradict_one_another_exit_with_2(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("http://127.0.0.1:9", *wrong) == 2
    assert wrong[0] in capsys.readouterr().err


def test_an_endpoint_that_is_not_there_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("http://127.0.0.1:9") == 1
    assert "does not answer" in capsys.readouterr().err


def test_ctrl_c_prints_what_was_measured_so_far(stub: Start) -> None:
    server = stub(first=0.05)
    argv = [sys.executable, "-m", "pigou", "bench", server.url, "--duration", "60"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 60
        while len(server.jobs) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=30)
    assert run.returncode == 130, err
    assert "Interrupted" in out
    assert "TTFT" in out


def test_the_share_inside_an_objective_is_told_and_a_wrong_one_refused(
    stub: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert call(stub().url, *SMALL, "--json", str(path), "--slo", "ttft=60s,itl=60s") == 0
    assert json.loads(path.read_text())["attained"] == 1.0
    assert "Inside the objective" in capsys.readouterr().out
    assert call("http://127.0.0.1:1", "--slo", "fast=1") == 2
