"""Laws of `pigou trace`: what is converted means what it meant, and a sample is of the trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.cli import main
from pigou.cli.option_values import read_part
from pigou.config import ConfigError, ControlConfig
from pigou.control.journal import JournalHead, JournalRecorder, encode
from pigou.control.lengths import lexical
from pigou.control.messages import Ended, FirstToken, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.request import FinishReason, Request, Worker
from pigou.workload.catalogue import TRACES
from pigou.workload.trace import Trace, TraceSession, Turn, hit_ratio, ordered, sharing
from pigou.workload.trace_formats import TraceRow, of_rows, read_trace, to_rows

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["trace", *arguments])
        return int(end.value.code or 0), *capsys.readouterr()

    return call


def rows(path: Path, *values: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


TURNS = st.builds(
    Turn, st.integers(33, 48), st.integers(1, 9),
    st.lists(st.integers(0, 5), max_size=3).map(tuple), st.floats(0, 9),
)  # fmt: skip


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    sessions = []
    for n in range(draw(st.integers(1, 5))):
        turns = draw(st.lists(TURNS, min_size=1, max_size=3))
        first = Turn(turns[0].input, turns[0].output, turns[0].blocks)
        scope = draw(st.sampled_from("ab"))
        name = draw(st.sampled_from(["", f"s{n}"]))
        sessions.append(TraceSession(draw(st.floats(0, 99)), scope, (first, *turns[1:]),
                                draw(st.sampled_from(["", "ann"])), name))  # fmt: skip
    return ordered(16, sessions)


@given(traces())
@settings(max_examples=examples(80))
def test_a_converted_trace_is_the_same_trace(trace: Trace) -> None:
    found = of_rows(list(to_rows(trace)))
    assert len(found.sessions) == len(trace.sessions)
    names: dict[tuple[str, int], int] = {}
    for was, now in zip(trace.sessions, found.sessions, strict=True):
        assert (was.start, was.tenant) == (now.start, now.tenant)
        assert was.name in ("", now.name)
        for one, two in zip(was.turns, now.turns, strict=True):
            assert (one.input, one.output, one.think) == (two.input, two.output, two.think)
            for block, told in zip(one.blocks, two.blocks, strict=True):
                assert names.setdefault((was.scope, block), told) == told
    assert len(set(names.values())) == len(names)
    assert sharing(found) == sharing(trace)


def test_rows_of_our_own_are_read(tmp_path: Path) -> None:
    path = rows(
        tmp_path / "t.jsonl",
        {"arrival_s": 5.5, "input": 40, "output": 3, "hash_ids": [1, 2], "block": 32,
         "tenant": "ann", "session": 7},
        {"think_s": 2, "input": 60, "output": 4, "hash_ids": [1, 2], "block": 32, "session": 7},
        {"arrival_s": 4, "input": 9, "output": 1},
    )  # fmt: skip
    trace = read_trace(path)
    assert trace.block == 32
    assert trace.sessions[0] == TraceSession(0.0, "row 3", (Turn(9, 1),))
    turns = (Turn(40, 3, (1, 2)), Turn(60, 4, (1, 2), 2.0))
    assert trace.sessions[1] == TraceSession(1.5, "trace", turns, "ann", "7")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([{"arrival_s": 0, "input": 1, "output": 1, "what": 2}], "what"),
        ([{"input": 1, "output": 1}], "arrival_s or think_s"),
        ([{"arrival_s": 0, "think_s": 1, "input": 1, "output": 1}], "not both"),
        ([{"think_s": 1, "input": 1, "output": 1, "session": "a"}], "no session before"),
        ([{"arrival_s": 0, "input": 0, "output": 1}], "no tokens"),
        ([{"arrival_s": 0, "input": 9, "output": 1, "hash_ids": [1, 2]}], "by block"),
        ([{"arrival_s": 0, "input": 9, "output": 1, "hash_ids": [1], "block": b}
          for b in (16, 32)], "must be equal"),
        ([{"arrival_s": 0, "input": 9, "output": 1, "block": -1}], "above 0"),
        ([{"arrival_s": 0, "input": 9, "output": 1}, {"arrival_s": "x"}], "line 2"),
    ],
)  # fmt: skip
def test_rows_that_contradict_themselves_are_refused(
    tmp_path: Path, values: list[dict[str, object]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(rows(tmp_path / "t.jsonl", *values))


def test_logs_of_vllm_bailian_and_burstgpt_are_read(tmp_path: Path) -> None:
    vllm = {"input_toks": 8, "output_toks": 2, "arrival_time_ns": 3_000_000_000}
    later = vllm | {"arrival_time_ns": 4_500_000_000}
    found = read_trace(rows(tmp_path / "log.jsonl", vllm, later))
    assert [each.start for each in found.sessions] == [0.0, 1.5]
    row = {"chat_id": 3, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 20,
           "output_length": 4, "type": "text", "turn": 1, "hash_ids": [9, 8]}  # fmt: skip
    found = read_trace(rows(tmp_path / "qwen_traceA_blksz_16.jsonl", row))
    assert (found.block, found.sessions[0].name) == (16, "3")
    assert read_trace(rows(tmp_path / "q.jsonl", row)).block == 16
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n6,GPT-4,9,0,9,API log\n45,GPT-4,1087,230,1317,x\n"
    )
    found = read_trace(path)
    assert [(each.start, each.turns[0]) for each in found.sessions] == [
        (0.0, Turn(472, 18)), (40.0, Turn(1087, 230))
    ]  # fmt: skip
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="of no known trace"):
        read_trace(path)


def test_the_best_hit_ratio_is_that_of_a_cache_of_that_size() -> None:
    turn = (Turn(64, 1, (1, 2, 3, 4)), Turn(64, 1, (5, 6, 7, 8)))
    trace = Trace(16, tuple(TraceSession(n, "t", (turn[n % 2],)) for n in range(8)))
    assert hit_ratio(trace, float("inf")) == 6 / 8
    assert hit_ratio(trace, 64) == 0.0  # each pushes the other one out
    assert hit_ratio(trace, 128) == 6 / 8
    assert 0.0 < hit_ratio(trace, 112) < 6 / 8
    assert sharing(trace).reuse == 1 - 8 / 32


def test_a_sample_is_a_part_of_the_trace_and_the_same_for_a_seed(run: Run, tmp_path: Path) -> None:
    values = [{"arrival_s": n, "input": 100 + n, "output": 9} for n in range(50)]
    path = str(rows(tmp_path / "t.jsonl", *values))
    outs = [str(tmp_path / f"{n}.jsonl") for n in range(4)]
    options = ["--from", "10", "--to", "40", "--sessions", "7", "--seed"]
    for out, seed in zip(outs[:3], "112", strict=True):
        assert run("sample", path, out, *options, seed)[0] == 0
    one, two, three = (Path(out).read_bytes() for out in outs[:3])
    assert one == two != three
    trace = read_trace(outs[0])
    whole = {each.turns[0].input: each.start for each in read_trace(path).sessions}
    inputs = [each.turns[0].input for each in trace.sessions]
    assert len(set(inputs)) == 7
    assert all(110 <= each < 140 for each in inputs)
    for session in trace.sessions:
        start = whole[session.turns[0].input] - whole[inputs[0]]
        assert session.start == pytest.approx(start)
    assert run("sample", path, outs[3], "--scale", "0.5", "--speed", "2")[0] == 0
    halved = read_trace(outs[3])
    assert halved.sessions[-1].start == 24.5
    assert halved.sessions[-1].turns[0].input == round(149 / 2)


@pytest.mark.parametrize(
    "arguments",
    [["sample", "T", "o", "--sessions", "99"], ["sample", "T", "o", "--scale", "0"],
     ["sample", "T", "o", "--from", "100"], ["sample", "T", "o", "--seed", "-1"],
     ["convert", "T", "/nowhere/o"], ["convert", "/nowhere", "o"], ["info", "/nowhere"],
     ["info", "T", "--cache", "5"], ["info", "T", "--cache", "x"], ["download", "nope"],
     ["download", "azure-2023-code", "--out", "/nowhere"]],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_a_line(
    run: Run, tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = rows(tmp_path / "t.jsonl", {"arrival_s": 0, "input": 1, "output": 1})
    code, _, err = run(*[str(path) if each == "T" else each for each in arguments])
    assert code == 2
    assert err.startswith("pigou trace ")
    assert "Traceback" not in err


def test_info_tells_lengths_rate_and_sharing(run: Run, tmp_path: Path) -> None:
    values = [{"timestamp": n * 1000, "input_length": 1024, "output_length": 10 * (n + 1),
               "hash_ids": [1, n + 2]} for n in range(5)]  # fmt: skip
    path = str(rows(tmp_path / "t.jsonl", *values))
    told = json.loads(run("info", path, "--json", "--cache", "1k")[1])
    assert told["requests"] == told["sessions"] == 5
    assert told["sessions_per_s"] == 1.0
    assert told["output"]["max"] == 50
    assert told["blocks_seen_before"] == pytest.approx(0.4)
    assert told["hit_ratio_at_best"] == pytest.approx(0.4)
    assert told["hit_ratio_1000_tokens"] == pytest.approx(0.4)
    assert "hit ratio at best" in run("info", path)[1]


def test_the_catalogue_names_each_trace_once_with_licence_owner_and_checksum(run: Run) -> None:
    assert len({each.name for each in TRACES}) == len(TRACES)
    for each in TRACES:
        assert each.licence
        assert each.page.startswith("https://github.com/")
        assert not each.address or each.address.startswith("https://")
        assert len(each.sha256) in (0, 64)
        assert not each.verified or each.size
    out = run("list")[1]
    assert "azure-2024-code *" in out
    assert "unverified" in out


def test_rows_are_written_as_short_as_they_can_be() -> None:
    session = TraceSession(1.0, "s", (Turn(5, 6),))
    assert list(to_rows(Trace(1.0, (session,)))) == [TraceRow(arrival_s=1.0, input=5, output=6)]


def test_lengths_are_learned_from_a_journal_and_begin_a_predictor(run: Run, tmp_path: Path) -> None:
    config = ControlConfig(lengths={"predictor": "online"})
    plane, lines = (
        ControlPlane(config),
        [encode(JournalHead(format=2, pigou="1", now=0, unix=0, config=config))],
    )
    calls = JournalRecorder(plane, lambda entry: lines.append(encode(entry)))
    calls.observe(WorkerUp(Worker("w", "u")), 0)
    for number in range(60):
        tenant, tokens = (("brief", 5), ("wordy", 700))[number % 2]
        name, now = f"r{number}", 10 * number + 1
        calls.submit(Request(name, 900, 4096, tenant=tenant, features=lexical("why?")), now)
        calls.observe(FirstToken(name), now + 1)
        calls.on_tokens(np.array([calls.slot(name)]), np.array([tokens]), now + 2)
        calls.observe(Ended(name, FinishReason.STOP), now + 3)
    journal, model = tmp_path / "journal.jsonl", tmp_path / "lengths.json"
    journal.write_bytes(b"".join(lines))
    code, out, _ = run("train", str(journal), str(model), "--share", "0.5")
    assert code == 0
    assert "60 answers" in out
    assert "rank correlation 1.00" in out
    begun = ControlPlane(
        ControlConfig(
            lengths={"predictor": "online"},
            length_model=read_part("--length-model", str(model), "length_model"),
        )
    )
    assert begun.tracker.lengths is not None
    ranks = [begun.tracker.lengths.predict(Request("r", 900, 10, tenant=name)).rank
             for name in ("brief", "wordy")]  # fmt: skip
    assert ranks[0] < 60
    assert ranks[1] > 400
    assert run("train", str(journal), str(model), "--share", "1.5")[0] == 2
    assert run("train", str(tmp_path / "none"), str(model))[0] == 2
