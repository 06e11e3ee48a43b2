"""`pigou bench`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pigou.cli.fleet_token import fleet_token
from pigou.cli.options import check_json
from pigou.config import ConfigError
from pigou.request import SECOND

if TYPE_CHECKING:
    from pigou.workload.bench import Result
    from pigou.workload.config import BenchConfig
    from pigou.workload.drive import Drive

_INTERRUPTED = 130
_EXAMPLE = 200


def bench(
    url: Annotated[str, typer.Argument(help="The endpoint, like http://127.0.0.1:8000.")],
    model: Annotated[str, typer.Option(help="Name; by default the first that it lists.")] = "",
    api_key: Annotated[
        str,
        typer.Option(
            help="Sent as bearer token.",
            envvar=["PIGOU_API_KEY", "OPENAI_API_KEY"],
            show_default=False,
        ),
    ] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Chat completions.")] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Closed loop: requests always in flight. (default: 1 without --rate)"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, whatever comes back.")
    ] = None,
    cv: Annotated[
        float | None,
        typer.Option(help="Variation of the gaps (gamma); 0 is even. (default: 1, Poisson)"),
    ] = None,
    max_inflight: Annotated[
        int | None,
        typer.Option(help="Bound of an open loop; the wait counts as client queue wait."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests to send. (default: 100 without --duration)")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to send requests in.")] = None,
    warmup: Annotated[int, typer.Option(help="Requests before, which are not measured.")] = 0,
    input: Annotated[str, typer.Option(help="Tokens of a prompt: N or MIN:MAX.")] = "512",
    output: Annotated[str, typer.Option(help="Tokens to ask for: N or MIN:MAX.")] = "128",
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Go on past the end token. (default: where the endpoint knows it)",
        ),
    ] = None,
    text: Annotated[str, typer.Option(help="File whose passages are the prompts.")] = "",
    prefixes: Annotated[
        int, typer.Option(help="Shared prefixes; each prompt gets one in front, at random.")
    ] = 0,
    prefix_length: Annotated[int, typer.Option(help="Tokens of each, besides --input.")] = 0,
    trace: Annotated[
        str, typer.Option(help="Recorded sessions to replay: Mooncake, Azure or agent traces.")
    ] = "",
    trace_scale: Annotated[float, typer.Option(help="Lengths of the trace times this.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="Times of the trace by this.")] = 1.0,
    sessions: Annotated[
        int | None, typer.Option(help="Sessions of the trace to replay. (default: all)")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, prompts and lengths.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request failed.")] = 600.0,
    json: Annotated[str, typer.Option(help="File to write the figures to.")] = "",
) -> None:
    """Load an OpenAI endpoint, and measure what comes back."""
    values = dict(locals())
    from pigou.workload.config import BenchConfig
    from pigou.workload.endpoint import EndpointError
    from pigou.workload.report import document

    file = values.pop("json")
    try:
        config = msgspec.convert(values, BenchConfig)
        check_json(file)
        if token := fleet_token(config.base):
            config = msgspec.structs.replace(config, api_key=token)
        result = _run(config)
    except (ConfigError, msgspec.ValidationError) as error:
        typer.echo(f"pigou bench: {error}", err=True)
        raise typer.Exit(2) from None
    except EndpointError as error:
        typer.echo(f"pigou bench: {error}", err=True)
        raise typer.Exit(1) from None
    if result is None:
        typer.echo("pigou bench: stopped before anything was measured", err=True)
        raise typer.Exit(_INTERRUPTED)
    _show(config, result)
    if file:
        try:
            Path(file).write_bytes(
                msgspec.json.format(msgspec.json.encode(document(config, result))) + b"\n"
            )
        except OSError as error:
            typer.echo(f"pigou bench: {error}", err=True)
            raise typer.Exit(1) from None
    raise typer.Exit(_INTERRUPTED if result.interrupted else int(result.summary.failed > 0))


def _run(config: BenchConfig) -> Result | None:
    from pigou.workload.bench import bench as run_bench

    async def main() -> Result | None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError):  # not on every platform: Ctrl-C then prints nothing
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
        with _progress() as progress:
            return await run_bench(config, stop, _watcher(config, progress))

    with asyncio.Runner(loop_factory=_loop) as runner:
        return runner.run(main())


def _loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Few refreshes: they take time from the streams that are measured.
    return Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True,
        refresh_per_second=2,
    )  # fmt: skip


def _watcher(config: BenchConfig, progress: Progress) -> Callable[[Drive], None] | None:
    if progress.disable:
        return None
    total = None if config.trace else config.count or config.duration
    task = progress.add_task("getting ready", total=total)

    def watch(drive: Drive) -> None:
        ended = len(drive.outcomes)
        elapsed = (time.monotonic_ns() - drive.began) / SECOND
        progress.update(
            task,
            completed=min(total or 0, ended if config.count else elapsed),
            description=f"{ended} ended, {drive.inflight} in flight, {drive.failed} failed",
        )

    return watch


def _show(config: BenchConfig, result: Result) -> None:
    from pigou.workload.report import describe, tables

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
