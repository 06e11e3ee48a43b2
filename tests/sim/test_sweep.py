"""Tables of `pigou sweep` agree with queueing theory and with the timing model they come from."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from pigou.cli import build
from pigou.config import ConfigError
from pigou.games.queueing import mgc_wait
from pigou.objectives import Slo
from pigou.performance.speed import RequestMix
from pigou.performance.sweep_tables import SweepTables
from pigou.request import Role
from pigou.sim.setup import Setup, SweepConfig
from pigou.sim.sweep import sweep

LAW = "law:itl_a=0.008,itl_b=0.0003,prefill=0.005,prefill_token=0.00006"
SETUP = Setup(timing=LAW, blocks=4_000, max_seqs=64)
CONFIG = SweepConfig(
    isl="500,1500", workers="1,2", utilisation="0.4,0.7", requests=400,
    concurrency="1,8,32,128", contexts="500,2000", osl=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def tables() -> SweepTables:
    return sweep(CONFIG, SETUP)


def test_waits_of_the_prefill_table_are_those_of_an_m_d_c_queue(tables: SweepTables) -> None:
    for point in tables.prefill:
        alone = next(p for p in tables.prompts if p.isl_tokens == point.isl_tokens)
        wait = (point.ttft_mean_s - alone.ttft_s) / alone.prefill_s
        expected = 0.5 * mgc_wait(point.workers, point.utilisation, 1.0)
        assert wait == pytest.approx(expected, rel=0.3, abs=0.12)
        assert point.ttft_p99_s >= point.ttft_p95_s >= point.ttft_p50_s


def test_ttft_rises_with_load_and_falls_with_workers(tables: SweepTables) -> None:
    cells = {(p.workers, p.isl_tokens, p.utilisation): p.ttft_p95_s for p in tables.prefill}
    for isl in (500, 1500):
        for workers in (1, 2):
            assert cells[workers, isl, 0.4] < cells[workers, isl, 0.7]
        assert cells[2, isl, 0.7] < cells[1, isl, 0.7]


def test_itl_is_the_timing_models(tables: SweepTables) -> None:
    assert {p.concurrency for p in tables.decode} == {1, 8, 32}  # 128 is above max_seqs
    for point in tables.decode:
        law = 0.008 + 0.0003 * max(point.streams, 1.0)
        assert point.itl_mean_s == pytest.approx(law, rel=0.03)
        assert point.streams <= point.concurrency


def test_a_performance_model_follows(tables: SweepTables) -> None:
    model, mix = tables.performance(Role.PREFILL), RequestMix(isl=1000, osl=64)
    assert model.service_s(mix) == pytest.approx(0.065, rel=0.02)
    assert model.itl_at(20.0, mix) == pytest.approx(0.014, rel=0.05)
    assert (model.max_seqs, model.kv_tokens) == (64, 64_000)
    assert model.limit_rps(Role.PREFILL, 2, mix, Slo(ttft_s=0.3), 0.95) > 10


def test_it_is_read_as_it_was_written_and_else_refused(tables: SweepTables) -> None:
    text = msgspec.json.encode(tables)
    assert SweepTables.parse(text) == tables
    with pytest.raises(ConfigError, match="colour"):
        SweepTables.parse(msgspec.json.encode({**msgspec.to_builtins(tables), "colour": 1}))
    with pytest.raises(ConfigError, match="pigou sweep"):
        SweepTables.parse(b"{")
    with pytest.raises(ConfigError, match="a point each"):
        SweepTables.parse(msgspec.json.encode(msgspec.structs.replace(tables, decode=())))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"isl": "many"}, "isl is 'many'"),
        ({"utilisation": "0.5,1.5"}, "utilisation"),
        ({"workers": "0"}, "workers"),
        ({"requests": 1}, "requests"),
        ({"contexts": "20", "osl": 128}, "half of osl"),
    ],
)
def test_lists_that_are_none_are_refused(values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SweepConfig(**values)  # type: ignore[arg-type]


def test_a_worker_that_holds_no_cell_is_refused() -> None:
    config = SweepConfig(isl="100", contexts="100000", concurrency="4")
    with pytest.raises(ConfigError, match="fits a worker"):
        sweep(config, SETUP)


def test_tables_of_one_kind_of_worker_are_not_taken_for_several(tmp_path: Path) -> None:
    file, fleet = tmp_path / "performance.json", tmp_path / "fleet.yaml"
    file.write_text("{}")
    fleet.write_text("workers:\n- {role: prefill}\n- {role: decode, max_seqs: 8}\n")
    argv = ["simulate", "--workload", "poisson:rate=4,in=800,out=32,n=10", "--timing", LAW,
            "--blocks", "4000", "--planner", "price", "--performance", str(file),
            "--fleet"]  # fmt: skip
    app = build(["sweep", "simulate"])
    for given, word in ((str(fleet), "several kinds"), ("1p+1d", "performance")):
        done = CliRunner().invoke(app, [*argv, given])
        assert done.exit_code == 2
        assert word in done.output


def test_the_command_writes_what_simulate_reads(tmp_path: Path) -> None:
    app, file = build(["sweep", "simulate"]), tmp_path / "performance.json"
    own = ["--timing", LAW, "--blocks", "4000"]
    cells = ["--isl", "800", "--workers", "1", "--utilisation", "0.5", "--requests", "50",
             "--concurrency", "1,8", "--contexts", "500", "--osl", "32"]  # fmt: skip
    done = CliRunner().invoke(app, ["sweep", *own, *cells, "--out", str(file)])
    assert done.exit_code == 0, done.output
    figures = tmp_path / "figures.json"
    common = ["simulate", "--workload", "poisson:rate=4,in=800,out=32,n=60", "--fleet", "1p+1d",
              "--slo", "ttft=0.5,itl=0.03", "--json", str(figures), *own]  # fmt: skip
    planned = [*common, "--planner", "price", "--performance"]
    done = CliRunner().invoke(app, [*planned, str(file)])
    assert done.exit_code == 0, done.output
    assert json.loads(figures.read_text())["planner"]["name"] == "price"
    for argv, word in (
        ([*planned, str(tmp_path / "none.json")], "--performance"),
        ([*common, "--performance", str(file)], "--planner"),
    ):
        done = CliRunner().invoke(app, argv)
        assert done.exit_code == 2
        assert word in done.output
