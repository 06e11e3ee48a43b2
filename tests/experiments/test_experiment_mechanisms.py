"""The readings of the paper, as laws of small levels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pigou.cli import build
from pigou.config import ControlConfig
from pigou.control.saturation.regime import load as load_detector
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation
from pigou.sim.workload import RequestLengths, renewal
from pigou_lab.detectors import PaperDetector
from pigou_lab.experiments import adaptive
from pigou_lab.experiments.detect import Poller, Watcher, config, detector_values, regime_of
from pigou_lab.experiments.fleets import Reading, fleet
from pigou_lab.experiments.level import Level, run
from pigou_lab.experiments.paper import THRESHOLDS, Thresholds
from pigou_lab.experiments.results import COMPARED
from pigou_lab.experiments.table4 import errors, table4
from pigou_lab.experiments.window import WindowFigures

ONE = fleet("340b-1p2d")


def level(reading: Reading, users: int, **rest: object) -> WindowFigures:
    return run(Level(ONE, reading, users, **rest), 1).measured  # type: ignore[arg-type]


def test_the_client_waits_for_a_connection_only_where_there_is_a_pool() -> None:
    short = {"hold_s": 10.0, "ramped": False}
    pooled, fair = level("client-pool", 128, **short), level("fair", 128, **short)
    assert fair.wait_p99_s == 0.0
    assert fair.ttft_drained_p99_s < 0.3
    assert pooled.ttft_p99_s > 5.0
    assert pooled.server_ttft_p99_s < 0.3  # the fleet knows nothing of it
    assert pooled.inflight < 100.1
    assert fair.inflight > 127.0
    assert level("client-pool", 96, **short).wait_p99_s == 0.0


def test_serial_prefill_makes_the_fleet_wait_and_nobody_starve() -> None:
    serial = level("serial-prefill", 128, hold_s=20.0)
    assert serial.wait_p99_s == 0.0
    assert 1.0 < serial.server_ttft_p99_s < 3.0
    assert serial.rps < 18.9


def test_barging_starves_and_order_does_not() -> None:
    fifo = level("client-pool", 128, hold_s=20.0, client=ClientConfig(pool=100))
    barging = level("client-pool", 128, hold_s=20.0)
    assert fifo.ttft_p99_s < 3.0
    assert barging.ttft_p99_s > 6.0
    assert fifo.rps == pytest.approx(barging.rps, rel=0.03)


def test_a_level_is_the_same_for_the_same_seed() -> None:
    assert level("client-pool", 8, hold_s=9.0) == level("client-pool", 8, hold_s=9.0)


@pytest.mark.slow
def test_table_4_is_replicated_within_its_targets() -> None:
    rows = list(table4(ONE, "client-pool", (1,), (1, 8, 64, 256)))
    found = {name: value or 0.0 for name, value in errors(rows).items()}
    assert 0.0 < found["ttft_p99_from_128"] < 0.1
    assert 0.0 < found["rps_from_128"] < 0.03
    assert 0.0 < found["poa_1_to_96"] < 0.05


def test_the_regime_depends_on_who_looks() -> None:
    seen = run(Level(ONE, "client-pool", 200, hold_s=10.0), 1)
    calls, thresholds = seen.result.runs, THRESHOLDS["70b-1p2d"]
    assert regime_of(calls, 40.0, thresholds) == "saturated"
    assert regime_of(calls, 40.0, thresholds, server=True) == "below"
    assert regime_of(calls, 40.0, Thresholds(0.05, 0.06), server=True) == "saturated"


def test_the_control_plane_has_the_detector_of_the_experiment() -> None:
    thresholds = THRESHOLDS["70b-1p2d"]
    detector = load_detector(detector_values(thresholds))
    assert isinstance(detector, PaperDetector)
    assert detector.config == config(thresholds)


def test_the_papers_memory_is_nearly_empty_and_nothing_is_evicted() -> None:
    watcher = Watcher()
    run(Level(ONE, "fair", 16, hold_s=10.0), 1, (watcher.follow,))
    memory = watcher.memory()
    assert 0.0 < memory["g1_used_at_most"] < 0.05
    assert memory["g1_cached_blocks"] > 0
    assert memory["g1_evicted_blocks"] == 0


def test_a_watcher_sees_evictions_where_memory_is_short() -> None:
    watcher = Watcher()
    made = Simulation(
        renewal(
            RequestLengths(input=(20, 400), output=(1, 60), templates=5), 20.0, 1.5, 60, 0.0, 1
        ),
        read_fleet("1xboth"),
        Setup(timing="law:itl_a=0.008,itl_b=0.0003,prefill=0.004", blocks=60, max_seqs=16),
        ControlConfig(),
        ClientConfig(),
        seed=0,
    )
    watcher.follow(made)
    made.run()
    memory = watcher.memory()
    assert memory["g1_evicted_blocks"] > 0
    assert memory["g1_cached_blocks"] <= 60


def test_the_controller_sets_the_router_when_the_client_s_latency_rises() -> None:
    told: list[str] = []
    poller = Poller(Thresholds(1.0, 1000.0), lambda _, regime: told.append(regime.value))
    run(Level(ONE, "client-pool", 160, hold_s=15.0), 1, (poller.follow,))
    assert told == ["transition"]
    quiet = Poller(Thresholds(1.0, 1000.0), lambda _, regime: told.append(regime.value))
    run(Level(ONE, "fair", 32, hold_s=10.0), 1, (quiet.follow,))
    assert quiet.switches == []


@pytest.mark.slow
def test_chunks_alone_give_what_the_paper_ascribes_to_its_controller() -> None:
    rows = list(adaptive.adaptive(ONE, "client-pool", (1,), (32, 128)))
    at = {(each["strategy"], each["phase"]): each for each in rows}
    static, both = at["static", "saturated"], at["adaptive", "saturated"]
    chunks, switch = at["chunks-only", "saturated"], at["switch-only", "saturated"]
    assert chunks["rps"] == pytest.approx(both["rps"], rel=0.02)
    assert chunks["ttft_p99_s"] == pytest.approx(both["ttft_p99_s"], rel=0.02)
    assert both["rps"] < 0.75 * static["rps"]
    assert both["ttft_p99_s"] < 0.5 * static["ttft_p99_s"]
    assert switch["rps"] == pytest.approx(static["rps"], rel=0.02)


def test_results_have_the_columns_that_others_read(tmp_path: Path) -> None:
    command = ["table4", "--levels", "1,2", "--runs", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(build(["experiment"]), ["experiment", *command])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["concurrency"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        assert {"experiment", "paper", "relative_error", "runs", "sd", *COMPARED} <= row.keys()
        assert row["relative_error"]["rps"] == pytest.approx(row["rps"] / row["paper"]["rps"] - 1)
        assert [each["seed"] for each in row["runs"]] == [1, 2]
    assert "Experiment 1" in result.output


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pigou_lab.experiments.command._run", pytest.fail)
    (tmp_path / "file").touch()
    for name in ("table4", "all"):
        command = [name, "--out", str(tmp_path / "file" / "below")]
        result = CliRunner().invoke(build(["experiment"]), ["experiment", *command])
        assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
        assert "--out is" in result.output


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (["table5"], "table5"),
        (["table4", "--reading", "magic"], "magic"),
        (["table4", "--fleet", "9b"], "--fleet is '9b'"),
        (["table4", "--levels", "0"], "--levels"),
        (["adaptive", "--levels", "64"], "--levels"),
        (["mechanisms", "--reading", "fair"], "--reading"),
        (["table4", "--runs", "-1"], "--runs"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    command: list[str], names: str, tmp_path: Path
) -> None:
    args = ["experiment", *command, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(build(["experiment"]), args)
    assert result.exit_code == 2
    assert names in result.output
    assert not (tmp_path / "out").exists()
