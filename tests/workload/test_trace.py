"""Recorded traces are read as they are, and replayed with what they share."""

from __future__ import annotations

import asyncio
import json
import shutil
import tarfile
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ConfigError
from pigou.request import SECOND
from pigou.workload.bench import plan
from pigou.workload.bench_config import BenchConfig
from pigou.workload.load_generator import LoadGenerator
from pigou.workload.prompts import PromptJob
from pigou.workload.token_counter import Failure, SentRequest
from pigou.workload.trace import Trace, TraceSession, Turn
from pigou.workload.trace_formats import read_trace


def agent(name: str, turns: int) -> dict[str, object]:
    rows: list[dict[str, object]] = [
        {"t": i, "in": 64 * (i + 2), "out": 10, "hash_ids": list(range(i + 2)), "think_time": 1.5}
        for i in range(turns)
    ]
    rows.insert(1, {"type": "subagent", "requests": []})
    return {"id": name, "block_size": 64, "requests": rows}


def test_mooncake_lines_become_sessions_of_one_turn(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 600, "output_length": 6, "hash_ids": [1, 3]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path)
    assert [each.start for each in trace.sessions] == [0.0, 2.0]
    assert trace.block == 512
    first, second = (trace.prompt(each, each.turns[0], range(100)) for each in trace.sessions)
    assert (len(first), len(second)) == (600, 700)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:600]


def test_azure_rows_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    trace = read_trace(path)
    assert trace.sessions[1].start == pytest.approx(0.052)
    assert trace.sessions[1].turns == (Turn(3180, 8),)
    prompts = [trace.prompt(each, each.turns[0], range(50)) for each in trace.sessions]
    assert prompts[0][:20] != prompts[1][:20]


def test_a_log_of_vllm_is_its_data_set_at_the_times_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"

    def write(**times: float) -> None:
        row = {"request_id": "b", "input_toks": 30, "output_toks": 4, "queued_ts": 7.5, **times}
        path.write_text(
            json.dumps(row) + "\n" + json.dumps(row | {k: v * 2 for k, v in times.items()})
        )

    write(arrival_time=0.25)
    log = read_trace(path)
    write(arrival_time_ns=250_000_000)
    assert read_trace(path) == log
    assert [each.start for each in log.sessions] == [0.0, 0.25]
    (tmp_path / "meta.json").write_text('{"vllm_version": "0.19.0"}')
    assert read_trace(tmp_path) == log  # the folder that it was kept in
    around = tmp_path / "run"
    around.mkdir()
    with pytest.raises(ConfigError, match=r"no requests\.jsonl of a vLLM log; name the folder"):
        read_trace(around)
    (around / "config.json").write_text("{}")
    shutil.copytree(tmp_path, around / "vllm", ignore=shutil.ignore_patterns("run"))
    assert read_trace(around) == log
    write(arrival_time=1.0, arrival_time_ns=10**9)
    with pytest.raises(ConfigError, match="not both"):
        read_trace(path)


def test_agent_sessions_are_read_from_file_folder_and_archive(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(agent(name, 3)))
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for name in "ab":
            archive.add(tmp_path / f"{name}.json", f"x/{name}.json")
    folder, packed, one = (read_trace(tmp_path / n) for n in ("", "all.tar", "a.json"))
    assert folder == packed
    assert [each.scope for each in folder.sessions] == ["a", "b"]
    assert one.sessions == folder.sessions[:1]
    assert len(one.sessions[0].turns) == 3
    assert one.sessions[0].turns[1].think == 1.5


@given(st.floats(0.02, 2), st.integers(2, 12))
def test_at_every_scale_a_turn_extends_the_one_before(scale: float, turns: int) -> None:
    session = TraceSession(
        0, "s", tuple(Turn(64 * (i + 1), 9, tuple(range(i + 1))) for i in range(turns))
    )
    trace = Trace(64, (session,)).scaled(scale)
    scaled = trace.sessions[0]
    prompts = [trace.prompt(scaled, turn, range(1000)) for turn in scaled.turns]
    for turn, prompt in zip(scaled.turns, prompts, strict=True):
        assert len(prompt) == turn.input
    for before, after in pairwise(prompts):
        shared = max(0, len(before) - 2)  # rounding of lengths and edges
        assert after[:shared] == before[:shared]


def test_scopes_share_nothing_and_the_same_scope_all() -> None:
    turn = Turn(64, 1, (7,))
    sessions = (
        TraceSession(0, "a", (turn,)),
        TraceSession(1, "b", (turn,)),
        TraceSession(2, "a", (turn,)),
    )
    trace = Trace(64, sessions)
    a, b, again = (trace.prompt(each, turn, range(1000)) for each in sessions)
    assert a == again
    assert a != b


def test_a_session_ends_before_the_first_turn_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(agent("a", 5)))
    config = BenchConfig(url="http://h", trace=str(tmp_path / "a.json"))
    replay = plan(config, 64 * 4 + 10)
    assert [turn.input for turn in replay.trace.sessions[0].turns] == [128, 192, 256]
    assert replay.dropped == 2
    with pytest.raises(ConfigError, match="lower --trace-scale"):
        plan(config, 100)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"id": 1, "block_size": 64, "requests": []}'])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"t\.json"):
        read_trace(path)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "fields",
    [
        {"trace": "x", "chat": True},
        {"trace": "x", "requests": 3},
        {"sessions": 3},
        {"trace_scale": 0.5},
        {"trace": "x", "trace_speed": 0.0},
    ],
)
def test_contradictions_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        BenchConfig(url="http://h", **fields)  # type: ignore[arg-type]


async def test_turns_wait_for_the_one_before_and_its_think_time() -> None:
    sent: list[tuple[int, int]] = []

    async def send(job: PromptJob, intended: int) -> SentRequest:
        began = time.monotonic_ns()
        await asyncio.sleep(0.02)
        sent.append((began, time.monotonic_ns()))
        return SentRequest(job, intended, began, Failure("x", "y"))  # type: ignore[call-arg]

    drive = LoadGenerator(send)
    jobs = [(PromptJob([1], 1), 0.0), (PromptJob([1], 1), 0.05)]
    await drive.sessions([jobs, jobs], [0.0, 0.0], slots=1)
    assert drive.offered_requests == drive.failed == 4
    for before, after in pairwise(sent):
        assert after[0] >= before[1]
    assert sent[1][0] - sent[0][1] >= 0.05e9


async def test_nothing_is_sent_early_where_the_loop_wakes_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early: list[int] = []
    sleep = asyncio.sleep

    async def send(job: PromptJob, intended: int) -> SentRequest:
        early.append(intended - time.monotonic_ns())
        return SentRequest(job, intended, intended, Failure("x", "y"))  # type: ignore[call-arg]

    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0.9 * seconds))
    await LoadGenerator(send).open([PromptJob([1], 1)] * 3, [0, SECOND // 50, SECOND // 25])
    assert len(early) == 3
    assert max(early) <= 0
