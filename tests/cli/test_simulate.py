"""The interface of `pigou simulate`, for other programs: workloads, fleets, fields, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner

from pigou.cli import build

APP = build(["simulate", "version"])
LAW = "law:itl_a=0.01,itl_b=0.0002,prefill=0.005,prefill_token=0.00002"
MOONCAKE = [
    {"timestamp": 500 * n, "input_length": 1200, "output_length": 8, "hash_ids": [0, n % 2, n]}
    for n in range(6)
]
OWN = [
    {"arrival_s": 0.0, "input": 96, "output": 9, "hash_ids": [0, 1, 2, 3, 4, 5], "tenant": "a"},
    {"arrival_s": 0.5, "input": 96, "output": 9, "hash_ids": [0, 1, 2, 3, 4, 5], "tenant": "a"},
    {"arrival_s": 1.0, "input": 96, "output": 9, "hash_ids": [0, 1, 2, 3, 4, 5], "tenant": "b"},
]
VLLM = [{"input_toks": 50, "output_toks": 7, "arrival_time_ns": 10**8 * n} for n in range(5)]


def simulate(folder: Path, workload: str, *options: str, fleet: str = "2xboth") -> dict[str, Any]:
    """Run the command; return what it wrote."""
    file = folder / "figures.json"
    argv = ["simulate", "--workload", workload, "--fleet", fleet, "--timing", LAW,
            "--blocks", "500", "--json", str(file), *options]  # fmt: skip
    done = CliRunner().invoke(APP, argv)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def trace(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    """Write rows as JSON lines, packed where the name says so."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / name
    path.write_bytes(zstandard.ZstdCompressor().compress(text) if name.endswith(".zst") else text)
    return str(path)


def test_the_document_has_the_fields_that_other_programs_read(tmp_path: Path) -> None:
    found = simulate(tmp_path, "poisson:rate=20,in=64,out=8:32,n=40")
    counts = {"offered": 40, "completed": 40, "failed": 0, "preemptions": 0}
    assert {name: found[name] for name in counts} == counts
    for name in ("wall_s", "simulated_s", "throughput_rps", "output_tok_s", "peak_rss_mb"):
        assert found[name] > 0
    assert 0 <= found["prefix_hit_ratio"] <= 1
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "client_wait_s"):
        some = found[name]
        assert set(some) == {"mean", "p50", "p90", "p95", "p99"}
        assert some["p50"] <= some["p90"] <= some["p95"] <= some["p99"]
    assert set(found["poa"]) >= {"whole", "queueing", "routing", "prefill_decode", "legacy"}
    assert "caching" in found["poa"]
    assert found["caching"].keys() >= {"rho_max", "evicted_blocks", "first_eviction_s", "games"}
    assert found["throughput_rps"] == pytest.approx(40 / found["simulated_s"])
    assert sum(each["steps"] for each in found["workers"]) > 0


@pytest.mark.parametrize(
    ("workload", "offered"),
    [
        ("poisson:rate=20,in=64,out=8,n=30", 30),
        ("gamma:rate=20,cv=2,in=10:100,out=1:8,n=25", 25),
        ("closed:C=4,in=32,out=8,templates=2,n=17", None),
        ("closed:C=3x1/6x1,in=32,out=8,ramp=1", None),
        ("closed:C=4,in=32,out=8,hold=2,think=0.1,barrier=0.5,pool=2,barging=0.5", None),
    ],
)
def test_workloads_out_of_thin_air(tmp_path: Path, workload: str, offered: int | None) -> None:
    hold = "" if "hold" in workload or "x" in workload or offered else ",hold=5"
    found = simulate(tmp_path, workload + hold)
    assert found["offered"] == found["completed"] > 0
    assert offered in (None, found["offered"])


@pytest.mark.parametrize("suffix", ["", ".zst"])
@pytest.mark.parametrize(
    ("name", "rows", "hits"),
    [("mooncake.jsonl", MOONCAKE, True), ("own.jsonl", OWN, True), ("vllm.jsonl", VLLM, False)],
)
def test_traces_are_told_apart_by_what_they_hold(
    tmp_path: Path, name: str, rows: list[dict[str, Any]], hits: bool, suffix: str
) -> None:
    path = trace(tmp_path, name + suffix, rows)
    found = simulate(tmp_path, path, fleet="1xboth")
    assert found["completed"] == len(rows)
    assert (found["prefix_hit_ratio"] > 0) == hits


