"""Laws of pages of several runs, of experiments, and of what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pages import Read
from runs import made

from pigou.cli import main
from pigou.config import ConfigError
from pigou.report import comparison_page
from pigou.report.page import as_record, html, load
from pigou.report.run_record import RunRecord
from pigou_lab.experiments import page as experiment_page


@pytest.fixture(scope="module")
def runs() -> tuple[RunRecord, RunRecord]:
    return made(), made(20, policy="round-robin")


def test_two_runs_stand_beside_each_other_with_ratios(runs: tuple[RunRecord, RunRecord]) -> None:
    read = Read(html(comparison_page.page(runs, ["toll", "turns"])))
    assert read.fetched == []
    one, other = (run.figures for run in runs)
    rows = read.exact("latency-ttft_s")
    for name in ("mean", "p50", "p99"):
        a, b = one["ttft_s"][name], other["ttft_s"][name]
        assert rows[name] == [a, b, b / a]
    served = read.exact("counts")["Requests per second"]
    assert served[0] == one["throughput_rps"]
    assert served[2] == other["throughput_rps"] / one["throughput_rps"]
    grids = [run.attainment.grid for run in runs if run.attainment is not None]
    attained = read.exact("attainments")["500 ms, 10 ms"]
    assert attained[:2] == [grid[2][0] for grid in grids]
    drawn = read.figures["cdf-ttft_s"]["data"]
    assert [trace["name"] for trace in drawn] == ["toll", "turns"]
    assert len({trace["line"]["color"] for trace in drawn}) == 2
    assert {"time-running", "time-regime", "attained-ttft_s", "load-ttft_s",
            "ttft-throughput"} <= set(read.figures)  # fmt: skip
    settings = {row[0][0]: [cell[0] for cell in row[1:]] for row in read.tables["differences"][1:]}
    assert settings == {
        "run.policy": ["toll", "round-robin"], "run.workload": ["closed:C=12", "closed:C=20"]
    }  # fmt: skip


def test_many_runs_are_told_apart_by_colour_and_stroke() -> None:
    styles = [comparison_page.style(place) for place in range(comparison_page.MAX_RUNS)]
    assert len(set(styles)) == comparison_page.MAX_RUNS
    with pytest.raises(ValueError, match=f"give 2 to {comparison_page.MAX_RUNS}"):
        comparison_page.page([made(2)], ["alone"])


def test_the_command_compares_reports_and_bare_figures(
    runs: tuple[RunRecord, RunRecord], tmp_path: Path
) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "report.json").write_bytes(msgspec.json.encode(runs[0]))
    bare = tmp_path / "second.json"
    bare.write_text(json.dumps(runs[1].figures))
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder), f"turns={bare}", "--out", str(out)])
    assert ended.value.code == 0
    read = Read((out / "index.html").read_text())
    assert read.tables["counts"][0][1][0] == "first"
    assert read.tables["counts"][0][2][0] == "turns"
    assert "turns: figures only, from --json" in read.text
    assert len(read.tables["differences"]) == 1  # nothing is known of the other's settings
    assert (out / "cdf-ttft_s.png").stat().st_size > 4000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "neither report.json nor results.json"),
        ("", "is not JSON"),
        ("{}", "neither a report nor figures"),
        ('{"kind": "pigou simulation"}', "damaged, or of another version"),
        ('{"rows": []}', "rows are empty"),
    ],
)
def test_what_is_no_report_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--workload", "closed:C=2,hold=1", "--timing", "law:itl_a=0.01",
              "--blocks", "100", "--report", str(taken)])  # fmt: skip
    assert ended.value.code == 2
    assert "--report is" in capsys.readouterr().err


def test_a_folder_has_the_pictures_of_its_page_and_keeps_those_of_others(tmp_path: Path) -> None:
    asked = ["simulate", "--timing", "law:itl_a=0.01", "--blocks", "100", "--report",
             str(tmp_path), "--workload"]  # fmt: skip
    (tmp_path / "mine.png").touch()
    seen = []
    for workload in ("closed:C=2,n=4", "closed:C=2,in=9999,n=4"):  # the second serves nobody
        with pytest.raises(SystemExit) as ended:
            main([*asked, workload])
        assert ended.value.code == 0
        seen.append({path.name for path in tmp_path.glob("*.png")})
    assert seen[0] > seen[1] > {"mine.png"}
    page = (tmp_path / "index.html").read_text()
    assert all(f'id="{Path(name).stem}"' in page for name in seen[1] - {"mine.png"})


def test_simulate_reports_the_figures_of_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["simulate", "--workload", "closed:C=6,in=64,out=8:16,hold=2,ramp=1", "--fleet",
             "1p+2d", "--timing", "law:itl_a=0.01,prefill=0.004", "--blocks", "200",
             "--seed", "7"]  # fmt: skip
    plain, watched = tmp_path / "plain.json", tmp_path / "watched.json"
    for more in (["--json", str(plain)], ["--json", str(watched), "--report", str(tmp_path / "r")]):
        with pytest.raises(SystemExit) as ended:
            main([*asked, *more])
        assert ended.value.code == 0
    first, second = (json.loads(path.read_text()) for path in (plain, watched))
    found = as_record("r", load(str(tmp_path / "r")))
    assert found.figures == second
    assert found.seed == 7
    assert found.config["workers"]["blocks"] == 200
    for own in ("wall_s", "peak_rss_mb"):  # of the machine, not of the run
        del first[own], second[own]
    assert first == second
    assert "━" not in capsys.readouterr().err  # no bar where there is no terminal


def rows() -> list[dict[str, Any]]:
    found = []
    for strategy, slow in (("static", 4.0), ("adaptive", 1.0)):
        for users in (1, 32, 256):
            mine = {"ttft_p99_s": slow * users / 100, "itl_p99_s": 0.02, "rps": users / 8}
            found.append(
                {"experiment": "adaptive", "concurrency": users, "strategy": strategy, **mine,
                 "regime": "below", "paper": {"ttft_p99_s": users / 100, "regime": "below"}}
            )  # fmt: skip
    return found


def test_an_experiment_is_drawn_beside_the_paper() -> None:
    read = Read(html(experiment_page.page(rows(), title="adaptive")))
    drawn = {trace["name"]: trace for trace in read.figures["ttft_p99_s"]["data"]}
    assert list(drawn) == ["the paper", "static", "adaptive"]
    assert drawn["the paper"]["y"] == [0.01, 0.32, 2.56]
    assert drawn["static"]["x"] == [1, 32, 256]
    assert read.figures["ttft_p99_s"]["layout"]["yaxis"]["type"] == "log"
    assert read.figures["ttft_p99_s"]["layout"]["xaxis"]["type"] == "log"
    assert read.exact("rows-0")["256"][:3] == [10.24, 2.56, 3.0]
    assert set(read.figures) == {"ttft_p99_s", "itl_p99_s", "rps"}


def test_a_grid_is_drawn_against_its_setting_and_experiments_stay_apart() -> None:
    grid = [
        {"experiment": "grid", "concurrency": 32, "overlap_weight": omega, "temperature": tau,
         "rps": omega + tau}
        for omega in (0.3, 0.7) for tau in (0.0, 1.0)
    ]  # fmt: skip
    read = Read(html(experiment_page.page([*rows(), *grid], title="all")))
    drawn = {trace["name"]: trace["x"] for trace in read.figures["grid-rps"]["data"]}
    assert drawn == {"temperature 0": [0.3, 0.7], "temperature 1": [0.3, 0.7]}
    assert "adaptive-ttft_p99_s" in read.figures


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        ([], {}, "rows are empty"),
        ([{"rps": 1.0}], {}, "no number 'concurrency'"),
        ([{"concurrency": 1}], {}, "nothing to draw"),
        ([{"concurrency": 1, "rps": 1.0}], {"figures": ("itl_p99_s",)}, "no row has itl_p99_s"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(
    given: list[dict[str, Any]], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        experiment_page.page(given, title="x", **more)


def test_a_record_of_another_version_is_refused(runs: tuple[RunRecord, RunRecord]) -> None:
    document = msgspec.to_builtins(runs[0])
    document["more"] = 1
    with pytest.raises(ConfigError, match="another version"):
        as_record("it", document)
