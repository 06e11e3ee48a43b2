"""`pigou bench`, `pigou profile` and `pigou sweep`: measurements over HTTP or in simulation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from pigou.background import run_async
from pigou.cli.config_options import Override
from pigou.cli.option_values import check_json, json_file, write_json
from pigou.cli.progress import WorkProgress, wide_console
from pigou.config import ConfigError
from pigou.request import SECOND
from pigou.sim.setup import Setup, SweepConfig
from pigou.stop_signals import StopSignals
from pigou.workload.bench_config import BenchConfig, ProfileConfig, SweepTarget

if TYPE_CHECKING:
    from pigou.performance.sweep_tables import SweepTables
    from pigou.sim.timing_measured import WorkerProfile
    from pigou.workload.bench import BenchResult
    from pigou.workload.load_generator import LoadGenerator
    from pigou.workload.profiling.profile import ProfileReport

#: Seconds that a measurement is given to end, and to write what it has.
_STOP_S = 60.0
_INTERRUPTED = 130
_EXAMPLE = 200
_SETUP = Override(
    "model gpu tp dp ep redundant_experts expert_load eplb timing blocks max_batched_tokens "
    "max_seqs max_model_len engine"
)


def fleet_token(url: str) -> str:
    """Return the token that a worker of this fleet must be sent; empty for any other server.

    The secret is that of PIGOU_FLEET_SECRET, with which `pigou worker` starts from the same shell.
    A server is sent a token only once it has proved that it knows the secret.
    """
    from pigou.wire.fleet_secret import FleetSecret

    secret = FleetSecret.given()
    if secret is None:
        return ""
    from pigou.fleet.probe import fleet_key

    return asyncio.run(fleet_key(url, secret))


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets, within the event loop; a second one ends at once.

    Nothing sets it in other threads than the main one.
    """
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    with StopSignals(stop.set, _STOP_S):
        yield stop


def bench(
    config: BenchConfig,
    json: Annotated[
        str, typer.Option(help="File to write the figures to.", rich_help_panel="Results")
    ] = "",
    requests: Annotated[
        str,
        typer.Option(
            help="File to write each request to, as JSON lines that --trace reads; "
            "a number stands for --count.",
            rich_help_panel="Results",
        ),
    ] = "",
) -> None:
    """Load an OpenAI endpoint, and measure its latency and throughput."""
    from pigou.workload.bench import document
    from pigou.workload.trace_formats import write_rows

    if requests.isdecimal():
        if config.requests is not None:
            raise ConfigError(
                f"--requests is {requests}, and --count {config.requests}; give the number once, "
                "and --requests a file"
            )
        config, requests = msgspec.structs.replace(config, requests=int(requests)), ""
    check_json(json)
    check_json(requests, "--requests")
    if token := fleet_token(config.base):
        config = msgspec.structs.replace(config, api_key=token)
    result = _run_bench(config, bool(requests))
    if result is None:
        typer.echo("pigou bench: stopped before anything was measured", err=True)
        raise typer.Exit(_INTERRUPTED)
    _show_bench(config, result)
    write_json("--json", json, document(config, result))
    if requests:
        write_rows(Path(requests), result.rows)
    raise typer.Exit(_INTERRUPTED if result.interrupted else int(result.summary.failed > 0))


def _run_bench(config: BenchConfig, keep_rows: bool) -> BenchResult | None:
    from pigou.workload.bench import bench as run_bench

    async def main() -> BenchResult | None:
        with WorkProgress() as progress, stop_on_signals() as stop:
            return await run_bench(config, stop, _watcher(config, progress), keep_rows)

    return run_async(main())


def _watcher(config: BenchConfig, progress: WorkProgress) -> Callable[[LoadGenerator], None]:
    total = None if config.trace else config.count or config.duration
    task = progress.add_task("getting ready", total=total)

    def watch(drive: LoadGenerator) -> None:
        ended = len(drive.outcomes)
        elapsed = (time.monotonic_ns() - drive.began) / SECOND
        progress.update(
            task,
            completed=min(total or 0, ended if config.count else elapsed),
            description=f"{ended} ended, {drive.inflight} in flight, {drive.failed} failed",
        )

    return watch


def _show_bench(config: BenchConfig, result: BenchResult) -> None:
    from pigou.workload.bench import describe, tables

    console = wide_console()
    console.print(describe(config, result.model), markup=False)
    for table in tables(result):
        console.print(table)
    for reason in result.summary.failures:
        example = " ".join(reason.example.split())[:_EXAMPLE]
        console.print(f"{reason.count} failed: {reason.reason} ({example})", markup=False)
    for note in result.notes:
        console.print(note, markup=False)
    if result.interrupted:
        console.print("Interrupted: these are the figures so far.")


def profile(
    config: ProfileConfig,
    out: Annotated[
        str, typer.Option(help="File to write, for `pigou simulate --timing`; ends in .json.")
    ] = "timing.json",
) -> None:
    """Measure the step times of a live, idle worker, for simulations of it."""
    file = json_file(out)
    if token := fleet_token(config.base):
        config = msgspec.structs.replace(config, api_key=token)
    report = _run_profile(config)
    write_json("--out", out, report.measured)
    _show_profile(report)
    for note in report.notes:
        typer.echo(f"Note: {note}.")
    typer.echo(f"Written to {file}: pigou simulate --timing {file} ...")


