"""Figures of a run over time: rates, queues, regime, prices, and the workers."""

from __future__ import annotations

from collections.abc import Sequence

from pigou.control.saturation.regime import LEVELS
from pigou.report.figure import LINES, Axis, Chart, ChartLine, Figure, Heat, Unit
from pigou.report.run_record import Course, RunRecord, Samples
from pigou.report.table import Cell, ReportTable

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
    if "rho" not in series:  # of a run before there were any
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
            "evicted", "Evicted blocks", "That left a device for others, since the beginning.",
            TIME, Axis("blocks", zero=True),
            (ChartLine("evicted", x, series["evicted"], step=True),),
        ),
    )  # fmt: skip


def _constant(temperature: Sequence[float | None]) -> str:
    if len(set(temperature)) != 1:
        return ""
    return f" The temperature of the choice was {temperature[0]:g} throughout."


def _temperature(samples: Samples) -> tuple[Chart, ...]:
    """Return the temperature over time, where it changed."""
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
    """Return lines for a few workers, a map for many."""
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
