"""`pigou version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import typer

from pigou import __version__
from pigou.imports import remedy


def version() -> None:
    """Print the versions of Pigou, torch and Python."""
    typer.echo(f"pigou {__version__}")
    try:
        torch = version_of("torch")
    except PackageNotFoundError:
        torch = f"is not installed ({remedy('worker')})"
    typer.echo(f"torch {torch}")
    typer.echo(f"python {platform.python_version()}")
