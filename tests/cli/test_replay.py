"""Laws of `pigou replay`: the same decisions or the first that is another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from pigou.cli import main
from pigou.config import ConfigError, ControlConfig
from pigou.control.journal import JournalRecorder, report_tokens
from pigou.control.messages import Ended, FirstToken, PrefillDone, Route, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.gateway.journal import Journal
from pigou.request import SECOND, FinishReason, Request, Role, Worker
from pigou.workload.trace_formats import read_trace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["replay", *arguments])
        return int(end.value.code or 0), *capsys.readouterr()

    return call


def ending(path: Path, how: str, config: ControlConfig | None = None, prompt: int = 7) -> None:
    """Append a run with one request that ends in this way."""
    config = config or ControlConfig(policy="least-loaded")
    journal = Journal(path, config)
    plane = JournalRecorder(ControlPlane(config), journal.write)
    if how != "never routed":
        for name, role in (("p", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
            plane.observe(WorkerUp(Worker(name, "", role)), SECOND)
    plane.submit(Request("x", prompt, 30, arrival=2 * SECOND), 2 * SECOND)
    if how.endswith("after tokens"):
        report_tokens(plane, [("x", 3)], 3 * SECOND)
    if how != "open":
        reason = FinishReason.ERROR if how.startswith("error") else FinishReason.ABORT
        plane.observe(Ended("x", reason), 4 * SECOND)
    journal.close()


def write(path: Path, config: ControlConfig | None = None, requests: int = 60) -> None:
    """Serve requests on one prefill and two decode workers, one every 20 ms."""
    config = config or ControlConfig(policy="toll")
    journal = Journal(path, config)
    plane = JournalRecorder(ControlPlane(config), journal.write)
    now = SECOND
    for name, role in (("p", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        plane.observe(WorkerUp(Worker(name, "", role)), now)
    for number in range(requests):
        now += SECOND // 50
        name = f"r{number}"
        keys = {16: np.arange(1, 1 + number % 9, dtype=np.uint64)}
        request = Request(name, 160, 30, arrival=now, tenant="ann", keys=keys)
        decision = plane.submit(request, now)
        assert isinstance(decision, Route)
        if decision.choice.prefill:
            plane.observe(PrefillDone(name), now + 5_000_000)
        plane.observe(FirstToken(name), now + 6_000_000)
        report_tokens(plane, [(name, 11)], now + 9_000_000)
        if number >= 5:
            plane.observe(Ended(f"r{number - 5}", FinishReason.STOP), now + 10_000_000)
        plane.tick(now + 11_000_000)
    journal.close()


def test_a_journal_of_a_run_replays_to_the_same_decisions(run: Run, tmp_path: Path) -> None:
    path, figures = tmp_path / "j", tmp_path / "f.json"
    write(path)
    code, out, err = run(str(path), "--json", str(figures))
    assert (code, err) == (0, "")
    assert "60 of 60, for 60 requests" in out
    told = json.loads(figures.read_text())
    assert told["same"] is True
    assert told["seconds"] == pytest.approx(60 * 0.02 + 0.011)


def test_a_journal_is_billed_and_tenants_pay_what_the_fleet_costs(run: Run, tmp_path: Path) -> None:
    path, figures = tmp_path / "j", tmp_path / "f.json"
    write(path)
    options = ("--prices", "H100=3.6", "--gpu", "H100", "--priced-model", "llama-3.1-8b")
    code, out, _ = run(str(path), "--json", str(figures), *options)
    cost = json.loads(figures.read_text())["cost"]
    (ann,) = cost["usages"]
    assert code == 0
    assert "ann: $" in out
    assert cost["usd"] == pytest.approx(cost["gpu_s"] * 1e-3)
    assert ann["allocated_usd"] == pytest.approx(cost["usd"], rel=1e-3)
    assert ann["output_tokens"] == 60 * 11
    assert run(str(path), "--prices", "default")[0] == 2


def test_the_first_other_decision_is_shown_from_both_sides(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path)
    lines = path.read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if '"r30"' in line)
    was = '"decode":"d0"' if '"decode":"d0"' in lines[at] else '"decode":"d1"'
    lines[at] = lines[at].replace(was, '"decode":"elsewhere"')
    path.write_text("".join(lines))
    code, out, _ = run(str(path))
    assert code == 1
    assert f"Another decision at line {at + 1}" in out
    assert '"decode":"elsewhere"' in out
    assert was in out.splitlines()[-1]


def test_another_configuration_in_the_head_decides_otherwise(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, ControlConfig(policy="power-of-two", temperature=1.0, seed=1))
    assert run(str(path))[0] == 0
    path.write_text(path.read_text().replace('"seed":1', '"seed":2', 1))
    assert run(str(path))[0] == 1


def test_another_policy_is_compared_in_the_recorded_state(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, ControlConfig(policy="least-loaded", seed=5))
    code, out, _ = run(str(path), "--policy", "toll,toll=0")
    assert code == 0
    assert "60 of 60" in out
    assert "toll,toll=0 would have chosen otherwise" in out
    share = out.split("times of ")[1]
    assert share.startswith("60 ")
    same = run(str(path), "--seed", "5")[1]
    assert "otherwise 0 times of 60" in same
    assert "+0.000 ms" in same


def test_the_figures_of_a_comparison_are_those_that_are_told(run: Run, tmp_path: Path) -> None:
    path, figures = tmp_path / "j", tmp_path / "f.json"
    write(path, ControlConfig(policy="least-loaded", seed=5))
    code, out, err = run(str(path), "--policy", "toll,toll=0", "--json", str(figures))
    assert (code, err) == (0, "")
    told = json.loads(figures.read_text())["comparison"]
    assert f"otherwise {told['other']} times of {told['choices']}" in out
    assert f"{told['moved']} times with" in out
    assert f"{told['seconds'] / told['choices'] * 1e3:+.3f} ms each" in out


def test_the_choice_for_a_request_that_was_refused_is_not_compared(
    run: Run, tmp_path: Path
) -> None:
    path, figures = tmp_path / "j", tmp_path / "f.json"
    for how in ("error", "error after tokens", "aborted", "open"):
        ending(path, how)
    assert run(str(path), "--policy", "toll", "--json", str(figures))[0] == 0
    assert json.loads(figures.read_text())["comparison"]["choices"] == 3


def test_a_run_that_was_cut_off_is_told_of_and_so_are_several(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path)
    path.write_bytes(path.read_bytes()[:-7])
    write(path)
    code, out, _ = run(str(path))
    assert code == 0
    assert "was cut off" in out
    assert "in 2 runs" in out


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_packed_journal_replays(run: Run, tmp_path: Path, ending: str) -> None:
    path, packed = tmp_path / "j", tmp_path / f"j{ending}"
    write(path)
    if ending == ".gz":
        import gzip

        packed.write_bytes(gzip.compress(path.read_bytes()))
    else:
        zstandard = pytest.importorskip("zstandard")
        packed.write_bytes(zstandard.compress(path.read_bytes()))
    assert run(str(packed))[0] == 0
    assert len(read_trace(packed).sessions) == 60


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("hello\n", "line 1"),
        ('{"k":"tick","now":1}\n', "head"),
        ("HEAD\n{bad}\n" + '{"k":"tick","now":1}\n', "line 2"),
        ('{"k":"journal","format":99,"pigou":"9.9","now":1,"unix":1,"config":{}}\n', "9.9"),
        ('{"k":"journal","format":99}\n', "version is 99, and this Pigou reads 1 and 2"),
        ('HEAD\n{"k":"journal","format":3,"pigou":"9.9"}\n', "line 2: the journal's version is 3"),
        ('{"k":"journal","format":2,"pigou":"9.9"}\n', "line 1"),
    ],
)
def test_what_is_no_journal_is_refused_in_a_line(
    run: Run, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "j"
    Journal(path, ControlConfig()).close()
    path.write_text(text.replace("HEAD\n", path.read_text()))
    code, _, err = run(str(path))
    assert code == 2
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "options",
    [["--policy", "nope"], ["--policy", "toll,what=1"], ["--temperature", "-1"],
     ["--softmax", "x"], ["--seed", "-1"], ["--json", "/nowhere/x"]],
)  # fmt: skip
def test_options_that_cannot_be_honoured_are_refused(
    run: Run, tmp_path: Path, options: list[str]
) -> None:
    path = tmp_path / "j"
    write(path, requests=2)
    assert run(str(path), *options)[0] == 2


def test_a_journal_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path)
    trace = read_trace(path)
    assert len(trace.sessions) == 60
    assert trace.block == 16
    starts = [session.start for session in trace.sessions]
    assert starts == pytest.approx([0.02 * n for n in range(60)])
    assert {session.tenant for session in trace.sessions} == {"ann"}
    assert {turn.output for session in trace.sessions for turn in session.turns} == {11}
    assert trace.sessions[8].turns[0].blocks == tuple(range(8))
    assert trace.sessions[9].turns[0].blocks == ()
    assert trace.sessions[0].scope != trace.sessions[9].scope


@pytest.mark.parametrize("how", ["error", "never routed"])
def test_what_no_worker_served_is_no_workload(tmp_path: Path, how: str) -> None:
    path = tmp_path / "j"
    ending(path, how, prompt=2_500_000)
    with pytest.raises(ConfigError, match="without requests that a worker served"):
        read_trace(path)
    write(path, requests=3)
    assert {session.turns[0].input for session in read_trace(path).sessions} == {160}


@pytest.mark.parametrize(
    ("how", "output"), [("error after tokens", 3), ("aborted", 1), ("open", 1)]
)
def test_what_kept_a_worker_busy_is_workload(tmp_path: Path, how: str, output: int) -> None:
    path = tmp_path / "j"
    ending(path, how)
    (session,) = read_trace(path).sessions
    assert (session.turns[0].input, session.turns[0].output) == (7, output)


def overloaded(path: Path, limits: Mapping[str, int], *, blocks: int = 0, waits: int = 0) -> None:
    """Append a run of a worker for one stream: `a` is answered, and the others are shed.

    Args:
        path: of the journal.
        limits: most tokens of each of the others, by their names, which end in their prompt.
        blocks: of the worker.
        waits: of the others, that may wait until it is too late.
    """
    config = ControlConfig(max_inflight=1, max_queued=waits, queue_timeout=5 * SECOND)
    journal = Journal(path, config)
    plane = JournalRecorder(ControlPlane(config), journal.write)
    plane.observe(WorkerUp(Worker("w", "", blocks=blocks)), SECOND)
    plane.submit(Request("a", 7, 30, arrival=SECOND), SECOND)
    for name, most in limits.items():
        prompt = int(name.split("-")[1])
        plane.submit(Request(name, prompt, most, arrival=2 * SECOND), 2 * SECOND)
    plane.tick(8 * SECOND)
    for name in limits:
        plane.observe(Ended(name, FinishReason.ERROR), 8 * SECOND)
    report_tokens(plane, [("a", 20)], 9 * SECOND)
    plane.observe(Ended("a", FinishReason.STOP), 9 * SECOND)
    journal.close()


@pytest.mark.parametrize("waits", [0, 2])
def test_what_was_shed_is_workload_and_as_long_as_others_within_its_limit(
    tmp_path: Path, waits: int
) -> None:
    path = tmp_path / "j"
    overloaded(path, {"b-11": 500, "c-12": 8}, waits=waits)
    found = read_trace(path).sessions
    assert [session.start for session in found] == [0.0, 1.0, 1.0]
    assert {(session.turns[0].input, session.turns[0].output) for session in found} == {
        (7, 20), (11, 20), (12, 8),
    }  # fmt: skip


def test_what_was_shed_has_its_limit_where_nothing_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "j"
    config = ControlConfig(max_queued=0)
    journal = Journal(path, config)
    plane = JournalRecorder(ControlPlane(config), journal.write)
    plane.submit(Request("x", 7, 30, arrival=SECOND), SECOND)
    plane.observe(Ended("x", FinishReason.ERROR), SECOND)
    journal.close()
    (session,) = read_trace(path).sessions
    assert (session.turns[0].input, session.turns[0].output) == (7, 30)


def test_a_shed_prompt_that_no_worker_holds_is_no_workload(tmp_path: Path) -> None:
    path = tmp_path / "j"
    overloaded(path, {"b-160": 4, "c-2500000": 4}, blocks=10)
    assert {session.turns[0].input for session in read_trace(path).sessions} == {7, 160}
