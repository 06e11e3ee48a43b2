"""`pigou trace`: list, download, info, convert, sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from pigou.cli.progress import wide_console
from pigou.config import ConfigError, check_bounds

if TYPE_CHECKING:
    from pigou.workload.catalogue import Watch
    from pigou.workload.trace import Trace

trace = typer.Typer(
    help="Find, download, describe, convert and cut recorded traces.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_PERCENTILES = (50, 90, 99)
File = Annotated[str, typer.Argument(help="Trace, or journal of `pigou serve`.")]
Out = Annotated[
    str,
    typer.Argument(help="File to write, in Pigou's own JSON lines; .gz and .zst are compressed."),
]
Block = Annotated[
    float,
    typer.Option(
        help="Tokens per block if the file does not say. (default: the size that fits all rows)"
    ),
]
Unit = Annotated[
    str, typer.Option(help="Unit of the times of Mooncake's format: s, ms, us or ns. (default: ms)")
]


@trace.command("list")
def list_() -> None:
    """List public traces: name, size, licence and owner.

    Traces marked with a star have no checksum.
    """
    from pigou.workload.catalogue import TRACES

    table = Table("name", "MB", "format", "licence", "what", "owner")
    for entry in TRACES:
        size = f"{entry.size / 1e6:.1f}" if entry.size else ""
        name = entry.name if entry.verified or not entry.address else f"{entry.name} *"
        kind = entry.kind or "not read"
        table.add_row(
            name, size, kind, entry.licence, entry.what, entry.page.split("github.com/")[1]
        )
    wide_console(140).print(table)
    typer.echo("* unverified: its checksum is not known here.")


@trace.command("download")
def fetch(
    name: Annotated[str, typer.Argument(help="Name, as in `pigou trace list`.")],
    out: Annotated[str, typer.Option(help="Folder to download to.")] = ".",
    address: Annotated[
        str, typer.Option(help="URL of another copy of the same file. (default: the owner's)")
    ] = "",
) -> None:
    """Download a public trace from its owner; resumes an interrupted download."""
    from pigou.workload.catalogue import download, listed

    entry = listed(name)
    if not Path(out).is_dir():
        raise ConfigError(f"--out is {out!r}, which is no folder; make it first")
    typer.echo(f"{entry.name}: {entry.what}\nLicence: {entry.licence}. Owner: {entry.page}")
    with _bar() as watch:
        path = download(entry, Path(out), address, watch)
    how = "its SHA-256 is right" if entry.verified else "unverified: no checksum is known"
    typer.echo(f"{path} ({path.stat().st_size} bytes; {how})")


@trace.command("info")
def info(
    file: File,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="Cache size in tokens to give the best hit ratio for, as 50M. Repeatable."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    block: Block = 0.0,
    unit: Unit = "",
) -> None:
    """Describe a trace: requests, lengths, rate, and shared prefixes."""
    from pigou.workload.trace_formats import read_trace

    description = _describe(read_trace(file, block, unit), [_tokens(size) for size in cache or []])
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(description)).decode())
        return
    table = Table(show_header=False)
    for key, value in description.items():
        table.add_row(key.replace("_", " "), _shown(value))
    wide_console(140).print(table)


@trace.command("convert")
def convert(
    file: File,
    out: Out,
    block: Block = 0.0,
    unit: Unit = "",
) -> None:
    """Write any trace, or the workload of a journal, as Pigou's own JSON lines."""
    from pigou.workload.trace_formats import read_trace, to_rows, write_rows

    count = write_rows(Path(out), to_rows(read_trace(file, block, unit)))
    typer.echo(f"{count} requests in {out}")


