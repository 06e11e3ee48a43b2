"""A page says first what its figures mean, and shows no column without a figure."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from pages import Read
from runs import made

from pigou.report import comparison_page
from pigou.report.page import Cell, ReportTable, html, of_run, of_runs
from pigou.report.run_page import page
from pigou.report.run_record import RunRecord, Samples
from pigou_lab.experiments import page as experiment_page
from pigou_lab.experiments.page import of_rows


@pytest.fixture(scope="module")
def run() -> RunRecord:
    return made()


def changed(run: RunRecord, **figures: object) -> RunRecord:
    return msgspec.structs.replace(run, figures={**run.figures, **figures})


def calm(run: RunRecord) -> RunRecord:
    """The run as if nothing were wrong with it."""
    workers = [{**each, "busy": 0.5} for each in run.figures["workers"]]
    nothing = {"p50": 0.0, "p99": 0.0, "mean": 0.0}
    quiet = changed(
        run, preemptions=0, failed=0, unfinished=0, completed=run.figures["offered"],
        workers=workers, client_wait_s=nothing, poa={"whole": 1.0},
    )  # fmt: skip
    return msgspec.structs.replace(quiet, samples=None)


def test_a_run_without_a_fault_is_good(run: RunRecord) -> None:
    verdict = of_run(calm(run))
    assert (verdict.level, verdict.reasons) == ("good", ())
    assert f"{run.figures['offered']:,} requests" in verdict.text


@pytest.mark.parametrize(
    ("figures", "level", "word"),
    [
        ({"completed": 0}, "bad", ""),
        ({"failed": 10**6}, "bad", "failed"),
        ({"unfinished": 10**6}, "bad", "unfinished"),
        ({"failed": 0.001}, "good", ""),
        ({"preemptions": 10**6}, "fair", "KV memory is short"),
        ({"client_wait_s": {"p99": 1e3}}, "fair", "client is the bottleneck"),
        ({"poa": {"routing": 1.5, "interval": {"routing": [1.2, 1.8]}}}, "fair", "50%"),
        ({"poa": {"routing": 1.5, "interval": {"routing": [1.0, 2.8]}}}, "good", ""),
        ({"poa": {"whole": 1.5, "routing": 1.5}}, "good", ""),
        (
            {"workers": [{"id": "a", "role": "decode", "busy": 0.9},
                         {"id": "b", "role": "decode", "busy": 0.1}]},
            "fair", "a computes 90%",
        ),
    ],
)  # fmt: skip
def test_a_verdict_names_what_is_wrong(
    run: RunRecord, figures: dict[str, object], level: str, word: str
) -> None:
    verdict = of_run(changed(calm(run), **figures))
    assert verdict.level == level
    assert word in " ".join(verdict.reasons)


@pytest.mark.parametrize(("late", "level"), [(40.0, "bad"), (4.0, "good")])
def test_a_queue_that_grows_until_the_end_is_bad(run: RunRecord, late: float, level: str) -> None:
    waiting: list[float | None] = [4.0] * 30 + [late] * 10
    samples = Samples(1.0, [float(k) for k in range(40)], {"waiting": waiting}, [], {})
    grown = msgspec.structs.replace(calm(run), samples=samples)
    assert of_run(grown).level == level


def test_a_verdict_on_runs_names_the_best_of_each_figure(run: RunRecord) -> None:
    slow = {name: {**run.figures[name], "mean": 99.0, "p99": 99.0} for name in ("e2e_s", "ttft_s")}
    other = changed(run, **slow, throughput_rps=run.figures["throughput_rps"] * 2)
    verdict = of_runs([run, other], ["quick", "wide"])
    assert verdict.text == "No run is best in everything."
    assert any(each.startswith("mean time: quick") for each in verdict.reasons)
    assert any(each.startswith("throughput: wide") for each in verdict.reasons)
    assert of_runs([run, run], ["a", "b"]).text == "No run is ahead in any figure."


def test_a_verdict_on_an_experiment_tells_the_distance_from_the_paper() -> None:
    rows = [
        {"relative_error": {"rps": 0.04, "itl_p99_s": -0.5}},
        {"relative_error": {"rps": -0.06}},
    ]
    verdict = of_rows(rows, {"rps": "Throughput"})
    assert (verdict.level, verdict.text[:6]) == ("fair", "1 of 2")
    assert "Throughput: 5.0% from the paper's (median of 2 rows, at most 6%)." in verdict.reasons
    assert "no figures" in of_rows([{}], {}).text


def test_a_page_shows_its_verdict_first(run: RunRecord) -> None:
    for made_page in (page(run), comparison_page.page([run, run], ["a", "b"])):
        text = html(made_page)
        assert made_page.verdict is not None
        assert text.index('id="verdict"') < text.index('<section id="summary"')
    rows = [{"concurrency": 1, "rps": 2.0}, {"concurrency": 2, "rps": 3.0}]
    assert (
        Read(html(experiment_page.page(rows, title="x"))).text.count("the paper has no figures")
        == 1
    )


def test_columns_without_a_figure_are_left_out() -> None:
    nothing = Cell(None), Cell(float("-inf")), Cell("–"), Cell(float("nan"))
    table = ReportTable(
        "t", "T", ("", "a", "b", "c", "d", "e"), ((Cell(None), *nothing, Cell(0.0)),) * 2
    )
    assert table.compact().columns == ("", "e")
    assert [len(row) for row in table.compact().rows] == [2, 2]
    assert replace(table, rows=()).compact().columns == table.columns
    assert Cell(float("-inf")).text == "–"
