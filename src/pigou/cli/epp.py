"""`pigou epp`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from pigou import logs
from pigou.background import run_async
from pigou.cli.config_options import Override, field_flags
from pigou.cli.option_values import check_port
from pigou.cli.progress import StageProgress
from pigou.cli.serve import freeze, peer_bus, without_user
from pigou.config import ConfigError, ControlConfig, Option, check_all
from pigou.fleet.config import AttachedWorker, FleetError, WatchConfig, WorkersConfig
from pigou.fleet.peers.bus import PeersConfig
from pigou.gateway.config import GatewayConfig
from pigou.integrations.epp_config import EppConfig
from pigou.logs import LogConfig
from pigou.registry import uncollected

_STATUS = "Status pages"
_WORKERS = Override("attach registry tokenizer model_pool model_alias fleet_secret_file")
_PAGES = Override(
    "host port max_body api_keys_file open_metrics allow_open journal allow_special_tokens",
    host=Option(
        help="Address of /metrics, /workers, /decisions and the dashboard.",
        group=_STATUS, name="status_host",
    ),
    port=Option(help="Port of these pages.", group=_STATUS, name="status_port", default=9090),
)  # fmt: skip
_CONTROL = Override(
    "policy temperature softmax saturation controller operating_points index admission lengths "
    "length_model tenant_weights max_queued max_queued_tokens max_inflight max_inflight_tokens "
    "queue_timeout seed"
)


@field_flags(detector="--detector")
def epp(
    picker: EppConfig,
    workers: Annotated[WorkersConfig, _WORKERS],
    pages: Annotated[GatewayConfig, _PAGES],
    watch: WatchConfig,
    control: Annotated[ControlConfig, _CONTROL],
    log: LogConfig,
    replicas: PeersConfig,
) -> None:
    """Pick endpoints for Envoy and other proxies: the Gateway API's inference extension."""
    progress = StageProgress()
    with uncollected():
        from pigou.fleet.registry.registry import open_registry
        from pigou.fleet.supervisor import FleetSetup
        from pigou.integrations.endpoint_pools import open_pool
        from pigou.integrations.epp_server import PickerServing
        from pigou.wire.fleet_secret import FleetSecret

    logs.configure(log.log_format, log.level, access=log.access_log, times=False)
    if not (picker.pool or workers.attach or workers.registry):
        raise ConfigError("there is no endpoint to pick; give --pool, --attach or --registry")
    pool = open_pool(picker.pool) if picker.pool else None
    attached = [AttachedWorker.parse(text, i) for i, text in enumerate(workers.attach)]
    check_all(
        lambda: check_port(picker.listen_host, picker.listen_port),
        lambda: check_port(pages.host, pages.port),
    )
    try:
        secret = FleetSecret.given(workers.fleet_secret_file)
        registry = open_registry(workers.registry, secret) if workers.registry else None
        bus = peer_bus(replicas, secret)
        fleet = FleetSetup(
            workers=attached, watch=watch, secret=secret, registry=registry,
            models=workers.models, tokenizer=workers.tokenizer,
        )  # fmt: skip

        async def main() -> None:
            serving = PickerServing(
                picker, msgspec.structs.replace(pages, strict=False),
                msgspec.structs.replace(control, peer_reads=False), fleet,
                pool, progress.report,
            )  # fmt: skip
            if bus is not None:
                serving.join_peers(bus)
            sources = [picker.pool, *workers.attach, without_user(workers.registry)]
            typer.echo(f"Looking for the servers of {', '.join(filter(None, sources))} ...")

            def ready() -> None:
                progress.close()
                how = "plaintext" if picker.plaintext else "TLS"
                lines = [
                    f"  {row.id:<16} {row.state:<8} {row.role:<8} {row.url}"
                    for row in serving.supervisor.rows()
                ]
                lines.insert(
                    0,
                    f"Pigou picks endpoints at {picker.listen_host}:{serving.epp_port}"
                    f" (ext_proc, {how}), and shows them at http://{pages.host}:{serving.port}/",
                )
                freeze("\n".join([*lines, "Ctrl-C ends it."]))

            with progress:
                await serving.run(ready)
            typer.echo("Stopped.")

        run_async(main())
    except (FleetError, OSError) as error:
        typer.echo(f"pigou epp: {error}", err=True)
        raise typer.Exit(1) from None
