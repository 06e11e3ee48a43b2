"""`pigou warm`."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from pigou.cli.progress import StageProgress


def warm(
    what: Annotated[
        Literal["all", "gateway", "worker"], typer.Option(help="Whose kernels to compile.")
    ] = "all",
) -> None:
    """Compile the kernels now, so that the first start of a fleet loads them.

    For images and installation scripts: a machine with another CPU compiles anew. A worker's need
    `pigou[worker]`.
    """
    from pigou.config import ConfigError
    from pigou.imports import require
    from pigou.kernel_cache import on_compiling

    try:
        if what != "gateway":
            require("worker", "--what worker")
    except ConfigError as error:
        typer.echo(f"pigou warm: {error}; or give --what gateway", err=True)
        raise typer.Exit(2) from None
    began, compiled = time.monotonic(), 0
    progress = StageProgress()

    def listener(_: str) -> None:
        nonlocal compiled
        compiled += 1
        progress.report(what, f"compiling kernel {compiled}")

    with progress, on_compiling(listener):
        if what != "worker":
            from pigou.control.warm_up import warm_up as warm_control
            from pigou.wire import json_limits

            warm_control()
            json_limits.warm_up()
        if what != "gateway":
            from pigou.worker.config import WorkerConfig
            from pigou.worker.startup import warm_all

            warm_all(WorkerConfig())
    took = time.monotonic() - began
    typer.echo(f"{compiled} kernels compiled in {took:.1f} s; those that were there are kept")
