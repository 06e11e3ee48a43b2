"""`pigou key`, `pigou warm` and `pigou version`."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Annotated, Literal

import typer

from pigou import __version__
from pigou.cli.progress import StageProgress
from pigou.config import ConfigError
from pigou.registry import remedy


def key(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key is for.")],
    yaml: Annotated[
        bool, typer.Option("--yaml", help="Print an entry of a .yaml keys file, not a line.")
    ] = False,
    payer: Annotated[
        str, typer.Option(help="Who pays for it: keys of one payer share weight and limits.")
    ] = "",
    admin: Annotated[
        bool,
        typer.Option("--admin", help="Let the key see the whole fleet: all metrics and decisions."),
    ] = False,
) -> None:
    """Make an API key, and its hash for `pigou serve --api-keys-file`."""
    from pigou.gateway.auth.keys import make_key

    if payer and not yaml:
        raise ConfigError(f"--payer is {payer!r}, and a line has none; add --yaml")
    secret, line = make_key(tenant, admin=admin, payer=payer)
    typer.echo(f"key (shown once): {secret}", err=True)
    digest = line.split(":")[1]
    entry = f'  - tenant: {tenant}\n    sha256: "{digest}"' + "\n    admin: true" * admin
    entry += f"\n    payer: {payer}" if payer else ""
    typer.echo(entry if yaml else line)


def warm(
    what: Annotated[
        Literal["all", "gateway", "worker"], typer.Option(help="Kernels to compile.")
    ] = "all",
) -> None:
    """Compile the kernels now, so that the first start of a fleet loads them.

    For images and installation scripts: a machine with another CPU compiles anew. A worker's need
    `pigou[worker]`.
    """
    from pigou.compiled import on_compiling
    from pigou.registry import require

    if what != "gateway":
        require("worker", "--what worker", "; or give --what gateway")
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
            from pigou.worker.startup.profiling import warm_all

            warm_all(WorkerConfig())
    took = time.monotonic() - began
    typer.echo(f"{compiled} kernels compiled in {took:.1f} s; those that were there are kept")


def version() -> None:
    """Print the versions of Pigou, torch and Python."""
    typer.echo(f"pigou {__version__}")
    try:
        torch = version_of("torch")
    except PackageNotFoundError:
        torch = f"is not installed ({remedy('worker')})"
    typer.echo(f"torch {torch}")
    typer.echo(f"python {platform.python_version()}")
