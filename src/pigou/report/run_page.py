"""The page of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pigou.report import latency_figures, timeline_figures
from pigou.report.figure import Figure
from pigou.report.page import Page, Section, Tile
from pigou.report.run_record import Record
from pigou.report.table import Cell, Form, Table, Value
from pigou.report.verdict import of_run

#: Figure -> how it is called, and how it reads. What is nested has tables of its own.
COUNTS: dict[str, tuple[str, Form]] = {
    "offered": ("Requests offered", ""),
    "completed": ("served", ""),
    "failed": ("failed", ""),
    "unfinished": ("unfinished at the end", ""),
    "timed_out": ("timed out", ""),
    "shed": ("refused for want of room, each time counted", ""),
    "throughput_rps": ("Requests per second", ""),
    "output_tok_s": ("Output tokens per second", ""),
    "prefix_hit_ratio": ("Prompt tokens found in the prefix cache", "share"),
    "preemptions": ("Preemptions", ""),
    "simulated_s": ("Simulated time", "seconds"),
    "wall_s": ("Time to compute it", "seconds"),
    "peak_rss_mb": ("Most memory, MB", ""),
}
_POA = {
    "whole": "whole", "queueing": "queueing", "routing": "routing",
    "prefill_decode": "prefill and decode", "legacy": "the paper's index",
    "caching": "placement of blocks",
}  # fmt: skip


def page(run: Record) -> Page:
    """Return the page of a run."""
    figures = run.figures
    return Page(
        title=run.title,
        subtitle=f"{_workload(run)}{figures['offered']:,} requests offered, "
        f"{figures['simulated_s']:,.1f} s simulated, seed {run.seed}, pigou {run.pigou}",
        notices=notices(run),
        verdict=of_run(run),
        tiles=_tiles(figures),
        sections=(
            Section("summary", "Summary", (counts(figures), _outcomes(run), anarchy(figures))),
            _latency(run),
            _attainment(run),
            _load(run),
            _over_time(run),
            _workers(run),
            _configuration(run),
        ),
    )


def _workload(run: Record) -> str:
    found = run.config.get("run", {}).get("workload")
    return f"{found}. " if found else ""


def notices(run: Record) -> tuple[str, ...]:
    """Return what a reader must know before anything else."""
    figures, found = run.figures, []
    if not figures["offered"]:
        found.append(
            "No request was offered: there is nothing to show. Give the workload a longer hold, a "
            "higher rate or more requests."
        )
    elif not figures["completed"]:
        why = "; ".join(
            f"{each.requests:,} {each.outcome}" + (f" ({each.reason})" if each.reason else "")
            for each in run.outcomes
        )
        found.append(
            f"None of the {figures['offered']:,} offered requests was served, so there are no "
            f"latencies. {why}."
        )
    elif figures["failed"]:
        found.append(
            f"{figures['failed']:,} of {figures['offered']:,} offered requests failed. Latencies "
            "are of those that were served; attainment counts all."
        )
    if figures["unfinished"]:
        found.append(
            f"{figures['unfinished']:,} requests were still under way when the run was cut off; "
            "attainment counts them as missed."
        )
    return tuple(found)


def _tiles(figures: Mapping[str, Any]) -> tuple[Tile, ...]:
    def spread(name: str) -> Tile:
        found = figures[name]
        p99 = Cell(found["p99"], "seconds").text
        return Tile(
            f"{latency_figures.LATENCIES[name]}, p50", Cell(found["p50"], "seconds"), f"p99 {p99}"
        )

    served, offered = figures["completed"], figures["offered"]
    part = f"of {offered:,} offered"
    whole = figures["poa"]["whole"]
    return (
        Tile("Served", Cell(served), part),
        Tile("Throughput, requests/s", Cell(figures["throughput_rps"]),
             f"{figures['output_tok_s']:,.0f} output tokens/s"),
        Tile("Prefix cache hits", Cell(figures["prefix_hit_ratio"], "share"), "of prompt tokens"),
        Tile("Price of Anarchy", Cell(whole), "observed over best" if whole else "not assessed"),
        *(spread(name) for name in ("ttft_s", "itl_s", "e2e_s", "client_wait_s")),
    )  # fmt: skip


def counts(figures: Mapping[str, Any]) -> Table:
    """Return a run's counts and rates."""
    rows = tuple(
        (Cell(name), Cell(figures[key], form))
        for key, (name, form) in COUNTS.items()
        if key in figures
    )
    return Table("counts", "Counts and rates", ("", "figure"), rows)