def test_tenants_do_not_share_blocks(tmp_path: Path) -> None:
    found = simulate(tmp_path, trace(tmp_path, "own.jsonl", OWN), fleet="1xboth")
    # The second request of tenant a hits all but its last token; that of b hits nothing.
    assert found["prefix_hit_ratio"] == pytest.approx(95 / (3 * 96))


def test_a_trace_can_be_sped_up_cut_and_sent_by_a_few(tmp_path: Path) -> None:
    path = trace(tmp_path, "mooncake.jsonl", MOONCAKE)
    assert simulate(tmp_path, path)["simulated_s"] > 2.5
    assert simulate(tmp_path, path + ",speed=4")["simulated_s"] < 1.5
    assert simulate(tmp_path, path + ",sessions=2")["offered"] == 2
    assert simulate(tmp_path, path + ",C=1")["client_wait_s"]["p99"] == 0.0


@pytest.mark.parametrize("policy", ["toll", "dynamo", "dynamo-paper", "lmetric", "round-robin"])
def test_fleets_split_or_not_serve_by_every_policy(tmp_path: Path, policy: str) -> None:
    workload = "poisson:rate=20,in=64:300,out=8:32,n=40"
    for fleet, names in (("4xboth", ["both"] * 4), ("1p+2d", ["prefill", "decode", "decode"])):
        found = simulate(tmp_path, workload, "--policy", policy, fleet=fleet)
        assert found["completed"] == 40
        assert [each["worker"].partition("-")[0] for each in found["workers"]] == names
        assert all(0 <= each["busy"] <= 1 for each in found["workers"])


def test_a_yaml_fleet_is_honoured(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "workers:\n"
        "  - {role: prefill, slow: [{factor: 2.0}]}\n"
        "  - {role: decode, count: 2, blocks: 300}\n"
        "link: {gbps: 10.0, latency_us: 500.0, sharing: fifo}\n"
        "signals: {event_delay_ms: 20.0, event_loss: 0.1, report_every_ms: 200.0}\n"
        "overhead_ms: 5.0\n"
    )
    workload = "poisson:rate=5,in=400,out=8,n=20"
    options = ("--model", "llama-3.1-8b", "--policy", "least-loaded")
    found = simulate(tmp_path, workload, *options, fleet=str(fleet))
    plain = simulate(tmp_path, workload, *options, fleet="1p+2d")
    assert found["completed"] == 20
    assert found["transfers"]["count"] > 0
    assert found["ttft_s"]["p50"] > plain["ttft_s"]["p50"] + 0.005


def test_of_a_number_and_a_time_what_comes_first_ends_an_open_loop(tmp_path: Path) -> None:
    asked = "gamma:rate=10,cv=0,in=5,out=5,n={},hold={}"
    assert simulate(tmp_path, asked.format(7, 5))["offered"] == 7
    assert simulate(tmp_path, asked.format(70, 5))["offered"] == 49


@pytest.mark.parametrize("more", ["", ",ramp=2", ",think=40,drain=false", ",barrier=1"])
def test_a_closed_loop_of_n_requests_ends_when_they_have(tmp_path: Path, more: str) -> None:
    found = simulate(tmp_path, f"closed:C=4,in=5,out=5,n=10{more}")
    assert (found["offered"], found["completed"]) == (10, 10)
    assert found["simulated_s"] < 200


