"""The page of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pigou.report import run_figures
from pigou.report.figure import Figure
from pigou.report.page import Cell, Form, ReportPage, ReportTable, Section, Tile, Value, of_run
from pigou.report.run_record import RunRecord

#: Figure -> its name, and its form. Nested figures have tables of their own.
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


def page(run: RunRecord) -> ReportPage:
    """Return the page of a run."""
    figures = run.figures
    return ReportPage(
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
            *_planner(run),
            _workers(run),
            _configuration(run),
        ),
    )


def _workload(run: RunRecord) -> str:
    workload = run.config.get("run", {}).get("workload")
    return f"{workload}. " if workload else ""


def notices(run: RunRecord) -> tuple[str, ...]:
    """Return warnings, such as that nothing was served."""
    figures, messages = run.figures, []
    if not figures["offered"]:
        messages.append(
            "No request was offered: there is nothing to show. Give the workload a longer hold, a "
            "higher rate or more requests."
        )
    elif not figures["completed"]:
        why = "; ".join(
            f"{outcome.requests:,} {outcome.outcome}"
            + (f" ({outcome.reason})" if outcome.reason else "")
            for outcome in run.outcomes
        )
        messages.append(
            f"None of the {figures['offered']:,} offered requests was served, so there are no "
            f"latencies. {why}."
        )
    elif figures["failed"]:
        messages.append(
            f"{figures['failed']:,} of {figures['offered']:,} offered requests failed. Latencies "
            "are of those that were served; attainment counts all."
        )
    if figures["unfinished"]:
        messages.append(
            f"{figures['unfinished']:,} requests were still under way when the run was cut off; "
            "attainment counts them as missed."
        )
    return tuple(messages)


def _tiles(figures: Mapping[str, Any]) -> tuple[Tile, ...]:
    def tile_of(name: str) -> Tile:
        figure = figures[name]
        p99 = Cell(figure["p99"], "seconds").text
        return Tile(
            f"{run_figures.LATENCIES[name]}, p50", Cell(figure["p50"], "seconds"), f"p99 {p99}"
        )

    served, total = figures["completed"], figures["offered"]
    part = f"of {total:,} offered"
    whole, bounds = figures["poa"]["whole"], (figures["poa"].get("interval") or {}).get("whole")
    if whole is None:
        said = "not assessed"
    else:
        said = f"{bounds[0]:.2f} to {bounds[1]:.2f} (90%)" if bounds else "without an interval"
    return (
        Tile("Served", Cell(served), part),
        Tile("Throughput, requests/s", Cell(figures["throughput_rps"]),
             f"{figures['output_tok_s']:,.0f} output tokens/s"),
        Tile("Prefix cache hits", Cell(figures["prefix_hit_ratio"], "share"), "of prompt tokens"),
        Tile("Price of Anarchy", Cell(whole if bounds else None), said),
        *(tile_of(name) for name in ("ttft_s", "itl_s", "e2e_s", "client_wait_s")),
    )  # fmt: skip


def counts(figures: Mapping[str, Any]) -> ReportTable:
    """Return a run's counts and rates."""
    rows = [
        (Cell(name), Cell(figures[key], form))
        for key, (name, form) in COUNTS.items()
        if key in figures
    ]
    rows += [(Cell(tier_name(level)), Cell(share, "share"))
             for level, share in tier_shares(figures).items()]  # fmt: skip
    return ReportTable("counts", "Counts and rates", ("", "figure"), tuple(rows))


