"""`pigou version`."""

from __future__ import annotations

import platform
from importlib.metadata import version as version_of

import typer

from pigou import __version__


def version() -> None:
    """Print the versions of Pigou, torch and Python."""
    typer.echo(f"pigou {__version__}")
    typer.echo(f"torch {version_of('torch')}")
    typer.echo(f"python {platform.python_version()}")
