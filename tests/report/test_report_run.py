"""Laws of a run's page: it needs nothing else, hides nothing, and says what the figures say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from pages import Read
from runs import made

from pigou.report.figure import Axis, Heat, ticks
from pigou.report.figure_png import png
from pigou.report.page import as_record, html, load, write
from pigou.report.run_figures import FIGURES, LATENCIES
from pigou.report.run_page import COUNTS, page
from pigou.report.run_record import RunRecord
from pigou.sim.client import ClientConfig


@pytest.fixture(scope="module")
def run() -> RunRecord:
    return made()


@pytest.fixture(scope="module")
def read(run: RunRecord) -> Read:
    return Read(html(page(run)))


def test_a_page_fetches_nothing(read: Read) -> None:
    assert read.fetched == []
    rules = dict(part.strip().split(" ", 1) for part in read.policy.split(";"))
    assert rules["default-src"] == "'none'"  # and a browser would refuse to
    assert not any("http" in rule for rule in rules.values())
    drawn = {trace["type"] for each in read.figures.values() for trace in each["data"]}
    assert drawn <= {"scatter", "bar", "heatmap"}  # maps and tiles would be fetched


def test_a_page_has_every_figure_and_its_numbers(run: RunRecord, read: Read) -> None:
    expected = {
        "latency-cdf", "token-cdf", "stages", "attainment", "ttft-load", "tpot-load", "e2e-load",
        "rates", "ttft-time", "queues", "regime", "poa", "tolls",
        "rho", "poa-caching", "evicted",
        "workers-running", "workers-waiting", "workers-kv_usage",
    }  # fmt: skip
    assert {each.id for each in page(run).figures} == expected == set(read.figures)
    assert expected <= set(read.ids)
    assert {f"{name}-numbers" for name in expected} <= set(read.tables)
    assert {"counts", "outcomes", "anarchy", "latencies", "attainment-grid", "load", "workers",
            "config-run", "config-workers"} <= set(read.tables)  # fmt: skip
    assert len(read.ids) == len(set(read.ids))


def test_tables_say_what_the_json_says(run: RunRecord, read: Read) -> None:
    figures = run.figures
    latencies = read.exact("latencies")
    for key, name in LATENCIES.items():
        assert latencies[name] == [figures[key][each] for each in FIGURES]
    counts = read.exact("counts")
    for key, (name, _) in COUNTS.items():
        assert counts[name] == [figures[key]]
    anarchy = read.exact("anarchy")
    for key, name in (("whole", "whole"), ("prefill_decode", "prefill and decode")):
        assert anarchy[name] == [figures["poa"][key], *figures["poa"]["interval"][key]]
        assert 1.0 <= anarchy[name][1] <= anarchy[name][0] <= anarchy[name][2]
    assert anarchy["the paper's index"][0] == figures["poa"]["legacy"]
    assert figures["poa"]["whole"] is not None
    workers = read.exact("workers")
    assert [row[:3] for row in workers.values()] == [
        [each["steps"], each["busy"], each["prefix_hit_ratio"]] for each in figures["workers"]
    ]


def test_a_page_has_the_configuration_and_the_seed(run: RunRecord, read: Read) -> None:
    settings = {row[0][0]: row[1][0] for row in read.tables["config-run"][1:]}
    assert settings == {"workload": "closed:C=12", "fleet": "1p+2d", "policy": "toll", "seed": "3"}
    assert run.seed == 3
    assert "seed 3" in read.text


def test_curves_agree_with_the_percentiles_of_the_tables(run: RunRecord) -> None:
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "client_wait_s", "server_ttft_s"):
        curve = run.curves[name]
        for share, figure in ((0.5, "p50"), (0.9, "p90"), (0.95, "p95"), (0.99, "p99")):
            place = min(range(len(curve.share)), key=lambda k: abs(curve.share[k] - share))
            found = run.figures[name][figure]
            assert curve.value[place] == pytest.approx(found, rel=1e-12)
        assert (np.diff(curve.value) >= 0).all()


def test_stages_add_up_to_the_mean_end_to_end_time(run: RunRecord) -> None:
    whole, *groups = run.stages
    parts = whole.client_s + whole.queue_s + whole.first_s + whole.stream_s
    assert parts == pytest.approx(run.figures["e2e_s"]["mean"])
    assert whole.client_s == pytest.approx(run.figures["client_wait_s"]["mean"])
    assert sum(each.requests for each in groups) == whole.requests == run.figures["completed"]


def test_every_served_request_met_some_load(run: RunRecord) -> None:
    assert sum(each.requests for each in run.load) == run.figures["completed"]
    assert all(1 <= each.inflight <= 12 for each in run.load)
    assert [each.inflight for each in run.load] == sorted(each.inflight for each in run.load)


def test_attainment_counts_every_offered_request() -> None:
    run = made(30, "1xboth", client=ClientConfig(timeout=0.6))
    figures, found = run.figures, run.attainment
    assert found is not None
    assert figures["failed"] > 0
    assert found.offered_requests == figures["offered"] > figures["completed"] > 0
    served = figures["completed"] / figures["offered"]
    assert found.grid[-1][-1] == pytest.approx(served)
    assert found.curves["ttft_s"].share[-1] == pytest.approx(served)
    assert found.grid == sorted(found.grid)
    read = Read(html(page(run)))
    assert f"{figures['failed']:,} of {figures['offered']:,} offered requests failed" in read.text
    outcomes = read.exact("outcomes")
    assert figures["timed_out"] in outcomes["timed out"]


def test_many_workers_are_drawn_as_a_map(tmp_path: Path) -> None:
    run = made(12, "9xboth")
    figures = {each.id: each for each in page(run).figures}
    read = Read(html(page(run)))
    data = read.figures["workers-running"]["data"]
    assert [trace["type"] for trace in data] == ["heatmap"]
    assert len(data[0]["y"]) == len(figures["workers-running"].rows) == 9  # type: ignore[union-attr]
    png(figures["workers-running"], tmp_path / "map.png")
    drawn_well(tmp_path / "map.png")


def test_pictures_are_made_and_the_record_can_be_read_again(run: RunRecord, tmp_path: Path) -> None:
    written = write(page(run), tmp_path, run)
    names = {path.name for path in written}
    assert {f"{figure.id}.png" for figure in page(run).figures} <= names
    assert {"index.html", "report.json"} <= names == {path.name for path in tmp_path.iterdir()}
    for path in written:
        if path.suffix == ".png":
            drawn_well(path)
    again = as_record(str(tmp_path), load(str(tmp_path)))
    assert again == msgspec.convert(msgspec.to_builtins(run), RunRecord)


def drawn_well(path: Path) -> None:
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 4000


@pytest.mark.parametrize("way", ["none offered", "none served"])
def test_a_run_without_figures_says_so(run: RunRecord, way: str, tmp_path: Path) -> None:
    if way == "none served":
        empty = made(4, "1xboth", client=ClientConfig(timeout=1e-6))
        assert empty.figures["completed"] == 0 < empty.figures["offered"]
        message = f"None of the {empty.figures['offered']:,} offered requests was served"
    else:
        empty = made(2, "1xboth", nothing=True)
        assert empty.figures["offered"] == 0
        message = "No request was offered"
    read = Read(html(page(empty)))
    assert message in read.text
    assert "Nothing to draw" in read.text
    assert "latency-cdf" not in read.figures
    assert read.fetched == []
    written = write(page(empty), tmp_path, empty)
    assert not (tmp_path / "latency-cdf.png").exists()
    assert (tmp_path / "index.html") in written


def test_a_few_peaks_do_not_hide_a_map() -> None:
    flat = Heat("it", "it", "", Axis("x"), (0.0, 1.0), ("a",), ((0.0, 0.0),), Axis("n"))
    assert (flat.top, flat.scale) == (1.0, "n")
    peak = replace(flat, xs=tuple(range(100)), z=((1.0,) * 98 + (50.0, None),))
    assert (peak.top, peak.scale) == (1.0, "n, up to 1 and more")


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.001, 100.0, ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s"]),
        (0.02, 0.3, ["20 ms", "50 ms", "100 ms", "200 ms"]),
        (0.019, 0.021, ["19 ms", "19.5 ms", "20 ms", "20.5 ms", "21 ms"]),
    ],
)
def test_ticks_of_times_have_units(low: float, high: float, labels: list[str]) -> None:
    assert [text for _, text in ticks(Axis("t", "seconds", log=True), low, high)] == labels
