"""`pigou plan`: what it recommends holds in simulation, and what cannot be is said."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.lib.source_tree import ROOT

from pigou.cli import main
from pigou.fleet.config import AttachedWorker
from pigou.fleet.kubernetes import fleet_spec
from pigou.objectives import Slo
from pigou.request import Role
from pigou.sim.fleet_config import read_fleet

SMALL = ["plan", "--model", "llama-3.1-8b", "--jobs", "1", "--top", "1", "--kv-dtype", "bfloat16"]


def run(*options: str) -> int:
    """Run the command; return its exit code."""
    with pytest.raises(SystemExit) as end:
        main([*SMALL, *options])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return the figures of a small plan, and the folder with its files and what it prints."""
    folder = tmp_path_factory.mktemp("plan")
    file = folder / "plan.json"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setenv("COLUMNS", "80")
        code = run("--workload", "mix=0.8:256/32,0.2:1024/64,rate=8", "--gpus", "H100:2",
                   "--prices", "H100=2.5", "--slo", "ttft=0.5,itl=0.05", "--json", str(file),
                   "--out", str(folder / "files"), "--check")  # fmt: skip
    assert code == 0
    (folder / "printed").write_text(printed.getvalue())
    return json.loads(file.read_text()), folder / "files"


def test_a_plan_reads_on_eighty_columns(planned: tuple[dict[str, Any], Path]) -> None:
    lines = (planned[1].parent / "printed").read_text().splitlines()
    assert max(len(line) for line in lines if "Written" not in line) <= 80
    assert "…" not in "".join(lines)
    shown = "".join(lines)
    assert all(name in shown for name in ("TTFT p95", "$/M out", "tok/s/GPU", "error", "batch"))


def test_the_cheapest_fleet_that_keeps_the_objective_is_recommended(
    planned: tuple[dict[str, Any], Path],
) -> None:
    figures, _ = planned
    best = figures["best"]
    assert figures["meets"]
    assert best["fleet"] == "1xboth"
    assert best["gpus"] == {"H100": 1}
    assert best["attained"] >= 0.95
    assert best["ttft_s"] <= 0.5
    tok_s = best["output_tok_s_per_gpu"]
    assert best["usd_per_million_output"] == pytest.approx(2.5 / 3600 / tok_s * 1e6)
    assert set(best["error"]) == {"ttft_s", "itl_s", "e2e_s"}


def test_the_analysis_is_near_the_simulation(planned: tuple[dict[str, Any], Path]) -> None:
    error = planned[0]["best"]["error"]
    assert abs(error["e2e_s"]) < 0.15
    assert abs(error["itl_s"]) < 0.25


def test_scarce_things_have_a_worth(planned: tuple[dict[str, Any], Path]) -> None:
    duals = planned[0]["duals"]
    assert duals["one_more_H100"]["output_tok_s"] > 0
    assert duals["hit_rate_5_points_higher"]["share"] > 0
    assert all(figures["share"] >= 0 for figures in duals.values())


def test_stress_says_whether_it_is_healthy(planned: tuple[dict[str, Any], Path]) -> None:
    overload, burst = planned[0]["check"]
    assert overload["rate_rps"] == pytest.approx(1.3 * planned[0]["best"]["rate_rps"])
    assert burst["rate_rps"] > planned[0]["best"]["rate_rps"]
    for test in (overload, burst):
        assert test["healthy"] == (not test["reason"])


def test_the_files_are_read_by_the_commands(planned: tuple[dict[str, Any], Path]) -> None:
    figures, folder = planned
    (group,) = read_fleet(str(folder / "fleet.yaml")).workers
    assert group.max_seqs == figures["best"]["batch"]["both"]
    for name in ("serve.yaml", "planner.yaml"):
        with pytest.raises(SystemExit) as end:
            main(["serve", "--config", str(folder / name), "--help"])
        assert not end.value.code
        options = yaml.safe_load((folder / name).read_text())
        assert Slo.parse(options["slo"]) == Slo(ttft_s=0.5, itl_s=0.05)
    (worker,) = yaml.safe_load((folder / "serve.yaml").read_text())["attach"]
    assert AttachedWorker.parse(worker, 0).role is Role.BOTH
    assert "--tensor-parallel-size 1" in (folder / "workers.sh").read_text()


def test_the_operator_takes_the_fleet_of_the_helm_values(
    planned: tuple[dict[str, Any], Path],
) -> None:
    values = yaml.safe_load((planned[1] / "values.yaml").read_text())
    (pool,) = fleet_spec.read_fleet(values["fleet"]["spec"]).models[0].pools
    assert (pool.role, pool.replicas, pool.gpus_per_replica) == ("both", 1, 1)
    assert "--max-num-seqs" in pool.args


@pytest.mark.helm
def test_the_chart_renders_the_helm_values(planned: tuple[dict[str, Any], Path]) -> None:
    helm = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")
    values = yaml.safe_load((planned[1] / "values.yaml").read_text())
    chart = helm.Chart.load(str(ROOT / "deploy" / "helm" / "pigou"))
    pages = chart.render(values, name="r", namespace="default").values()
    made = [part for text in pages for part in yaml.safe_load_all(text) if isinstance(part, dict)]
    (fleet,) = [part for part in made if part.get("kind") == "PigouFleet"]
    assert fleet["spec"] == values["fleet"]["spec"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "H100"], "--gpus has 'H100'"),
        (["--gpus", "H100:²"], "--gpus has 'H100:²'"),
        (["--seed", "-1"], "--seed is -1"),
        (["--gpus", "H100-96GB:2"], "gpu is 'H100-96GB'"),
        (["--gpus", "H100:2,h100:3"], "names H100 twice"),
        (["--prices", "H200=1"], "--gpus has none"),
        (["--prices", "H100=0"], "above 0"),
        (["--prices", "H100=-1"], "prices has H100=-1"),
        (["--prices", "H100=2,h100=3"], "H100 twice"),
        (["--prices", "dram=3,H100=2"], "--gpus has none"),
        (["--slo", "ttft=1,p=3"], "p"),
        (["--slo", "ttft=0.001,itl=0.05"], "even without load"),
        (["--model", "nemotron-4-340b"], "which no worker made of"),
        (["--model", "Qwen3-33B"], "model is 'Qwen3-33B'"),
        (["--kv-dtype", "fp7"], "kv_dtype is 'fp7'"),
        (["--workload", "mix=1:2048/256,rate=5000"], "and the GPUs hold"),
    ],
)
def test_what_cannot_be_is_said(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"--workload": "mix=1:256/32,rate=5", "--gpus": "H100:2", "--slo": "ttft=0.5,itl=0.05"}
    base[options[0]] = options[1]
    assert run(*(word for pair in base.items() for word in pair)) == 2
    assert words in capsys.readouterr().err
