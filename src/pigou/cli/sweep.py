"""`pigou sweep`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pigou.cli.config_options import Override, config_command
from pigou.cli.measurement import fleet_token, stop_on_signals
from pigou.cli.option_values import write_json
from pigou.cli.progress import WorkProgress
from pigou.config import ConfigError
from pigou.sim.setup import Setup, SweepConfig

if TYPE_CHECKING:
    from pigou.performance.sweep_tables import SweepTables

_INTERRUPTED = 130
_SETUP = Override("model gpu tp timing blocks max_batched_tokens max_seqs max_model_len engine")


@config_command("sweep")
def sweep(
    config: SweepConfig,
    setup: Annotated[Setup, _SETUP],
    out: Annotated[
        str, typer.Option(help="File to write, for --performance; ends in .json.")
    ] = "performance.json",
    url: Annotated[
        str,
        typer.Option(
            help="A live fleet that does nothing else, in place of a simulated one; with --workers "
            "N, --blocks and the like as it has.",
            rich_help_panel="Live fleet",
        ),
    ] = "",
    decode_workers: Annotated[
        int, typer.Option(help="That the live fleet has.", rich_help_panel="Live fleet", min=1)
    ] = 1,
    api_key: Annotated[
        str,
        typer.Option(
            help="Sent as bearer token.",
            rich_help_panel="Live fleet",
            envvar="PIGOU_API_KEY",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Measure TTFT of prefill and ITL of decode pools, live or simulated, for planners."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from pigou.workload.endpoint import EndpointError

    if not url and decode_workers != 1:
        raise ConfigError(f"--decode-workers is {decode_workers}; it goes with --url, give that")
    file = Path(out)
    if file.suffix != ".json" or not file.absolute().parent.is_dir():
        raise ConfigError(f"--out is {str(file)!r}; name a .json file in a folder that exists")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
               TimeElapsedColumn())  # fmt: skip
    with WorkProgress(*columns) as progress:
        task = progress.add_task("", total=None)

        def watch(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        try:
            tables = _measure(config, setup, watch, url, api_key, decode_workers)
        except EndpointError as error:
            typer.echo(f"pigou sweep: {error}", err=True)
            raise typer.Exit(1) from None
    if tables is None:
        typer.echo("pigou sweep: stopped; nothing is written", err=True)
        raise typer.Exit(_INTERRUPTED)
    write_json("sweep", "--out", out, tables)
    _show(tables)
    command = "serve" if url else "simulate"
    typer.echo(f"Written to {file}: pigou {command} --planner price --performance {file} ...")


def _measure(
    config: SweepConfig, setup: Setup, watch: Callable[[int, int, str], None],
    url: str, api_key: str, decode_workers: int,
) -> SweepTables | None:  # fmt: skip
    """Return the tables; None when a live sweep was stopped."""
    if not url:
        from pigou.sim.sweep import sweep as run_sweep

        return run_sweep(config, setup, watch)
    from pigou.workload.live_sweep import SweepTarget, live_sweep

    target = SweepTarget(url, fleet_token(url) or api_key, decode_workers)

    async def main() -> SweepTables | None:
        with stop_on_signals() as stop:
            return await live_sweep(config, setup, target, watch, stop)

    return asyncio.run(main())


def _show(tables: SweepTables) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
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
