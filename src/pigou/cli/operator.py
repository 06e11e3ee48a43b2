"""`pigou operator`."""

from __future__ import annotations

import asyncio

import typer

from pigou.cli.config_options import config_command
from pigou.fleet.kubernetes.definitions import definitions_yaml
from pigou.fleet.kubernetes.operator import OperatorConfig
from pigou.imports import require
from pigou.logs import configure


@config_command("operator")
def operator(config: OperatorConfig) -> None:
    """Keep the fleets of a Kubernetes cluster as their `PigouFleet` objects specify."""
    if config.definitions:
        typer.echo(definitions_yaml(), nl=False)
        return
    require("k8s", "the operator")
    from pigou.fleet.kubernetes.operator import FleetOperator

    configure(config.log_format, config.log_level, access=False)
    asyncio.run(FleetOperator(config).serve())
