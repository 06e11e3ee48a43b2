"""Laws of a trace's numbers: what no request has is refused with its row, and the rest is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pigou.cli import main
from pigou.config import ConfigError
from pigou.sim.arrival_rate import MAX_SECONDS
from pigou.sim.workload import MAX_TOKENS
from pigou.workload.trace_formats import read_trace

OWN = {"arrival_s": 0.0, "input": 9, "output": 1}
MOONCAKE = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}
BAILIAN = MOONCAKE | {"chat_id": 1}
VLLM = {"input_toks": 9, "output_toks": 1, "arrival_time": 0.0}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.0,9,1\n"
BURST = "Timestamp,Request tokens,Response tokens\n0,9,1\n1,9,0\n"


def rows(path: Path, *values: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


@pytest.mark.parametrize("count", [-374, -1, MAX_TOKENS + 1, 999_999_999_999])
@pytest.mark.parametrize("field", [0, 1])
def test_lengths_that_no_request_has_are_refused_with_their_row(
    tmp_path: Path, count: int, field: int
) -> None:
    ins, outs = [(count, 1), (9, count)][field]
    files = [
        rows(tmp_path / "own.jsonl", OWN, OWN | {"input": ins, "output": outs}),
        rows(tmp_path / "m.jsonl", MOONCAKE,
             MOONCAKE | {"input_length": ins, "output_length": outs}),
        rows(tmp_path / "b_blksz_16.jsonl", BAILIAN,
             BAILIAN | {"input_length": ins, "output_length": outs}),
        rows(tmp_path / "v.jsonl", VLLM, VLLM | {"input_toks": ins, "output_toks": outs}),
        text(tmp_path / "azure.csv", AZURE + f"2024-05-10 00:00:01.0,{ins},{outs}\n"),
    ]  # fmt: skip
    for path in files:
        with pytest.raises(ConfigError, match="line 3" if path.suffix == ".csv" else "line 2"):
            read_trace(path)
    with pytest.raises(ConfigError, match="line 4"):
        read_trace(text(tmp_path / "burst.csv", BURST + f"5,{ins},{outs}\n"))
    session = {"id": "s", "block_size": 64, "requests": [
        {"in": 9, "out": 1, "hash_ids": []}, {"in": ins, "out": outs, "hash_ids": []}]}  # fmt: skip
    with pytest.raises(ConfigError, match="session s:"):
        read_trace(text(tmp_path / "s.json", json.dumps(session)))


@pytest.mark.parametrize("bad", [2**63, 10**30, -(2**63) - 1])
def test_block_ids_of_more_than_64_bits_are_refused_with_their_row(
    tmp_path: Path, bad: int
) -> None:
    session = {"id": "s", "block_size": 4, "requests": [
        {"in": 9, "out": 1, "hash_ids": [1]}, {"in": 9, "out": 1, "hash_ids": [bad]},
    ]}  # fmt: skip
    files = [
        rows(tmp_path / "own.jsonl", OWN, OWN | {"hash_ids": [1, bad], "block": 8}),
        rows(tmp_path / "m.jsonl", MOONCAKE, MOONCAKE | {"hash_ids": [bad]}),
        rows(tmp_path / "s.json", session),
    ]
    for path in files:
        with pytest.raises(ConfigError, match=r"(line|request) 2.*hash_ids"):
            read_trace(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", AZURE + "2024-05-10 00:00:01.0,9\n", "line 3 .*: it has no GeneratedTokens"),
        ("a.csv", AZURE + "2024-05-10 00:00:01.0,x,1\n", "line 3 .*: ContextTokens is 'x'"),
        ("a.csv", AZURE + "yesterday,9,1\n", "line 3 .*: TIMESTAMP is 'yesterday'"),
        ("a.csv", AZURE.splitlines()[0] + "\n", "a.csv has no requests"),
        ("a.csv", "", "a.csv has no requests"),
        ("b.csv", BURST + "x,9,1\n", "line 4 .*: Timestamp is 'x'"),
        ("s.json", '{"id": 1, "block_size": "x", "requests": []}', "block_size of .* is 'x'"),
        ("s.json", '{"id": 1, "block_size": 0, "requests": []}', "block_size of .* is 0"),
        ("t.jsonl", '{"timestamp": 1, "inp', "line 1 of .*t.jsonl"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_column(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(text(tmp_path / name, content))


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; name a file"):
        read_trace(tmp_path / "gone.jsonl")


def test_no_tokens_of_another_format_count_as_one(tmp_path: Path) -> None:
    path = rows(tmp_path / "m.jsonl", MOONCAKE | {"input_length": 0, "output_length": 0})
    (session,) = read_trace(path).sessions
    assert (session.turns[0].input, session.turns[0].output) == (1, 1)


def test_a_row_of_a_table_that_is_cut_off_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 3 of .*t\.csv"):
        read_trace(text(tmp_path / "t.csv", AZURE + "2024-05-10 00:00:01.0,7\n"))


@pytest.mark.parametrize("start", [1e300, 1e10, MAX_SECONDS + 1.0])
def test_an_arrival_after_more_than_a_year_is_refused_with_its_row(
    tmp_path: Path, start: float
) -> None:
    follows = {"think_s": 1.0, "input": 9, "output": 1, "session": "a"}
    path = rows(tmp_path / "t.jsonl", OWN | {"session": "a"}, follows, OWN | {"arrival_s": start})
    with pytest.raises(ConfigError, match="line 3 starts"):
        read_trace(path)
    with pytest.raises(ConfigError, match="line 2: think time"):
        read_trace(rows(path, OWN | {"session": "a"}, follows | {"think_s": start}))


def test_times_count_from_the_first_arrival_whatever_it_is(tmp_path: Path) -> None:
    starts = [1.7e9, 1.7e9 + MAX_SECONDS]
    path = rows(tmp_path / "t.jsonl", *(OWN | {"arrival_s": start} for start in starts))
    assert [each.start for each in read_trace(path).sessions] == [0.0, MAX_SECONDS]


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("T,speed=1e-9", "speed is 1e-09"),
        ("T,scale=1e9", "scale is 1e+09"),
        ("T,rate=1e-9", "a year"),
        ("poisson:rate=1e-300,n=2", "rate is 1e-300"),
        ("poisson:rate=1,hold=1e10", "a year"),
        ("gamma:rate=1e-7,cv=0,n=9", "a year"),
        ("poisson:rate=1,n=2,in=99999999999", "from 1 to"),
        ("closed:C=1,hold=1e10", "seconds is"),
        ("closed:C=1,hold=9,think=1e10", "think is"),
        ("closed:C=1,hold=9,ramp=nan", "ramp is nan"),
    ],
)
def test_workloads_that_would_not_end_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, workload: str, words: str
) -> None:
    path = rows(tmp_path / "t.jsonl", OWN, OWN | {"arrival_s": 60.0})
    asked = workload.replace("T,", f"{path},")
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--workload", asked, "--timing", "law:340b", "--blocks", "99"])
    _, err = capsys.readouterr()
    assert end.value.code == 2
    assert words in err
    assert err.count("\n") == 1


def test_a_request_that_is_longer_than_all_blocks_fails_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    long = OWN | {"input": MAX_TOKENS, "output": MAX_TOKENS}
    path = rows(tmp_path / "t.jsonl", long, OWN)
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--workload", str(path), "--timing", "law:340b", "--blocks", "99"])
    assert end.value.code == 0
    assert "2 offered, 1 completed, 1 failed" in capsys.readouterr().out
