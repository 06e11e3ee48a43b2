"""What rows of experiments add up to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pigou.cli import build
from pigou_lab.experiments import adaptive, counterfactual, mechanisms, pareto, regimes
from pigou_lab.experiments.command import _together
from pigou_lab.experiments.fleets import fleet
from pigou_lab.experiments.registry import EXPERIMENTS
from pigou_lab.experiments.results import document
from pigou_lab.experiments.table4 import estimate
from pigou_lab.experiments.window import WindowFigures

ONE = fleet("340b-1p2d")


def row(users: int, **rest: Any) -> dict[str, Any]:
    found = {"concurrency": users, "ttft_p99_s": 1.0, "itl_p99_s": 0.02, "poa_legacy": 18.0,
             "rps": 10.0, "e2e_mean_s": 5.0, "inflight": 50.0}  # fmt: skip
    found |= rest
    names = ("ttft_p99_s", "poa_legacy", "rps", "e2e_mean_s")
    found.setdefault("runs", [{name: found[name] * k for name in names} for k in (0.99, 1.01)])
    return found


def test_slopes_are_differences_over_the_paper_s_intervals() -> None:
    rows = [row(32, ttft_p99_s=0.1), row(64, ttft_p99_s=0.42), row(128, ttft_p99_s=32.42)]
    found = regimes.slopes(rows, ONE)
    assert found["slope_32_64_s"] == pytest.approx(0.01)
    assert found["slope_64_128_s"] == pytest.approx(0.5)
    assert found["paper_slope_64_128_s"] == 0.554
    assert regimes.slopes(rows[:2], fleet("70b-1p5d")) == {
        "slope_32_64_s": pytest.approx(0.01), "paper_slope_32_64_s": None,
    }  # fmt: skip


def test_the_knee_is_the_first_level_far_above_the_first() -> None:
    rows = [row(96, ttft_p99_s=0.1), row(100, ttft_p99_s=0.2), row(104, ttft_p99_s=3.0)]
    assert regimes.knee_of(rows, ONE, "client-pool")["first_past_knee"] == 104
    assert regimes.knee_of(rows[:2], ONE, "client-pool")["first_past_knee"] is None


def test_each_reading_has_its_own_knee() -> None:
    assert regimes.predicted_knee(ONE, "client-pool") == 100.0
    assert regimes.predicted_knee(ONE, "fair") is None
    serial = regimes.predicted_knee(ONE, "serial-prefill")
    # The throughput ceiling times what a request takes: both readings put it between 96 and 128.
    assert serial is not None
    assert 96 < serial < 104


def test_gains_are_static_over_each_other_arm() -> None:
    rows = [
        row(128, strategy=name, phase="saturated", rps=rate)
        for name, rate in (("static", 18.0), ("adaptive", 12.0))
    ]
    assert adaptive.static_ratios(rows)["static_over_adaptive"]["rps"] == pytest.approx(1.5)


def test_a_grid_says_whether_its_cells_differ() -> None:
    alike = [row(128) for _ in range(4)]
    apart = [row(128, poa_legacy=value) for value in (10.0, 20.0, 30.0, 40.0)]
    assert pareto.cells(alike, ONE)["variance_poa_legacy"]["p"] > 0.9
    found = pareto.cells(apart, ONE)
    assert found["variance_poa_legacy"]["p"] < 0.01
    assert found["poa_mean"] == 25.0
    assert found["paper"]["poa_mean"] == 34.3


def test_weights_are_compared_within_their_prompts_and_level() -> None:
    rows = [
        row(64, templates=templates, overlap_weight=weight, poa_legacy=18.0 + weight)
        for templates in (5, 500)
        for weight in (0.0, 16.0)
    ]
    found = pareto.effects(rows)
    assert set(found) == {"5_templates_at_64", "500_templates_at_64"}
    assert found["5_templates_at_64"]["poa_most"] == 34.0


def test_mechanisms_are_ranked_by_the_latency_that_they_explain() -> None:
    rows = [
        row(128, mechanism=name, ttft_p99_s=ttft, ttft_drained_p99_s=ttft,
            paper={"ttft_p99_s": 16.2, "rps": 16.5})
        for name, ttft in (("far", 1.0), ("near", 16.0))
    ]  # fmt: skip
    assert list(mechanisms.ranking(rows)) == ["near", "far"]


def test_held_levels_compare_the_controller_with_static() -> None:
    rows = [row(256, strategy="static"), row(256, strategy="regime", ttft_p99_s=2.0)]
    assert regimes.held_ratios(rows)["regime_over_static_at_256"]["ttft_p99_s"] == 2.0


def test_policies_spread_by_the_ratio_of_their_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counterfactual, "DRAWS", 30)
    rows = [row(64, e2e_mean_s=5.0), row(64, e2e_mean_s=5.5)]
    found = counterfactual.summary(rows, ONE)
    assert found["most_over_least_of_policies"]["64"]["e2e_mean_s"] == pytest.approx(1.1)
    assert 0.0 < found["most_over_optimum_from_8"] < 0.2


def test_more_load_draws_no_worker_from_prefill_that_it_needs() -> None:
    def seen(rps: float) -> WindowFigures:
        return WindowFigures(1.0, 1.0, 1.0, 0.0, 5.0, 0.02, rps, 18.0, 18.0, 50.0, 100, 0)

    idle, busy = estimate(ONE, seen(1.0)), estimate(ONE, seen(17.0))
    assert idle["violations_at_one"] < 0.01
    assert busy["violations_at_one"] > 0.1
    assert busy["best_whole_prefill"] == 2
    assert any(each["kind"] == "interior" and each["stable"] for each in busy["equilibria"])


def test_all_experiments_together_keep_their_names() -> None:
    rows = [{"experiment": name, **row(64)} for name in ("table4", "knee")]
    found = [
        document(each["experiment"], ONE, "client-pool", (1,), [each], {"x": 1}) for each in rows
    ]
    both = _together(found)
    assert [each["experiment"] for each in both["rows"]] == ["table4", "knee"]
    assert set(both["summary"]) == {"table4", "knee"}
    assert found[0]["constants"]["pool"] == 100
    assert {"table4", "regimes", "adaptive", "pareto-below", "pareto-at"} <= set(EXPERIMENTS)


def test_an_experiment_draws_its_page_and_shows_no_empty_column(tmp_path: Path) -> None:
    command = ["toll", "--levels", "1", "--runs", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(build(["experiment"]), ["experiment", *command])
    assert result.exit_code == 0, result.output
    assert "paper" not in result.stdout.partition("\n")[2]
    assert "inf" not in result.stdout
    assert 'id="verdict"' in (tmp_path / "index.html").read_text()
    bare = [*command, "--no-report"]
    bare[-2] = str(tmp_path / "bare")
    assert CliRunner().invoke(build(["experiment"]), ["experiment", *bare]).exit_code == 0
    assert [each.name for each in (tmp_path / "bare").iterdir()] == ["results.json"]