def test_the_same_seed_gives_the_same_figures_to_the_last_byte(tmp_path: Path) -> None:
    workload = "gamma:rate=20,cv=2,in=20:300,out=1:30,templates=3,n=50"
    one, same, other = (
        simulate(tmp_path, workload, "--seed", seed, "--temperature", "0.5")
        for seed in ("1", "1", "2")
    )
    for found in (one, same, other):
        del found["wall_s"], found["peak_rss_mb"]
    assert json.dumps(one) == json.dumps(same) != json.dumps(other)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workload", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--workload", "poisson:rate=0,n=3"], ["rate", "above 0"]),
        (["--workload", "poisson:rate=5,n=3,speed=9"], ["speed"]),
        (["--workload", "poisson:rate=5"], ["n=COUNT", "hold=SECONDS"]),
        (["--workload", "poisson:rate=5,n=-1,hold=9"], ["n is -1"]),
        (["--workload", "gamma:rate=5,n=3,cv=1e200"], ["cv 1e+200", "1e-06 to 1000"]),
        (["--workload", "gamma:rate=5,n=3,cv=1e-200"], ["cv 1e-200", "1e-06 to 1000"]),
        (["--workload", "gamma:rate=5,n=3,cv=nan"], ["cv nan", "1e-06 to 1000"]),
        (["--workload", "closed:C=many,hold=3"], ["many", "USERS"]),
        (["--workload", "closed:C=4,in=5,out=5"], ["hold=SECONDS", "n=COUNT"]),
        (["--workload", "closed:C=4,n=-2"], ["n is -2"]),
        (["--workload", "poisson:rate=5,n=3,timeout=1e300"], ["timeout is 1e+300", "a year"]),
        (["--workload", "poisson:rate=5,n=3,backoff=1e300"], ["backoff is 1e+300", "a year"]),
        (["--workload", "poisson:rate=5,n=3,timeout=1,retries=900"], ["retries is 900", "lower"]),
        (["--queue-timeout", "-1"], ["--queue-timeout is -1.0"]),
        (["--queue-timeout", "1e300"], ["--queue-timeout is 1e+300", "at most"]),
        (["--gpu", "magic"], ["--gpu is 'magic'", "h100"]),
        (["--tp", "0"], ["--tp is 0", "at least 1"]),
        (["--timing", "law:itl_a=1e30"], ["itl_a is 1e+30", "an hour"]),
        (["--timing", "law:itl_a=0.1,prefill_token=1e30"], ["prefill_token is 1e+30", "an hour"]),
        (["--queue-timeout", "inf"], ["--queue-timeout is inf"]),
        (["--workload", "poisson:rate=5,n=3,n=4"], ["n is given twice", "n=4"]),
        (["--timing", "law:340b,prefill=1,prefill=2"], ["prefill is given twice"]),
        (["--policy", "toll,toll=1,toll=2"], ["toll is given twice"]),
        (["--fleet", "2xprefill"], ["decode"]),
        (["--fleet", "9999p+99999d"], ["109,998 workers", "at most 10,000"]),
        (["--workload", "closed:C=99999999,hold=5"], ["C is 99,999,999", "at most 1,000,000"]),
        (["--fleet", "4 workers"], ["4xboth", "1p+2d"]),
        (["--fleet", "gone.yaml"], ["gone.yaml"]),
        (["--timing", "magic"], ["magic", "roofline"]),
        (["--timing", "roofline"], ["--model"]),
        (["--blocks", "0"], ["--blocks", "--model"]),
        (["--policy", "magic"], ["magic", "toll"]),
        (["--policy", "toll,magic=1"], ["magic"]),
        (["--engine", "magic"], ["magic"]),
        (["--max-seqs", "0"], ["--max-seqs"]),
        (["--tier", "host=1GiB", "--tier", "host=2GiB"], ["host, host", "a name of its own"]),
        (["--json", "gone/file.json"], ["gone", "folder"]),
        (["--json", "/"], ["--json is '/'", "name a file"]),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(options: list[str], words: list[str]) -> None:
    argv = ["simulate", "--workload", "poisson:rate=5,n=3", "--timing", LAW, "--blocks", "100"]
    done = CliRunner().invoke(APP, [*argv, *options])
    assert done.exit_code == 2, done.output
    assert all(word in done.output for word in words), done.output


def refused(fleet: Path, *options: str) -> str:
    """Return the line by which a fleet's file is refused."""
    argv = ["simulate", "--workload", "poisson:rate=5,n=3,timeout=0", "--timing", LAW,
            "--blocks", "100", "--fleet", str(fleet), *options]  # fmt: skip
    done = CliRunner().invoke(APP, argv)
    assert (done.exit_code, done.output.count("\n")) == (2, 1), done.output
    return done.output


