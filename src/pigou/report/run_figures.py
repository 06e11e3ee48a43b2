"""Figures of one run: latencies, timelines of the fleet, and what its planner did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pigou.control.saturation.regime import LEVELS
from pigou.report.figure import LINES, Axis, Bars, Chart, ChartLine, Figure, Heat, Unit
from pigou.report.page import Cell, Form, ReportTable, row
from pigou.report.run_record import (
    Attainment,
    Course,
    Distribution,
    LoadPoint,
    RunRecord,
    Samples,
    Stage,
)

#: Figure -> its name.
LATENCIES = {
    "ttft_s": "Time to first token",
    "itl_s": "Between tokens",
    "tpot_s": "Per token after the first",
    "e2e_s": "End to end",
    "client_wait_s": "Wait at the client",
    "server_ttft_s": "First token, from sending",
    "server_e2e_s": "End to end, from sending",
}
FIGURES = ("mean", "p50", "p90", "p95", "p99")
SECONDS = Axis("latency", "seconds", log=True)
_SHARE = "share of served requests"
TIME = Axis("simulated seconds")
REGIMES = tuple((float(regime.level), regime.value) for regime in LEVELS)
_QUEUES = {
    "client": "at the client, or on the way", "queued": "in the fleet's queue",
    "waiting": "waiting on workers", "running": "running",
}  # fmt: skip
_PARTS = {
    "poa": "whole", "poa_queueing": "queueing", "poa_routing": "routing",
    "poa_prefill_decode": "prefill and decode",
}  # fmt: skip
_WORKER: tuple[tuple[str, str, str, Unit, str], ...] = (
    ("running", "Requests that run, by worker", "requests", "", ""),
    ("waiting", "Requests that wait, by worker", "requests", "", ""),
    ("kv_usage", "KV cache in use, by worker", "share of blocks", "share",
     "Blocks that are held by requests; cached ones that nobody uses are free."),
)  # fmt: skip
_TOLL = (
    "Seconds that one more stream would cost the streams that are there, by the speeds that the "
    "control plane has learned so far; guesses before the first. An idle worker has a toll of 0."
)
#: Decisions that a page shows; `--json` has them all.
_MAX_DECISIONS = 200
_TOTALS: dict[str, tuple[str, Form]] = {
    "name": ("Planner", ""),
    "gpu_hours": ("GPU-hours", ""),
    "moves": ("Moves of workers", ""),
    "reversals": ("Reversals", ""),
    "settle_s": ("Time to settle", "seconds"),
    "peak_workers": ("Workers at most", ""),
}


def latencies(figures: Mapping[str, Any]) -> ReportTable:
    """Return the table of latencies, from the figures of a run."""
    rows = tuple(
        row(name, [figures[key][statistic] for statistic in FIGURES], "seconds")
        for key, name in LATENCIES.items()
        if isinstance(figures.get(key), dict)
    )
    note = (
        "From the time that the client meant to send, unless it says from sending. A percentile is "
        "the k-th smallest of n values, k = share times n, rounded up; served requests only."
    )
    return ReportTable("latencies", "Latencies", ("", *FIGURES), rows, note)


def _lines(curves: Mapping[str, Distribution], names: Sequence[str]) -> tuple[ChartLine, ...]:
    return tuple(
        ChartLine(LATENCIES[name], curves[name].value, curves[name].share, index)
        for index, name in enumerate(names)
        if name in curves
    )


def request_cdf(run: RunRecord) -> Chart:
    """Return the distributions of requests' latencies."""
    return Chart(
        "latency-cdf",
        "Latency of requests",
        "How many of the served requests took no longer. The wait at the client is apart from the "
        "time that the fleet took; waits of 0 do not show.",
        SECONDS,
        Axis(_SHARE, "share"),
        _lines(run.curves, ("ttft_s", "server_ttft_s", "e2e_s", "client_wait_s")),
    )


def token_cdf(run: RunRecord) -> Chart:
    """Return the distributions of the gaps between tokens."""
    return Chart(
        "token-cdf",
        "Latency of tokens",
        "Between tokens: every gap of every stream. Per token: the mean gap of each request.",
        SECONDS,
        Axis("share", "share"),
        _lines(run.curves, ("itl_s", "tpot_s")),
    )


