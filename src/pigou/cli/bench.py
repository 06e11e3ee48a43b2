"""`pigou bench`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from pigou.cli.config_options import config_command
from pigou.cli.measurement import fleet_token, stop_on_signals
from pigou.cli.option_values import check_json
from pigou.cli.progress import WorkProgress
from pigou.request import SECOND
from pigou.workload.bench_config import BenchConfig

if TYPE_CHECKING:
    from pigou.workload.bench import BenchResult
    from pigou.workload.load_generator import LoadGenerator

_INTERRUPTED = 130
_EXAMPLE = 200


@config_command("bench")
def bench(
    config: BenchConfig,
    json: Annotated[
        str, typer.Option(help="File to write the figures to.", rich_help_panel="Results")
    ] = "",
) -> None:
    """Load an OpenAI endpoint, and measure what comes back."""
    from pigou.workload.bench_report import document
    from pigou.workload.endpoint import EndpointError

    check_json(json)
    if token := fleet_token(config.base):
        config = msgspec.structs.replace(config, api_key=token)
    try:
        result = _run(config)
    except EndpointError as error:
        typer.echo(f"pigou bench: {error}", err=True)
        raise typer.Exit(1) from None
    if result is None:
        typer.echo("pigou bench: stopped before anything was measured", err=True)
        raise typer.Exit(_INTERRUPTED)
    _show(config, result)
    if json:
        try:
            Path(json).write_bytes(
                msgspec.json.format(msgspec.json.encode(document(config, result))) + b"\n"
            )
        except OSError as error:
            typer.echo(f"pigou bench: {error}", err=True)
            raise typer.Exit(1) from None
    raise typer.Exit(_INTERRUPTED if result.interrupted else int(result.summary.failed > 0))


def _run(config: BenchConfig) -> BenchResult | None:
    from pigou.workload.bench import bench as run_bench

    async def main() -> BenchResult | None:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with WorkProgress(*columns) as progress, stop_on_signals() as stop:
            return await run_bench(config, stop, _watcher(config, progress))

    with asyncio.Runner(loop_factory=_loop) as runner:
        return runner.run(main())


def _loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


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


def _show(config: BenchConfig, result: BenchResult) -> None:
    from pigou.workload.bench_report import describe, tables

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
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