def _outcomes(run: Record) -> Table:
    offered = max(1, run.figures["offered"])
    rows = tuple(
        (Cell(each.outcome), Cell(each.reason or "–"), Cell(each.requests),
         Cell(each.requests / offered, "share"))
        for each in run.outcomes
    )  # fmt: skip
    return Table(
        "outcomes", "How requests ended", ("outcome", "reason", "requests", "of offered"), rows
    )


def anarchy(figures: Mapping[str, Any]) -> Table:
    """Return a run's Price of Anarchy."""
    found = figures["poa"]
    rows = tuple((Cell(name), Cell(found[key])) for key, name in _POA.items() if key in found)
    note = (
        "Geometric means over the windows, weighted by their requests; the parts multiply to the "
        "whole. The paper's index is neither a bound nor an estimate of it. The placement of "
        "blocks is a game of its own, of recent prompts; none where nobody publishes KV events."
    )
    return Table("anarchy", "Price of Anarchy", ("part", "ratio"), rows, note)


def _latency(run: Record) -> Section:
    items: tuple[Figure | Table, ...] = (
        latency_figures.latencies(run.figures),
        latency_figures.request_cdf(run),
        latency_figures.token_cdf(run),
        latency_figures.stages(run.stages),
    )
    return Section("latency", "Latency", items)


def _attainment(run: Record) -> Section:
    items: tuple[Figure | Table, ...] = (latency_figures.attainment_curve(run.attainment),)
    if run.attainment is not None:
        items += (latency_figures.attainment_grid(run.attainment),)
    return Section("attained", "Attainment", items)


def _load(run: Record) -> Section:
    pairs = (
        ("ttft-load", "Time to first token against load", "ttft_s"),
        ("tpot-load", "Time per token against load", "tpot_s"),
        ("e2e-load", "End-to-end time against load", "e2e_s"),
    )
    curves = tuple(latency_figures.load_curve(*pair, run.load) for pair in pairs)
    return Section("against-load", "Load", (*curves, latency_figures.load_table(run.load)))


def _over_time(run: Record) -> Section:
    items: tuple[Figure | Table, ...] = timeline_figures.rates(run.course)
    if run.samples is not None:
        items += (
            *timeline_figures.fleet(run.samples),
            *timeline_figures.memory(run.samples),
            timeline_figures.tolls(run.samples),
        )
    return Section("timeline", "Timeline", items)


def _workers(run: Record) -> Section:
    items: tuple[Figure | Table, ...] = (timeline_figures.worker_table(run),)
    if run.samples is not None:
        items += timeline_figures.workers(run.samples)
    return Section("by-worker", "Workers", items)


def _configuration(run: Record) -> Section:
    tables = tuple(
        Table(
            f"config-{name}", name.capitalize(), ("setting", "value"),
            tuple((Cell(key), Cell(said(value))) for key, value in flat(group).items()),
        )
        for name, group in run.config.items()
    )  # fmt: skip
    note = "The same with the same seed gives the same run, to the last digit."
    return Section("configuration", "Configuration", tables, note)


def flat(values: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """Return nested values by dotted names; lists of values stay together."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{front}{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            for place, each in enumerate(value):
                found |= flat({str(place): each}, f"{front}{key}.")
        else:
            found[front + key] = value
    return found


def said(value: Any) -> Value:
    """Return how a setting reads; the numbers of settings are not rounded."""
    if isinstance(value, str):
        return value or "–"
    return "–" if value is None or value == [] else json.dumps(value)