def test_a_fleet_of_which_nobody_is_left_needs_an_end_of_waiting(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("workers: [{role: prefill}, {role: both, fails: [{start: 0.1}]}]\n")
    assert "fails for good" in refused(fleet)
    workload = "poisson:rate=5,n=3,in=8,out=100"
    for options in ((workload, "--queue-timeout", "2"), (workload + ",timeout=2",)):
        assert simulate(tmp_path, *options, fleet=str(fleet))["failed"] > 0
    fleet.write_text("workers: [{role: both}, {role: both, fails: [{start: 0.1}]}]\n")
    assert simulate(tmp_path, workload, fleet=str(fleet))["completed"] == 3


def test_a_bandwidth_is_refused_where_nobody_says_how_much_there_is_to_move(
    tmp_path: Path,
) -> None:
    pytest.importorskip("yaml")
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("workers: [{role: prefill}, {role: decode}]\nlink: {gbps: 10}\n")
    assert "gbps of link is 10.0" in refused(fleet)
    workload = "poisson:rate=5,n=3,in=800,out=8"
    slow = simulate(tmp_path, workload, "--model", "llama-3.1-8b", fleet=str(fleet))
    assert slow["transfers"]["bytes"] > 0
    fleet.write_text("workers: [{role: prefill}, {role: decode}]\nlink: {latency_us: 10}\n")
    assert simulate(tmp_path, workload, fleet=str(fleet))["transfers"]["bytes"] == 0


def test_figures_are_written_although_nobody_reads_the_table(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    reader, writer = os.pipe()
    os.close(reader)
    argv = ["simulate", "--workload", "poisson:rate=9,in=8,out=2,n=3", "--timing", LAW,
            "--blocks", "100", "--json", str(file)]  # fmt: skip
    subprocess.run([sys.executable, "-m", "pigou", *argv], stdout=writer, check=False)
    os.close(writer)
    assert json.loads(file.read_text())["completed"] == 3


@pytest.mark.parametrize("workload", ["closed:C=2,n=4", "poisson:rate=5,n=3", "trace"])
@pytest.mark.parametrize("key", ["take=lifo", "barging=0.5"])
def test_how_connections_are_taken_is_refused_where_there_are_enough(
    tmp_path: Path, workload: str, key: str
) -> None:
    asked = trace(tmp_path, "t.jsonl", OWN) if workload == "trace" else workload
    argv = ["simulate", "--timing", LAW, "--blocks", "100", "--workload", f"{asked},{key}"]
    done = CliRunner().invoke(APP, argv)
    assert (done.exit_code, done.output.count("\n")) == (2, 1), done.output
    assert all(word in done.output for word in (*key.split("="), "pool=")), done.output
    simulate(tmp_path, f"{asked},{key},pool=1")


def test_how_arrivals_vary_is_refused_where_the_trace_has_its_own(tmp_path: Path) -> None:
    path = trace(tmp_path, "t.jsonl", OWN)
    argv = ["simulate", "--timing", LAW, "--blocks", "100", "--workload", f"{path},cv=2"]
    done = CliRunner().invoke(APP, argv)
    assert (done.exit_code, done.output.count("\n")) == (2, 1), done.output
    assert "cv is '2'" in done.output
    assert "rate=" in done.output
    simulate(tmp_path, f"{path},rate=3,cv=2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "x"], "--engine is 'x'; give one of: vllm, pigou"),
        (["--policy", "x"], "--policy is 'x'; it must be one of: aibrix-prefix"),
        (["--detector", "x"], "--detector is 'x'; it must be one of: config-variance"),
        (["--controller", "x"], "--controller is 'x'; it must be one of: bandit"),
        (["--max-seqs", "0"], "--max-seqs is 0; it must be at least 1"),
        (["--max-inflight-tokens", "-1"], "--max-inflight-tokens is -1; it must be at least 0"),
        (["--temperature", "nan"], "--temperature is nan; it must be finite"),
        (["--fleet", "0xboth"], "--fleet is '0xboth'; write for example 4xboth"),
        (["--timing", "x"], "--timing is 'x'; it must be roofline"),
        (["--workload", "closed:C=4,hold=x"], "workload: hold is 'x': expected `float`"),
        (["--workload", "closed:C=4,hold=5,cook=1"], "cook is no key of it; there are: C, ramp"),
        (["--workload", "closed:C=4,hold=5,pool=2,take=x"], "take is 'x'; give one of: fifo"),
        (["--workload", "closed:hold=5"], "missing required field `C`"),
        (["--timing", "law:itl_a=x"], "timing law: itl_a is 'x': expected `float`"),
        (["--timing", "law:itl_a=1,cook=1"], "`cook`; its keys are: itl_a, itl_b"),
        (
            ["--tier", "host,gib=1"],
            "--tier is 'host,gib=1': a tier is 'host,gib=1'; write NAME=SIZE",
        ),
        (["--tier", "host=0GiB"], "--tier is 'host=0GiB': tier host: gib is 0.0; it must be"),
        (["--tier", "host=1GiB,x=1"], "unknown field `x`"),
    ],
)
def test_a_refused_option_is_named_as_it_was_typed(options: list[str], words: str) -> None:
    argv = ["simulate", "--workload", "poisson:rate=5,n=3", "--timing", LAW, "--blocks", "100"]
    done = CliRunner().invoke(APP, [*argv, *options])
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert "$" not in done.output
    assert done.output.count("\n") == 1


def test_more_memory_than_there_is_ends_in_one_line() -> None:
    argv = ["simulate", "--workload", "poisson:rate=5,n=3", "--timing", LAW]
    done = CliRunner().invoke(APP, [*argv, "--blocks", str(10**12)])
    assert (done.exit_code, done.output.count("\n")) == (1, 1), done.output
    assert "--blocks" in done.output


def test_a_field_of_a_fleet_file_is_not_named_as_an_option(tmp_path: Path) -> None:
    path = tmp_path / "max_seqs.yaml"
    path.write_text("workers: [{role: both, max_seqs: -1}]\n")
    argv = ["simulate", "--workload", "poisson:rate=5,n=3", "--timing", LAW, "--blocks", "100"]
    done = CliRunner().invoke(APP, [*argv, "--fleet", str(path)])
    assert done.exit_code == 2, done.output
    assert str(path) in done.output
    assert "max_seqs is -1" in done.output
    assert "--" not in done.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workers: [\n", "line 2"),
        ("workers: !python/object:x.Y {}\n", "could not determine a constructor"),
        ("workers:\n  - {role: both, role: decode}\n", "line 2 gives 'role' again"),
        ("workers: [{role: both}]\nworkers: [{role: both}]\n", "line 2 gives 'workers' again"),
        ("workers: [{role: both}]\nlink: {gbps: 1, gbps: 2}\n", "'gbps' again"),
        ("workers: [{starts: 1.0e+300}]\n", "starts is 1e+300"),
        ("workers: [{slow: [{factor: 1.0e+300}]}]\n", "factor is 1e+300"),
        ("workers: [{slow: [{factor: 2, start: 5, end: 3}]}]\n", "start is 5.0 and end 3.0"),
        ("workers: [{fails: [{start: 1, end: 1.0e+300}]}]\n", "start is 1.0 and end 1e+300"),
        ("workers: [{role: both}]\nlink: {gbps: 1.0e-300}\n", "gbps is 1e-300"),
        ("workers: [{role: both}]\nlink: {latency_us: 1.0e+300}\n", "latency_us is 1e+300"),
        ("workers: [{role: both}]\nlease_s: 1.0e+300\n", "lease_s is 1e+300"),
        ("workers: [{role: both}]\nsignals: {report_every_ms: 1.0e-9}\n", "at least 1"),
        ("workers: [{role: both}]\nsignals: {event_delay_ms: .nan}\n", "event_delay_ms is nan"),
        ("workers: \x01\n", "special characters"),
        ("workers: [{role: chef}]\n", "workers[0].role is 'chef'; give one of: prefill, decode"),
        ("workers: [{role: both, cook: 1}]\n", "`cook`; its keys are: role, count"),
        ("workers: [{count: two}]\n", "workers[0].count is 'two': expected `int`"),
        ("workers: [{count: 0}]\n", "workers[0]: count is 0"),
        ("workers: [{fails: [{end: 3}]}]\n", "workers[0].fails[0]: Object missing"),
        ("&a {workers: *a}\n", "expected `array`"),
        ("", "Expected `object`"),
    ],
)
def test_a_fleet_file_that_is_not_understood_is_refused_in_one_line(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    argv = ["simulate", "--workload", "poisson:rate=5,n=3", "--timing", LAW, "--blocks", "100"]
    done = CliRunner().invoke(APP, [*argv, "--fleet", str(path)])
    assert done.exit_code == 2, done.output
    assert str(path) in done.output
    assert words in done.output
    assert done.output.count("\n") == 1


def test_an_objective_adds_its_attainment_and_a_planner_its_figures(tmp_path: Path) -> None:
    workload = "poisson:rate=5@0/20@5,in=64,out=8:32,hold=10"
    found = simulate(tmp_path, workload, "--slo", "ttft=1,itl=0.1,percentile=90")
    assert found["slo"] == {"ttft_s": 1.0, "itl_s": 0.1, "percentile": 90.0, "attained": 1.0}
    assert "planner" not in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slo", "ttft=x"], "--slo is 'ttft=x'"),
        (["--planner", "nobody"], "planner is 'nobody'; it must be one of"),
        (["--max-workers", "4"], "--max-workers is 4, and no planner starts any; give --planner"),
        (["--start-up", "4"], "--start-up is 4.0, and no planner starts a worker; give --planner"),
        (["--planner-interval", "0"], "--planner-interval is 0.0; it must be 0.1 to"),
    ],
)
def test_objectives_and_planners_that_cannot_be_are_refused(
    options: list[str], message: str
) -> None:
    argv = ["simulate", "--workload", "poisson:rate=5,n=3", "--timing", LAW, "--blocks", "100"]
    done = CliRunner().invoke(APP, [*argv, *options])
    assert done.exit_code == 2, done.output
    assert message in done.output
