"""`pigou worker`."""

from __future__ import annotations

import typer

from pigou.cli.config_options import config_command
from pigou.cli.option_values import check_port
from pigou.config import ConfigError, EvictionConfig
from pigou.imports import require, uncollected
from pigou.worker.config import WorkerConfig

_EVICTION_FLAGS = {
    f"eviction.{name}": f"--eviction-{name}" for name in EvictionConfig.__struct_fields__
}


@config_command("worker", **_EVICTION_FLAGS)
def worker(config: WorkerConfig) -> None:
    """Run one worker: an OpenAI-compatible server over one model."""
    check_port(config.host, config.port)
    if not config.sleeps:
        require("worker", "a worker that computes")
    with uncollected():
        from pigou.worker.process import run

    try:
        status = run(config)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        typer.echo(f"pigou worker: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)
