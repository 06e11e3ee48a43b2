"""`--requests FILE`: live and simulated runs write one format, and replay each other's requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.workload.stub import Stub

from pigou.cli import main
from pigou.config import ConfigError
from pigou.request import SECOND
from pigou.sim.request_run import RequestRun
from pigou.sim.result import SimulationResult
from pigou.sim.streams import ITLHistogram
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec, block_hashes
from pigou.workload.request_log import simulated_rows
from pigou.workload.trace_formats import of_rows, read_trace
from pigou.workload.workload_spec import from_trace

Start = Callable[..., Stub]
TIMING = ["--timing", "law:itl_a=0.01,prefill_token=0.0001", "--blocks", "2000"]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code


def simulated(workload: str, path: Path) -> list[dict[str, Any]]:
    figures = path.with_suffix(".json")
    options = ["--requests", str(path), "--json", str(figures)]
    assert call("simulate", "--workload", workload, *TIMING, *options) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == json.loads(figures.read_text())["offered"]
    return rows


@pytest.mark.parametrize(
    "workload",
    [
        "closed:C=4,in=100:300,out=5,templates=3,n=30",
        "closed:C=4,in=64,out=5,templates=3,n=30",
        "poisson:rate=40,in=40:200,out=3:9,n=30",
        "mix=0.7:256/8,0.3:512/16,prefix=64,rate=30,n=30",
    ],
)
def test_a_simulation_of_the_written_requests_is_the_same_run(
    workload: str, tmp_path: Path
) -> None:
    rows = simulated(workload, tmp_path / "a.jsonl")
    again = simulated(str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl")
    first_s = rows[0]["arrival_s"]  # a replay begins with its first request
    assert len(rows) == 30
    for row, other in zip(rows, again, strict=True):
        assert _moved(other, first_s) == pytest.approx(_moved(row, 0.0))
        assert {k: v for k, v in row.items() if k not in ("arrival_s", "result")} == {
            k: v for k, v in other.items() if k not in ("arrival_s", "result")
        }


def _moved(row: Mapping[str, Any], seconds: float) -> dict[str, float]:
    names = ("intended_s", "sent_s", "first_token_s", "last_token_s")
    return {name: row["result"][name] + seconds for name in names} | {
        "cached": row["result"]["cached_tokens"], "tokens": row["result"]["output_tokens"],
    }  # fmt: skip


def test_sessions_are_written_as_sessions(tmp_path: Path) -> None:
    trace = tmp_path / "sessions.jsonl"
    trace.write_text(
        '{"arrival_s":0,"input":64,"output":4,"hash_ids":[0,1,2,3],"tenant":"ann","session":"s"}\n'
        '{"think_s":0.5,"input":96,"output":4,"hash_ids":[0,1,2,3,4,5],"tenant":"ann","session":"s"}\n'
        '{"arrival_s":0.1,"input":64,"output":4,"hash_ids":[0,1,2,3]}\n'
    )
    rows = simulated(str(trace), tmp_path / "a.jsonl")
    turn = next(row for row in rows if "think_s" in row)
    assert (turn["think_s"], turn["tenant"], turn["result"]["cached_tokens"]) == (0.5, "ann", 64)
    assert turn["session"] == rows[0]["session"]
    # Tenants share nothing, so the third prompt has blocks of its own.
    assert rows[1]["hash_ids"] == [4, 5, 6, 7] or rows[1]["result"]["cached_tokens"] == 0
    assert simulated(str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl") == rows


def test_a_live_run_and_a_simulation_replay_each_others_requests(
    stub: Start, tmp_path: Path
) -> None:
    live, again, file = tmp_path / "live.jsonl", tmp_path / "again.jsonl", str(tmp_path / "s.jsonl")
    url = stub().url
    shape = ["--input", "16:40", "--output", "2:6", "--prefixes", "2", "--prefix-length", "32"]
    assert (
        call("bench", url, "--rate", "200", "--count", "12", *shape, "--requests", str(live)) == 0
    )
    played = read_trace(live)
    rows = simulated(str(live), Path(file))
    assert [row["input"] for row in rows] == [s.turns[0].input for s in played.sessions]
    assert [row["output"] for row in rows] == [s.turns[0].output for s in played.sessions]
    # 32 tokens of prefix are two blocks, and there are two prefixes.
    assert len({tuple(row["hash_ids"][:2]) for row in rows}) == 2
    assert sum(row["result"]["cached_tokens"] for row in rows) >= 8 * 32
    assert call("bench", url, "--trace", file, "--requests", str(again)) == 0
    lines = [json.loads(line) for line in again.read_text().splitlines()]
    assert [line["input"] for line in lines] == [row["input"] for row in rows]
    assert [line["output"] for line in lines] == [row["output"] for row in rows]
    shared = [[row["hash_ids"][:2] for row in some] for some in (rows, lines)]
    one, other = ([blocks.index(own) for own in blocks] for blocks in shared)
    assert one == other
    assert all(line["result"]["outcome"] == "done" for line in lines)


def test_a_failed_request_says_why(stub: Start, tmp_path: Path) -> None:
    server, path = stub(fault=lambda n: "503" if n == 2 else ""), tmp_path / "a.jsonl"
    small = ["--input", "8", "--output", "4", "--count", "3", "--requests", str(path)]
    assert call("bench", server.url, *small) == 1
    results = [json.loads(line)["result"] for line in path.read_text().splitlines()]
    assert sorted(result["outcome"] for result in results) == ["done", "done", "failed"]
    assert [result["reason"] for result in results if "reason" in result] == ["HTTP 503"]


def test_a_number_is_the_count_and_is_given_once(
    stub: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = stub()
    assert call("bench", server.url, "--requests", "3", "--input", "8", "--output", "2") == 0
    assert call("bench", server.url, "--requests", "3", "--count", "3") == 2
    assert "give the number once" in capsys.readouterr().err
    assert call("bench", server.url, "--requests", "0") == 2
    assert "--count is 0" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "simulate", "experiment"])
def test_a_file_that_cannot_be_written_is_refused_first(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = {
        "bench": ["http://127.0.0.1:9"],
        "simulate": ["--workload", "poisson:rate=1,n=1", *TIMING],
        "experiment": ["table4", "--out", "/tmp"],
    }[command]
    assert call(command, *rest, "--requests", "/nowhere/at/all.jsonl") == 2
    assert "--requests is '/nowhere/at/all.jsonl'" in capsys.readouterr().err


def test_lines_of_several_runs_are_no_workload(tmp_path: Path) -> None:
    path = tmp_path / "several.jsonl"
    row = '{"arrival_s":0,"input":8,"output":2,"run":"table4-%d"}\n'
    path.write_text(row % 1 + row % 2)
    with pytest.raises(ConfigError, match="2 runs, from 'table4-1' on; keep those of one run"):
        read_trace(path)


def test_an_experiment_writes_the_requests_of_all_runs(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    options = ["--levels", "1", "--runs", "2", "--reading", "fair", "--no-report"]
    out = ["--out", str(tmp_path), "--requests", str(path)]
    assert call("experiment", "table4", *options, *out) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    runs = json.loads((tmp_path / "results.json").read_text())["rows"][0]["runs"]
    names = dict.fromkeys(row["run"] for row in rows)
    assert list(names) == [
        f"table4-{n + 1} users=1 seed={run['seed']}" for n, run in enumerate(runs)
    ]
    for name, run in zip(names, runs, strict=True):
        one = [row["result"] for row in rows if row["run"] == name]
        done = [result for result in one if result["last_token_s"] <= 150.0]
        assert len(done) == run["requests"]
        mean_s = sum(result["last_token_s"] - result["intended_s"] for result in done) / len(done)
        assert mean_s == pytest.approx(run["e2e_mean_s"])


@st.composite
def loops(draw: st.DrawFn) -> OpenLoop:
    """Prompts that share beginnings, in blocks of one size or of several, or share nothing."""
    sizes = draw(st.lists(st.sampled_from([16.0, 24.0, 64.0, 100.5]), min_size=1, max_size=2))
    sessions = []
    for at in range(draw(st.integers(1, 6))):
        block = draw(st.sampled_from(sizes))
        ids = tuple(draw(st.lists(st.integers(0, 2), max_size=4)))
        least = round(block * (len(ids) - 1)) + 1 if ids else 1
        spec = RequestSpec(
            draw(st.integers(max(least, 1), max(least, 1) + 80)), draw(st.integers(1, 9)), ids,
            draw(st.integers(1, 2)), block,
        )  # fmt: skip
        sessions.append(RequestSession(at * SECOND, (spec,)))
    return OpenLoop(tuple(sessions))


@given(loops())
def test_a_replay_shares_as_many_blocks_as_the_run(loop: OpenLoop) -> None:
    specs = [session.requests[0] for session in loop.sessions]
    runs = [RequestRun(n, spec, EPOCH + n * SECOND, print) for n, spec in enumerate(specs)]
    result = SimulationResult(
        runs, ITLHistogram(), EPOCH, EPOCH, 0.0, (), (), {}, (), 0, (0, 0)
    )  # fmt: skip
    rows = list(simulated_rows(result, loop))
    played = [session.requests[0] for session in from_trace(of_rows(rows)).sessions]
    assert [(p.prompt_tokens, p.output_tokens) for p in played] == [
        (spec.prompt_tokens, spec.output_tokens) for spec in specs
    ]
    assert shared(played) == shared(specs)


def shared(specs: list[RequestSpec]) -> list[int]:
    """Blocks of 16 tokens that each two prompts have in common at their beginning."""
    hashes = [block_hashes(spec, number, 16) for number, spec in enumerate(specs)]
    counts = []
    for one, other in combinations(hashes, 2):
        size = min(len(one), len(other))
        same = (one[:size] == other[:size]).all(axis=1)
        counts.append(size if same.all() else int(same.argmin()))
    return counts