def _run_profile(config: ProfileConfig) -> ProfileReport:
    from pigou.workload.profiling.profile import profile as run_profile

    with WorkProgress(counts=True) as progress:
        task = progress.add_task("getting ready", total=None)

        def watch(done: int, total: int, what: str, left_s: float | None) -> None:
            left = "" if left_s is None else f", about {_time(left_s)} left"
            progress.update(task, completed=done, total=total, description=what + left)

        async def main() -> ProfileReport:
            with stop_on_signals() as stop:
                return await run_profile(config, watch, stop)

        return asyncio.run(main())


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _show_profile(report: ProfileReport) -> None:
    console = wide_console()
    console.print(f"{report.model}: what a step takes, in milliseconds", markup=False)
    console.print(_costs(report.measured))
    table = Table("How well it fits", "measured", "median error", "largest")
    for error in report.errors:
        table.add_row(error.what, str(error.count), f"{error.median:.1%}", f"{error.largest:.1%}")
    console.print(table)
    if report.measured.scatter:
        console.print(_scatter(report.measured))


def _costs(measured: WorkerProfile) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for n, seconds in measured.decodes:
        table.add_row(_decode(n), f"{seconds * 1e3:.3f}")
    for entries, seconds in measured.cache[1:]:
        table.add_row(f"{entries:,} cache entries that decodes read, more", f"{seconds * 1e3:.3f}")
    for tokens, seconds in measured.prompts[1:]:
        table.add_row(f"{tokens} tokens of prompts, more", f"{seconds * 1e3:.3f}")
    table.add_row("1,000,000 cache entries that prompts read", f"{measured.context * 1e9:.4f}")
    table.add_row("each prompt, more", f"{measured.prompt * 1e3:.3f}")
    for n, places in measured.rhythm:
        more = max(places)
        table.add_row(f"{_decode(n)}: the longest step of a plan, more", f"{more * 1e3:.3f}")
    table.add_row("without decodes", f"{measured.alone * 1e3:.3f}")
    table.add_row("besides steps, until the first token", f"{measured.overhead * 1e3:.3f}")
    return table


def _scatter(measured: WorkerProfile) -> Table:
    shares = (10, 50, 90, 98)
    table = Table("A step by its mean", *(f"p{share}" for share in shares))
    for n, factors in measured.scatter:
        values = (factors[len(factors) * share // 100] for share in shares)
        table.add_row(_decode(n), *(f"{value:.2f}" for value in values))
    return table


def _decode(n: int) -> str:
    return f"{n} decode{'s' * (n > 1)}"


def sweep(
    config: SweepConfig,
    setup: Annotated[Setup, _SETUP],
    out: Annotated[
        str, typer.Option(help="File to write, for --performance; ends in .json.")
    ] = "performance.json",
    *,
    target: SweepTarget,
) -> None:
    """Measure TTFT of prefill and ITL of decode pools, live or simulated, for planners."""
    file = json_file(out)
    with WorkProgress(counts=True) as progress:
        task = progress.add_task("", total=None)

        def watch(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        tables = _measure(config, setup, target, watch)
    if tables is None:
        typer.echo("pigou sweep: stopped; nothing is written", err=True)
        raise typer.Exit(_INTERRUPTED)
    write_json("--out", out, tables)
    _show_sweep(tables)
    command = "serve" if target.url else "simulate"
    typer.echo(f"Written to {file}: pigou {command} --planner price --performance {file} ...")


def _measure(
    config: SweepConfig, setup: Setup, target: SweepTarget, watch: Callable[[int, int, str], None]
) -> SweepTables | None:
    if not target.url:
        from pigou.sim.sweep import sweep as run_sweep

        return run_sweep(config, setup, watch)
    from pigou.workload.live_sweep import live_sweep

    if token := fleet_token(target.url):
        target = msgspec.structs.replace(target, api_key=token)

    async def main() -> SweepTables | None:
        with stop_on_signals() as stop:
            return await live_sweep(config, setup, target, watch, stop)

    return asyncio.run(main())


def _show_sweep(tables: SweepTables) -> None:
    console = wide_console()
    ttft = Table("prefill workers", "tokens", "utilisation", "requests/s", "TTFT mean, s", "p95")
    for point in tables.prefill:
        ttft.add_row(
            str(point.workers), f"{point.isl_tokens:,}", f"{point.utilisation:g}",
            f"{point.rate_rps:.3g}", f"{point.ttft_mean_s:.4g}", f"{point.ttft_p95_s:.4g}",
        )  # fmt: skip
    console.print(ttft)
    itl = Table("users", "streams", "tokens of each", "ITL mean, ms", "tokens/s")
    for row in tables.decode:
        itl.add_row(
            str(row.concurrency), f"{row.streams:.1f}", f"{row.context_tokens:,.0f}",
            f"{row.itl_mean_s * 1e3:.2f}", f"{row.output_tok_s:,.0f}",
        )  # fmt: skip
    console.print(itl)
