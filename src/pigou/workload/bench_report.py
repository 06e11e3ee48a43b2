"""The figures of a run, as a table and as a JSON document."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.table import Table

from pigou.workload.bench import BenchResult
from pigou.workload.bench_config import BenchConfig
from pigou.workload.bench_summary import LatencyDistribution, Summary

#: Changes when a key of the document changes its meaning or goes.
VERSION = 1
_SPREADS = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "End-to-end",
    "queue_wait": "Client queue wait",
    "server_ttft": "Server TTFT",
    "server_e2e": "Server end-to-end",
}


def document(config: BenchConfig, result: BenchResult) -> dict[str, Any]:
    """Return the JSON document: latencies in milliseconds under keys that end in `_ms`."""
    summary: dict[str, Any] = msgspec.to_builtins(result.summary)
    load = {key: value for key, value in msgspec.to_builtins(config).items() if key != "api_key"}
    return {
        "version": VERSION,
        "load": load | {"model": result.model},
        "prompts": result.prompts,
        "fields": msgspec.to_builtins(result.flavour),
        "interrupted": result.interrupted,
        "notes": result.notes,
        **{f"{key}_ms" if key in _SPREADS else key: value for key, value in summary.items()},
    }


def tables(result: BenchResult) -> list[Table]:
    """Return the table of counts and rates, and that of latencies."""
    return [_counts(result), _latencies(result.summary)]


def describe(config: BenchConfig, model: str) -> str:
    """Return what was asked for, in one line."""
    if config.trace:
        return f"{model}: {_replay(config)}"
    if config.rate is None:
        loop = f"closed loop, {config.slots} at once"
    else:
        cv = 1.0 if config.cv is None else config.cv
        gaps = "Poisson" if cv == 1 else f"gamma, CV {cv:g}"
        loop = f"open loop, {_rate(config)} requests/s ({gaps})"
        loop += f", at most {config.max_inflight} in flight" if config.max_inflight else ""
    front = f"{config.prefixes} x {config.prefix_length} + " if config.prefixes else ""
    return f"{model}: {loop}, prompts {front}{config.inputs}, outputs {config.outputs} tokens"


def _rate(config: BenchConfig) -> str:
    return config.rate if isinstance(config.rate, str) else f"{config.rate:g}"


def _replay(config: BenchConfig) -> str:
    changes = f"lengths x {config.trace_scale:g}, times / {config.trace_speed:g}"
    if config.concurrency is not None:
        pace = f"{config.concurrency} sessions at once"
    elif config.rate is not None:
        pace = f"{_rate(config)} sessions/s"
    else:
        pace = "sessions at their recorded starts"
    return f"replay of {config.trace} ({changes}), {pace}"


def _counts(result: BenchResult) -> Table:
    summary = result.summary
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = {
        "Offered": summary.offered_requests,
        "Completed": summary.completed,
        "Failed": summary.failed,
        **({"Cut off": summary.cancelled} if summary.cancelled else {}),
        "Seconds": f"{summary.seconds:.2f}",
        **({} if summary.attained is None else {"Inside the objective": f"{summary.attained:.1%}"}),
        "Requests/s": f"{summary.requests_per_second:.2f}",
        "Output tokens/s": f"{summary.output_tokens_per_second:.1f}",
        "Output tokens": summary.output_tokens,
        f"Prompt tokens ({result.prompts})": _or_dash(summary.prompt_tokens),
        "  cached, it says": _or_dash(summary.cached_tokens),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _latencies(summary: Summary) -> Table:
    table = Table()
    for column in ("Milliseconds", "mean", "p50", "p90", "p95", "p99"):
        table.add_column(column, justify="left" if column == "Milliseconds" else "right")
    for key, name in _SPREADS.items():
        spread: LatencyDistribution | None = getattr(summary, key)
        values = (
            ["-"] * 5 if spread is None else [f"{v:.2f}" for v in msgspec.structs.astuple(spread)]
        )
        table.add_row(name, *values, end_section=key == "e2e")
    return table


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