def stage_bars(stages_: Sequence[Stage]) -> Bars:
    """Return the time of requests by stage."""
    parts = (
        ("at the client", [stage.client_s for stage in stages_]),
        ("until workers are chosen", [stage.queue_s for stage in stages_]),
        ("to the first token", [stage.first_s for stage in stages_]),
        ("streaming", [stage.stream_s for stage in stages_]),
    )
    return Bars(
        "stages",
        "Where the time went",
        "Means of served requests, grouped by their end-to-end time. The way to the fleet counts "
        "to the second part.",
        Axis("mean time", "seconds", zero=True),
        tuple(f"{stage.group} ({stage.requests:,})" for stage in stages_),
        parts,
    )


def attainment_curve(attainment: Attainment | None) -> Chart:
    """Return the share of all offered requests that a limit lets pass."""
    lines = () if attainment is None else _lines(attainment.curves, ("ttft_s", "tpot_s", "e2e_s"))
    return Chart(
        "attainment",
        "Attainment by limit",
        "Share of all offered requests that were served within a limit. Those that failed, were "
        "refused or were cut off never are, so a line may end below 100%.",
        Axis("limit", "seconds", log=True),
        Axis("share of offered requests", "share", zero=True),
        lines,
    )


def attainment_grid(attainment: Attainment) -> ReportTable:
    """Return the share of all offered requests that keeps two limits at once."""
    rows = tuple(
        (Cell(ttft, "seconds"), *(Cell(share, "share", tint=share) for share in shares))
        for ttft, shares in zip(attainment.ttft_s, attainment.grid, strict=True)
    )
    columns = (
        "first token within",
        *(f"{1000 * limit:g} ms per token" for limit in attainment.tpot_s),
    )
    return ReportTable(
        "attainment-grid",
        "Attainment of two limits at once",
        columns,
        rows,
        f"Share of the {attainment.offered_requests:,} offered requests. One with a single token "
        "has no time per token, and keeps every limit of it.",
    )


def load_curve(id_: str, title: str, figure: str, load: Sequence[LoadPoint]) -> Chart:
    """Return p50 and p99 of a latency against the requests in flight."""
    points = [point for point in load if getattr(point, figure) is not None]
    x = [point.inflight for point in points]
    lines = tuple(
        ChartLine(name, x, [getattr(point, figure)[index] for point in points], index, marks=True)
        for index, name in enumerate(("p50", "p99"))
    )
    min_requests = min((point.requests for point in load), default=0)
    return Chart(
        id_,
        title,
        "By the requests under way when a request was meant to be sent, itself counted; each point "
        f"is of at least {min_requests} served requests.",
        Axis("requests in flight"),
        Axis("latency", "seconds", log=True),
        lines,
    )


def load_table(load: Sequence[LoadPoint]) -> ReportTable:
    """Return latency against load in figures."""
    rows = []
    for point in load:
        tpot = (None, None) if point.tpot_s is None else point.tpot_s
        values = (*point.ttft_s, *tpot, *point.e2e_s)
        seconds = [Cell(value, "seconds") for value in values]
        rows.append((Cell(point.inflight), Cell(point.requests), *seconds))
    columns = (
        "in flight", "requests", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50",
        "E2E p99",
    )  # fmt: skip
    return ReportTable("load", "Latency against load", columns, tuple(rows), folded=True)


def rates(course: Course | None) -> tuple[Chart, Chart]:
    """Return rates of requests, and time to first token, over time."""
    x: Sequence[float] = () if course is None else course.time_s
    pairs: tuple[tuple[str, Sequence[float | None]], ...] = (
        () if course is None
        else (("offered", course.offered_rps), ("served", course.completed_rps))
    )  # fmt: skip
    ttft: tuple[tuple[str, Sequence[float | None]], ...] = (
        () if course is None else (("p50", course.ttft_p50_s), ("p99", course.ttft_p99_s))
    )
    marks = len(x) < 4
    served = [k for k, value in enumerate(ttft[0][1]) if value is not None] if ttft else []
    return (
        Chart(
            "rates", "Requests", "Meant to be sent, and served, in windows of equal length.",
            TIME, Axis("requests per second", zero=True),
            tuple(ChartLine(name, x, y, k, marks=marks) for k, (name, y) in enumerate(pairs)),
        ),
        Chart(
            "ttft-time", "Time to first token", "By when a request was meant to be sent.",
            TIME, Axis("latency", "seconds", log=True),
            tuple(
                ChartLine(name, [x[k] for k in served], [y[k] for k in served], index, marks=marks)
                for index, (name, y) in enumerate(ttft)
            ),
        ),
    )  # fmt: skip


