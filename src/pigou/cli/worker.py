"""`pigou worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pigou.cli.config_options import config_command
from pigou.cli.option_values import check_port
from pigou.config import ConfigError, EvictionConfig
from pigou.fleet.prefill_queue.messages import PullingConfig
from pigou.fleet.registry.registration import RegistrationConfig
from pigou.imports import require, uncollected
from pigou.worker.config import WorkerConfig

if TYPE_CHECKING:
    from pigou.wire.fleet_secret import FleetSecret
    from pigou.worker.registrar import Registrar

_EVICTION_FLAGS = {
    f"eviction.{name}": f"--eviction-{name}" for name in EvictionConfig.__struct_fields__
}


@config_command("worker", **_EVICTION_FLAGS)
def worker(config: WorkerConfig, registration: RegistrationConfig, pulling: PullingConfig) -> None:
    """Run one worker: an OpenAI-compatible server over one model."""
    check_port(config.host, config.port)
    if not config.sleeps:
        require("worker", "a worker that computes")
    from pigou.worker.preflight import check_worker

    check_worker(config)
    with uncollected():
        from pigou.worker.process import run

    address = pulling.address(config.role) if pulling.prefill_queue else None

    def registrar(secret: FleetSecret | None) -> Registrar:
        known: Registrar | None = None
        if registration.registry:
            from pigou.fleet.registry.registration import WorkerRegistrar

            gpus = config.timing_tp if config.device.startswith("cuda") else 0
            known = WorkerRegistrar(registration, secret, gpus, config.timing_tp)
        if address is not None:
            from pigou.fleet.prefill_queue.puller import PullingWorker

            return PullingWorker(address, secret, known)
        assert known is not None
        return known

    if registration.registry:
        from pigou.fleet.registry.registry import open_store

        open_store(registration.registry)  # refused before a model is loaded
    try:
        known = registrar if registration.registry or address else None
        status = run(config, known, registration.advertise)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        typer.echo(f"pigou worker: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)
