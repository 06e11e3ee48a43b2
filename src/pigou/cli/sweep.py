"""`pigou sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pigou.cli.config_options import Override, config_command
from pigou.cli.measurement import measuring_bar
from pigou.config import ConfigError
from pigou.sim.setup import Setup
from pigou.sim.sweep_config import SweepConfig

if TYPE_CHECKING:
    from pigou.control.planner.performance.sweep_tables import SweepTables

_SETUP = Override("model gpu tp timing blocks max_batched_tokens max_seqs max_model_len engine")


@config_command("sweep")
def sweep(
    config: SweepConfig,
    setup: Annotated[Setup, _SETUP],
    out: Annotated[
        str, typer.Option(help="File to write, for --performance; ends in .json.")
    ] = "performance.json",
) -> None:
    """Measure TTFT of prefill pools and ITL of decode workers in simulation, for planners."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from pigou.sim.sweep import sweep as run_sweep

    file = Path(out)
    if file.suffix != ".json" or not file.absolute().parent.is_dir():
        raise ConfigError(f"--out is {str(file)!r}; name a .json file in a folder that exists")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
               TimeElapsedColumn())  # fmt: skip
    with measuring_bar(*columns) as progress:
        task = progress.add_task("", total=None)

        def watch(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        tables = run_sweep(config, setup, watch)
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(tables)) + b"\n")
    except OSError as error:
        typer.echo(f"pigou sweep: --out is {out!r}: {error}", err=True)
        raise typer.Exit(1) from None
    _show(tables)
    typer.echo(f"Written to {file}: pigou simulate --planner price --performance {file} ...")


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