def fleet(samples: Samples) -> tuple[Chart, ...]:
    """Return queues, regime and the Price of Anarchy over time."""
    x, series = samples.time_s, samples.fleet
    queues = tuple(
        ChartLine(name, x, series[key], index) for index, (key, name) in enumerate(_QUEUES.items())
    )
    anarchy = tuple(
        ChartLine(name, x, series[key], index, "solid" if key == "poa" else "dash", step=True)
        for index, (key, name) in enumerate(_PARTS.items())
    )
    return (
        Chart(
            "queues", "Where requests are",
            f"Samples every {samples.period_s:g} s of virtual time.",
            TIME, Axis("requests", zero=True), queues,
        ),
        Chart(
            "regime", "Regime",
            "As the detector of saturation sees it." + _constant(series["temperature"]),
            TIME, Axis("", ticks=REGIMES), (ChartLine("regime", x, series["regime"], step=True),),
        ),
        *_temperature(samples),
        Chart(
            "poa", "Price of Anarchy",
            "What the requests of the last window took, over what they would take at best: the "
            "parts multiply to the whole. From the first assessment on.",
            TIME, Axis("ratio"), anarchy,
        ),
    )  # fmt: skip


def memory(samples: Samples) -> tuple[Chart, ...]:
    """Return the use of the fleet's memory, and the caching game, over time."""
    x, series = samples.time_s, samples.fleet
    if "rho" not in series:  # recorded before the series existed
        return ()
    return (
        Chart(
            "rho", "Memory in use",
            "rho: blocks of requests that run or wait on workers, over device blocks. Cached ones "
            "that nobody uses do not count.",
            TIME, Axis("active over device blocks", zero=True),
            (ChartLine("rho", x, series["rho"]),),
        ),
        Chart(
            "poa-caching", "Price of Anarchy of the placement",
            "What recent prompts take where blocks lie, over what they would take where blocks lie "
            "at best. From the first game on.",
            TIME, Axis("ratio"), (ChartLine("placement", x, series["poa_caching"], step=True),),
        ),
        Chart(
            "evicted", "Evicted blocks", "Blocks that left a device for others, from the start.",
            TIME, Axis("blocks", zero=True),
            (ChartLine("evicted", x, series["evicted"], step=True),),
        ),
    )  # fmt: skip


def _constant(temperature: Sequence[float | None]) -> str:
    if len(set(temperature)) != 1:
        return ""
    return f" The temperature of the choice was {temperature[0]:g} throughout."


def _temperature(samples: Samples) -> tuple[Chart, ...]:
    temperatures = samples.fleet["temperature"]
    if len(set(temperatures)) < 2:
        return ()
    line = ChartLine("temperature", samples.time_s, temperatures, 2, step=True)
    note = "0 takes the cheapest worker; more spreads by chance. Set by the controller."
    axis = Axis("temperature", zero=True)
    return (Chart("temperature", "Temperature of the choice", note, TIME, axis, (line,)),)


def tolls(samples: Samples) -> Figure:
    """Return the tolls of the workers over time."""
    shown = {
        name: series["toll"] for name, series in samples.workers.items() if any(series["toll"])
    }  # a worker that only computes prompts has none
    axis = Axis("toll", "seconds", log=len(shown) <= LINES, zero=True)
    return _workers("tolls", "Tolls", _TOLL, samples.worker_time_s, shown, axis)


def workers(samples: Samples) -> tuple[Figure, ...]:
    """Return the load of each worker over time."""
    figures = []
    for key, title, label, unit, note in _WORKER:
        shown = {name: series[key] for name, series in samples.workers.items()}
        axis = Axis(label, unit, zero=True)
        figures.append(_workers(f"workers-{key}", title, note, samples.worker_time_s, shown, axis))
    return tuple(figures)


def _workers(
    id_: str, title: str, note: str, x: Sequence[float],
    shown: dict[str, list[float | None]], axis: Axis,
) -> Figure:  # fmt: skip
    if len(shown) > LINES:
        return Heat(id_, title, note, TIME, x, tuple(shown), tuple(shown.values()), axis)
    lines = tuple(ChartLine(name, x, y, index) for index, (name, y) in enumerate(shown.items()))
    return Chart(id_, title, note, TIME, axis, lines)


