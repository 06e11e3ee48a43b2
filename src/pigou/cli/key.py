"""`pigou key`."""

from __future__ import annotations

from typing import Annotated

import typer

from pigou.config import ConfigError


def key(
    tenant: Annotated[str, typer.Argument(help="Whose key it is.")],
    yaml: Annotated[
        bool, typer.Option("--yaml", help="Print an entry of a .yaml keys file, not a line.")
    ] = False,
    admin: Annotated[
        bool,
        typer.Option("--admin", help="Let it see the whole fleet: all metrics and decisions."),
    ] = False,
) -> None:
    """Make an API key, and what `pigou serve --api-keys-file` needs of it: its hash."""
    from pigou.gateway.auth.keys import make_key

    try:
        secret, line = make_key(tenant, admin=admin)
    except ConfigError as error:
        typer.echo(f"pigou key: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"key (shown once): {secret}", err=True)
    digest = line.split(":")[1]
    entry = f'  - tenant: {tenant}\n    sha256: "{digest}"' + "\n    admin: true" * admin
    typer.echo(entry if yaml else line)
