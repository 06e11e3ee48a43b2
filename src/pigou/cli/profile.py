"""`pigou profile`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pigou.cli.config_options import config_command
from pigou.cli.measurement import fleet_token, stop_on_signals
from pigou.cli.progress import WorkProgress
from pigou.config import ConfigError
from pigou.workload.profiling.profile_config import ProfileConfig

if TYPE_CHECKING:
    from pigou.sim.timing_measured import WorkerProfile
    from pigou.workload.profiling.profile import ProfileReport


@config_command("profile")
def profile(
    config: ProfileConfig,
    out: Annotated[
        str, typer.Option(help="File to write, for `pigou simulate --timing`; ends in .json.")
    ] = "timing.json",
) -> None:
    """Measure what the steps of a live, idle worker take, for simulations of it."""
    from pigou.workload.endpoint import EndpointError

    file = Path(out)
    try:
        if file.suffix != ".json" or not file.absolute().parent.is_dir():
            raise ConfigError(f"--out is {str(file)!r}; name a .json file in a folder that exists")
        if token := fleet_token(config.base):
            config = msgspec.structs.replace(config, api_key=token)
        report = _run(config)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report.measured)) + b"\n")
    except (EndpointError, OSError) as error:
        typer.echo(f"pigou profile: {error}", err=True)
        raise typer.Exit(1) from None
    _show(report)
    for note in report.notes:
        typer.echo(f"Note: {note}.")
    typer.echo(f"Written to {file}: pigou simulate --timing {file} ...")


def _run(config: ProfileConfig) -> ProfileReport:
    from pigou.workload.profiling.profile import profile as run_profile

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
               TimeElapsedColumn())  # fmt: skip
    with WorkProgress(*columns) as progress:
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


def _show(report: ProfileReport) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
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