def worker_table(run: RunRecord) -> ReportTable:
    """Return the figures of each worker."""
    rows = []
    for worker in run.figures.get("workers", ()):
        samples = {} if run.samples is None else run.samples.workers.get(worker["worker"], {})
        rows.append(
            (
                Cell(worker["worker"]),
                Cell(worker["steps"]),
                Cell(worker["busy"], "share"),
                Cell(worker["prefix_hit_ratio"], "share"),
                Cell(_mean(samples.get("running", ()))),
                Cell(_mean(samples.get("waiting", ()))),
                Cell(_mean(samples.get("kv_usage", ())), "share"),
                Cell(_maximum(samples.get("kv_usage", ())), "share"),
            )
        )
    columns = (
        "worker", "steps", "busy", "prefix hits", "mean running", "mean waiting", "mean KV use",
        "most KV use",
    )  # fmt: skip
    note = "Means and most are over the samples, while the worker was up."
    return ReportTable("workers", "What each worker did", columns, tuple(rows), note)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _maximum(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def objectives(figures: Mapping[str, Any]) -> ReportTable:
    """Return the objectives, and the shares of offered requests that attained them."""
    slo = figures["slo"]
    rows = [_objective("all requests", figures["offered"], slo)]
    rows += [
        _objective(name, terms["offered"], terms) for name, terms in slo.get("classes", {}).items()
    ]
    columns = ("requests", "offered", "TTFT within", "ITL within", "wanted", "attained")
    note = "TTFT from the intention to send; ITL is the mean of a request. All offered ones count."
    return ReportTable("objectives", "Objectives", columns, tuple(rows), note)


def _objective(name: str, count: int, terms: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        Cell(name), Cell(count), Cell(terms["ttft_s"], "seconds"), Cell(terms["itl_s"], "seconds"),
        Cell(terms["percentile"] / 100, "share"), Cell(terms["attained"], "share"),
    )  # fmt: skip


def totals(planner: Mapping[str, Any]) -> ReportTable:
    """Return a planner's actions and their cost, by role and state."""
    rows = [(Cell(title), Cell(planner[key], form)) for key, (title, form) in _TOTALS.items()]
    rows += [
        (Cell(f"GPU-hours, {role}, {state}"), Cell(hours))
        for role, times in planner["gpu_hours_by_role"].items()
        for state, hours in times.items()
    ]
    return ReportTable("planner", "What the planner did", ("", "figure"), tuple(rows))


def replicas(planner: Mapping[str, Any], end_s: float) -> Chart:
    """Return the workers of each pool over time: those that serve, and all that hold GPUs."""
    entries = planner["replicas"]
    times = [*(entry["at_s"] for entry in entries), end_s]
    lines = []
    for colour, pool in enumerate(entries[0]["pools"] if entries else ()):
        counts = [entry["pools"][pool] for entry in entries]
        counts.append(counts[-1])
        active = [count["active"] for count in counts]
        total = [sum(count.values()) for count in counts]
        lines.append(ChartLine(f"{pool}, active", times, active, colour, step=True))
        lines.append(ChartLine(f"{pool}, all", times, total, colour, "dot", step=True))
    return Chart(
        "replicas", "Workers of each pool",
        "Active ones serve; all are those that start or drain, too.",
        TIME, Axis("workers", zero=True), tuple(lines),
    )  # fmt: skip


def decisions(planner: Mapping[str, Any]) -> ReportTable:
    """Return the decisions: time, action and reason."""
    rows = []
    for entry in planner["decisions"][:_MAX_DECISIONS]:
        refusals = [f"refused: {reason}" for reason in entry.get("refused", ())]
        reasons = "; ".join((*entry["reasons"], *refusals))
        actions = "; ".join(map(_action, entry["actions"]))
        rows.append((Cell(entry["at_s"], "seconds"), Cell(actions), Cell(reasons or "–")))
    count = len(planner["decisions"])
    note = f"The first {_MAX_DECISIONS} of {count:,}." if count > _MAX_DECISIONS else ""
    return ReportTable("decisions", "Decisions", ("at", "actions", "reasons"), tuple(rows),
                       note, folded=True)  # fmt: skip


def _action(action: Mapping[str, Any]) -> str:
    """Return an action in words: `add workers decode 2`."""
    words = [str(value) for key, value in action.items() if key != "kind"]
    return " ".join((action["kind"].replace("_", " "), *words))