@trace.command("sample")
def sample(
    file: File,
    out: Out,
    begin: Annotated[float, typer.Option("--from", help="Seconds to begin at.")] = 0.0,
    end: Annotated[float, typer.Option("--to", help="Seconds to end before.")] = math.inf,
    sessions: Annotated[
        int | None, typer.Option(help="Sessions to draw, without replacement. (default: all)")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    scale: Annotated[float, typer.Option(help="Factor on all lengths, blocks included.")] = 1.0,
    speed: Annotated[float, typer.Option(help="Divisor of all times.")] = 1.0,
    block: Block = 0.0,
    unit: Unit = "",
) -> None:
    """Write a part of a trace: a window of time, some of its sessions, scaled."""
    import numpy as np

    from pigou.workload.trace import some, window
    from pigou.workload.trace_formats import read_trace, to_rows, write_rows

    for name, value in (("--scale", scale), ("--speed", speed)):
        check_bounds(name, value, gt=0)
    check_bounds("--seed", seed, ge=0)
    recorded = window(read_trace(file, block, unit), begin, end)
    if sessions is not None:
        recorded = some(recorded, sessions, np.random.default_rng(seed))
    count = write_rows(Path(out), to_rows(recorded.scaled(scale, speed)))
    typer.echo(f"{count} requests in {out}")


@trace.command("train")
def train(
    file: Annotated[str, typer.Argument(help="Journal of `pigou serve`.")],
    out: Annotated[str, typer.Argument(help="File to write, for --length-model.")],
    share: Annotated[
        float, typer.Option(help="Share of the answers to learn from; the others test.")
    ] = 0.8,
) -> None:
    """Learn output lengths from a journal, for `pigou serve --lengths online`."""
    from pigou.cli.option_values import check_json
    from pigou.workload.journal_file import train_lengths

    check_json(out, "OUT")
    online, score = train_lengths(file, share)
    model = msgspec.json.encode({"length_model": online.model()})
    Path(out).write_bytes(msgspec.json.format(model, indent=0))
    mean = score.error_sum / score.observed
    typer.echo(
        f"{online.model().requests} answers in {out}; on the last {score.observed}, rank "
        f"correlation {score.tau:.2f} (Kendall), mean error a factor of {mean:.2f}"
    )


@contextmanager
def _bar() -> Iterator[Watch]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda so_far, whole: progress.update(task, completed=so_far, total=whole or None)


def _describe(recorded: Trace, caches: list[float]) -> dict[str, Any]:
    import numpy as np

    from pigou.workload.trace import hit_ratio, sharing

    turns = [turn for session in recorded.sessions for turn in session.turns]
    span = recorded.sessions[-1].start
    gaps = np.diff([session.start for session in recorded.sessions])
    shared = sharing(recorded)
    description: dict[str, Any] = {
        "requests": len(turns),
        "sessions": len(recorded.sessions),
        "tenants": len({session.tenant for session in recorded.sessions}),
        "last_start_s": span,
        "sessions_per_s": (len(recorded.sessions) - 1) / span if span > 0 else None,
        "gap_cv": float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None,
        "input": _lengths([turn.input for turn in turns]),
        "output": _lengths([turn.output for turn in turns]),
    }
    if shared.references:
        description |= {
            "block": recorded.block,
            "blocks": shared.references,
            "different_blocks": shared.distinct,
            "blocks_seen_before": shared.reuse,
            "hit_ratio_at_best": hit_ratio(recorded, math.inf),
        }
        description |= {
            f"hit_ratio_{tokens:.0f}_tokens": hit_ratio(recorded, tokens) for tokens in caches
        }
    elif caches:
        raise ConfigError("--cache is given, and the trace does not tell of blocks")
    return description


def _lengths(values: list[int]) -> dict[str, float]:
    import numpy as np

    lengths = {"mean": float(np.mean(values))}
    lengths |= {f"p{q}": float(np.percentile(values, q)) for q in _PERCENTILES}
    return lengths | {"max": float(max(values))}


def _tokens(text: str) -> float:
    units = {"k": 1e3, "M": 1e6, "G": 1e9}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        tokens = float(number) * unit
    except ValueError:
        tokens = math.nan
    if not 0.0 < tokens < math.inf:
        raise ConfigError(f"--cache is {text!r}; write tokens, like 2000000, 500k or 2M")
    return tokens


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
    return "-" if value is None else str(value)
