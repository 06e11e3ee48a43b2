"""`pigou serve`."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pigou import logs
from pigou.background import run_async
from pigou.cli.config_options import field_flags
from pigou.cli.option_values import check_port
from pigou.cli.progress import StageProgress
from pigou.cli.worker import check_workers, split_model
from pigou.config import ConfigError, ControlConfig, check_all
from pigou.control.planner.config import PlannerConfig
from pigou.fleet.config import (
    AttachedWorker,
    FleetError,
    LocalWorker,
    WatchConfig,
    WorkersConfig,
    sleeps,
    threads_each,
)  # fmt: skip
from pigou.fleet.fork_server import ForkServer
from pigou.fleet.peers.bus import PeersConfig
from pigou.gateway.config import GatewayConfig
from pigou.logs import LogConfig
from pigou.registry import uncollected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pigou.fleet.peers.bus import PeerBus
    from pigou.fleet.serve import Serving
    from pigou.wire.fleet_secret import FleetSecret


@field_flags(detector="--detector")
def serve(
    fleet: WorkersConfig,
    gateway: GatewayConfig,
    watch: WatchConfig,
    control: ControlConfig,
    scaling: PlannerConfig,
    log: LogConfig,
    gateways: PeersConfig,
    worker_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]",
            help="The model, as --model, and `pigou worker` options for all workers. Each worker "
            "gets its own part of a --tier's place, named after it.",
        ),
    ] = None,
) -> None:
    """Serve a model on a fleet: a gateway, and the workers behind it."""
    model, typed = split_model(worker_arguments or [])
    if model and (fleet.model != "bundled" or fleet.model_pool):
        raise ConfigError(f"{model!r} is given, and --model or --model-pool; give one of them")
    if model:
        fleet = msgspec.structs.replace(fleet, model=model)
    progress = StageProgress()
    by_cores = 2**16 if fleet.device == "cpu" and fleet.on == "local" else 0  # one each
    max_workers = by_cores if scaling.max_workers is None else scaling.max_workers
    if scaling.plans and max_workers and not fleet.threads:  # the cores are for those that join
        threads = threads_each(max(sum(fleet.counts), max_workers))
        fleet = msgspec.structs.replace(fleet, threads=threads)
    forks = _fork_server(fleet, typed)
    with uncollected():
        from pigou.fleet.costs import make_plane
        from pigou.fleet.registry.registry import open_registry
        from pigou.fleet.serve import Serving, workers_of
        from pigou.fleet.sources.local import WorkerTemplate
        from pigou.fleet.supervisor import FleetSetup
        from pigou.wire.fleet_secret import FleetSecret

    logs.configure(log.log_format, log.level, access=log.access_log, times=False)
    arguments = [*_worker_options(gateway, log), *typed]
    workers = workers_of(fleet, arguments)
    templates = WorkerTemplate.of_models(fleet, arguments)
    gateway = msgspec.structs.replace(
        gateway, strict=not (fleet.attach or fleet.registry), gpu=_gpu(gateway, fleet)
    )
    started = [worker for worker in workers if isinstance(worker, LocalWorker)]
    check_all(
        lambda: check_workers(started if fleet.ray is None else []),
        lambda: make_plane(control, gateway),
        lambda: scaling.objectives,
        lambda: check_port(gateway.host, gateway.port),
    )
    try:
        secret = FleetSecret.given(fleet.fleet_secret_file)
        registry = open_registry(fleet.registry, secret) if fleet.registry else None
        scales = None
        if fleet.on == "kubernetes":
            from pigou.fleet.kubernetes.kubernetes_provider import FleetScales

            scales = FleetScales.of(fleet.registry)
        bus = peer_bus(gateways, secret)

        def make() -> Serving:
            serving = Serving(
                gateway,
                control,
                FleetSetup(
                    workers=workers,
                    watch=watch,
                    secret=secret,
                    templates=templates,
                    registry=registry,
                    scales=scales,
                    models=fleet.models,
                    tokenizer=fleet.tokenizer,
                    prefill_queue=fleet.prefill_queue,
                    forks=forks,
                ),
                scaling,
                progress.report,
            )
            if bus is not None:
                serving.join_peers(bus)
            return serving

        _run(make, workers, progress, gateway.host, fleet.registry)
    except (FleetError, OSError) as error:
        typer.echo(f"pigou serve: {error}", err=True)
        raise typer.Exit(getattr(error, "status", 1)) from None


def _fork_server(fleet: WorkersConfig, typed: Sequence[str]) -> ForkServer | None:
    """Return what forks the workers; it imports torch while the gateway is made."""
    workers = sum(fleet.counts)
    if not workers or fleet.device != "cpu" or fleet.on != "local" or sys.platform != "linux":
        return None
    if fleet.timing or sleeps(typed) or any(word.startswith("--threads") for word in typed):
        return None
    return ForkServer(fleet.threads or threads_each(workers))


def _gpu(gateway: GatewayConfig, fleet: WorkersConfig) -> str:
    """Return which GPUs workers have: as given, or `cpu` where all are started on it."""
    on_cpu = fleet.device == "cpu" and not (fleet.attach or fleet.registry)
    return gateway.gpu or ("cpu" if gateway.prices and on_cpu else "")


def peer_bus(peers: PeersConfig, secret: FleetSecret | None) -> PeerBus | None:
    """Return the bus of the gateways; None without one."""
    if not peers.peers:
        return None
    if secret is None:
        raise ConfigError(
            "peers is given, and no fleet secret, by which gateways know one another: give all of "
            "them the same --fleet-secret-file, or PIGOU_FLEET_SECRET"
        )
    from pigou.fleet.peers.bus import NatsBus

    return NatsBus(peers.address(), peers.subject)


def _worker_options(gateway: GatewayConfig, log: LogConfig) -> list[str]:
    arguments = ["--log-format", log.log_format] if log.log_format != "text" else []
    arguments += ["--log-level", log.level] if log.level == "debug" else []
    arguments += ["--access-log"] if log.access_log else []
    arguments += gateway.tracing.arguments()
    arguments += ["--unknown-fields", gateway.unknown_fields]
    arguments += ["--allow-special-tokens"] if gateway.allow_special_tokens else []
    return arguments


def _run(
    make: Callable[[], Serving], workers: list[LocalWorker | AttachedWorker],
    progress: StageProgress, host: str, registry: str,
) -> None:  # fmt: skip
    async def main() -> None:
        serving = make()
        typer.echo(_beginning(workers, registry))

        def ready() -> None:
            progress.close()
            freeze(_banner(serving, host, registry))

        with progress:
            await serving.run(ready)
        typer.echo("Stopped.")

    run_async(main())


def freeze(banner: str) -> None:
    """Keep what lives until the end from garbage collections, and show the banner."""
    # What lives until the end need not be looked through by each garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
    typer.echo(banner)


def _beginning(workers: Sequence[LocalWorker | AttachedWorker], registry: str) -> str:
    local = [worker for worker in workers if isinstance(worker, LocalWorker)]
    attached = [worker for worker in workers if isinstance(worker, AttachedWorker)]
    parts = [f"starting {_roles(local)}"] if local else []
    parts += [f"attaching {_roles(attached)}"] if attached else []
    parts += [f"looking for workers in {without_user(registry)}"] if registry else []
    text = ", ".join(parts or ["looking for workers"])
    return text[0].upper() + text[1:] + " ..."


def _roles(workers: Sequence[LocalWorker | AttachedWorker]) -> str:
    names = [
        f"{sum(w.role is role for w in workers)} {role.value}"
        for role in dict.fromkeys(w.role for w in workers)
    ]
    return " + ".join(names) + (" worker" if len(workers) == 1 else " workers")


def _banner(serving: Serving, host: str, registry: str = "") -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{serving.port}"
    rows = serving.supervisor.rows()
    ups = list(serving.plane_driver.upstreams.values())
    names = list(serving.supervisor.models) or [ups[0].engine.model for _ in ups[:1]]
    kinds = Counter(row.kind for row in rows)
    lines = [
        f"  {row.id:<12} {row.state:<8} {row.role:<8} {row.kind:<10} {row.url}" for row in rows
    ]
    sources = [", ".join(f"{count} {kind}" for kind, count in kinds.items())] if rows else []
    sources += [f"those of {without_user(registry)}"] if registry else []
    request = (
        [
            "Try it:",
            f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\",
            f'    -d \'{{"model": "{names[0]}", "max_tokens": 64, '
            '"messages": [{"role": "user", "content": "Good morning! How are you?"}]}\'',
        ]
        if names
        else [f"Once a worker is there: curl {url}/v1/models"]
    )
    serves = f"serves {', '.join(names)}" if names and rows else "waits for workers, serves"
    return "\n".join(
        [
            "",
            f"Pigou {serves} at {url}/v1, and shows the fleet at {url}/",
            f"Workers: {'; '.join(sources)}",
            *lines,
            "",
            *request,
            "",
            "Ctrl-C ends it.",
        ]
    )


def without_user(url: str) -> str:
    """Return a URL without user and password."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return scheme + separator + host.rpartition("@")[2] + slash + path
