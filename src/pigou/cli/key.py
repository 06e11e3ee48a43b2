"""`pigou key`."""

from __future__ import annotations

from typing import Annotated

import typer

from pigou.config import ConfigError
from pigou.gateway.keys import make_key


def key(tenant: Annotated[str, typer.Argument(help="Whose key it is.")]) -> None:
    """Make an API key, and the line for `pigou serve --api-keys-file` that holds its hash."""
    try:
        secret, line = make_key(tenant)
    except ConfigError as error:
        typer.echo(f"pigou key: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"key (shown once): {secret}", err=True)
    typer.echo(line)