def tier_shares(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of prefix hits of each level of memory; empty without tiers."""
    hits = figures.get("tier_hits") or {}
    return {level: own["share"] for level, own in hits.items()} if len(hits) > 1 else {}


def tier_name(level: str) -> str:
    """Return the name of a level's share of prefix hits in tables."""
    return f"Prefix hits in {level}"


def _outcomes(run: RunRecord) -> ReportTable:
    total = max(1, run.figures["offered"])
    rows = tuple(
        (Cell(outcome.outcome), Cell(outcome.reason or "–"), Cell(outcome.requests),
         Cell(outcome.requests / total, "share"))
        for outcome in run.outcomes
    )  # fmt: skip
    return ReportTable(
        "outcomes", "How requests ended", ("outcome", "reason", "requests", "of offered"), rows
    )


def anarchy(figures: Mapping[str, Any]) -> ReportTable:
    """Return a run's Price of Anarchy."""
    poa = figures["poa"]
    bounds = poa.get("interval") or {}
    rows = tuple(
        (Cell(name), Cell(poa[key]), *(Cell(end) for end in bounds.get(key, (None, None))))
        for key, name in _POA.items() if key in poa
    )  # fmt: skip
    note = (
        "Geometric means over the windows, weighted by their requests; the parts multiply to the "
        "whole. Low and high end 90% intervals: a part whose low end is 1 may be none. The paper's "
        "index is neither a bound nor an estimate of it. The placement of blocks is a game of its "
        "own, of recent prompts; none where nobody publishes KV events."
    )
    return ReportTable("anarchy", "Price of Anarchy", ("part", "ratio", "low", "high"), rows, note)


def _latency(run: RunRecord) -> Section:
    items: tuple[Figure | ReportTable, ...] = (
        run_figures.latencies(run.figures),
        run_figures.request_cdf(run),
        run_figures.token_cdf(run),
        run_figures.stage_bars(run.stages),
    )
    return Section("latency", "Latency", items)


def _attainment(run: RunRecord) -> Section:
    items: tuple[Figure | ReportTable, ...] = (run_figures.attainment_curve(run.attainment),)
    if "slo" in run.figures:
        items = (run_figures.objectives(run.figures), *items)
    if run.attainment is not None:
        items += (run_figures.attainment_grid(run.attainment),)
    return Section("attained", "Attainment", items)


def _load(run: RunRecord) -> Section:
    pairs = (
        ("ttft-load", "Time to first token against load", "ttft_s"),
        ("tpot-load", "Time per token against load", "tpot_s"),
        ("e2e-load", "End-to-end time against load", "e2e_s"),
    )
    curves = tuple(run_figures.load_curve(*pair, run.load) for pair in pairs)
    return Section("against-load", "Load", (*curves, run_figures.load_table(run.load)))


def _over_time(run: RunRecord) -> Section:
    items: tuple[Figure | ReportTable, ...] = run_figures.rates(run.course)
    if run.samples is not None:
        items += (
            *run_figures.fleet(run.samples),
            *run_figures.memory(run.samples),
            run_figures.tolls(run.samples),
        )
    return Section("timeline", "Timeline", items)


def _planner(run: RunRecord) -> tuple[Section, ...]:
    planner = run.figures.get("planner")
    if planner is None:
        return ()
    items: tuple[Figure | ReportTable, ...] = (
        run_figures.totals(planner),
        run_figures.replicas(planner, run.figures["simulated_s"]),
        run_figures.decisions(planner),
    )
    return (Section("planner-section", "Planner", items),)


def _workers(run: RunRecord) -> Section:
    items: tuple[Figure | ReportTable, ...] = (run_figures.worker_table(run),)
    if run.samples is not None:
        items += run_figures.workers(run.samples)
    return Section("by-worker", "Workers", items)


def _configuration(run: RunRecord) -> Section:
    tables = tuple(
        ReportTable(
            f"config-{name}", name.capitalize(), ("setting", "value"),
            tuple((Cell(key), Cell(said(value))) for key, value in flat(group).items()),
        )
        for name, group in run.config.items()
    )  # fmt: skip
    note = "The same with the same seed gives the same run, to the last digit."
    return Section("configuration", "Configuration", tables, note)


def flat(values: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """Return nested values by dotted names; lists of values stay together."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{front}{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                flattened |= flat({str(index): item}, f"{front}{key}.")
        else:
            flattened[front + key] = value
    return flattened


def said(value: Any) -> Value:
    """Return a setting as text; numbers of settings are not rounded."""
    if isinstance(value, str):
        return value or "–"
    return "–" if value is None or value == [] else json.dumps(value)
