"""`pigou serve`."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pigou import logs
from pigou.cli.named import named
from pigou.cli.options import names, nanoseconds, typed
from pigou.cli.ports import check_port
from pigou.cli.progress import StageProgress
from pigou.config import ConfigError, ControlConfig, IndexConfig, wrong
from pigou.extras import require
from pigou.imports import uncollected
from pigou.logs import LogFormat, LogLevel

if TYPE_CHECKING:
    from pigou.fleet.config import AttachedWorker, LocalWorker, WatchConfig
    from pigou.fleet.serve import Serving
    from pigou.gateway.config import GatewayConfig
    from pigou.wire.fleet_secret import FleetSecret

_LOCAL = (1, 2, 0)


def serve(
    worker_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="After `--`: further options of `pigou worker`, for every worker. Of --disk-path "
            "and --bucket-url each takes a part of its own, named after it."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Folder, Hugging Face hub id, or 'bundled'.")
    ] = "bundled",
    served_model_name: Annotated[
        str, typer.Option(help="Name that requests use; by default the model's own.")
    ] = "",
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers to start.  [default: 1; 0 with --attach]")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Decode workers to start.  [default: 2; 0 with --attach]")
    ] = None,
    both: Annotated[int, typer.Option(help="Workers for both to start.")] = _LOCAL[2],
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; several with commas, given out in turn.")
    ] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, bf16 or fp32.")] = "auto",
    threads: Annotated[
        int, typer.Option(help="Compute threads of each worker; 0 splits the cores.")
    ] = 0,
    kv_transfer: Annotated[
        str, typer.Option(help="How blocks move between workers: auto, shm, tcp or none.")
    ] = "auto",
    timing: Annotated[
        str,
        typer.Option(
            help="The workers sleep in place of computing: as of `pigou worker`, whose "
            "--timing-... options go after `--`."
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="Address of the gateway.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port; 0 takes a free one.")] = 8000,
    attach: Annotated[
        list[str] | None,
        typer.Option(
            help="A running server to use: URL[,role=prefill|decode|both][,events=tcp://..]"
            "[,replay=tcp://..][,topic=T][,key=K][,pin=ID]. Repeat it for more."
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="Folder or hub id of the model's tokenizer; by default where the workers say that "
            "their model is."
        ),
    ] = "",
    policy: Annotated[
        str,
        typer.Option(
            help="Routing policy: NAME[,parameter=value]... (entry points `pigou.routing`)."
        ),
    ] = "least-loaded",
    temperature: Annotated[
        float, typer.Option(help="Of the choice among candidates; 0 takes the cheapest.")
    ] = 0.0,
    softmax: Annotated[
        str, typer.Option(help="raw costs, or min-max: divided by their range, as Dynamo does.")
    ] = "min-max",
    controller: Annotated[
        str,
        typer.Option(
            help="What sets temperature and overlap weight: static, regime, interpolated or "
            "bandit, [,parameter=value]..."
        ),
    ] = "static",
    detector: Annotated[
        str,
        typer.Option(
            help="What tells saturation: cusum, paper, second-difference or config-variance, "
            "[,parameter=value]..."
        ),
    ] = "cusum",
    admission: Annotated[
        str,
        typer.Option(
            help="Who of the waiting goes next: fcfs, priority, edf, shortest, fair or "
            "priority-fair, [,parameter=value]... (entry points `pigou.admission`)."
        ),
    ] = "fcfs",
    tenant_weights: Annotated[
        str, typer.Option(help="Shares of tenants: TENANT=weight[,TENANT=weight]...; else 1.")
    ] = "",
    max_queued: Annotated[
        int, typer.Option(help="Requests that may wait for a worker; more are answered 503.")
    ] = 1024,
    max_queued_tokens: Annotated[
        int, typer.Option(help="The same for the tokens that they ask for; 0 for no limit.")
    ] = 0,
    max_inflight: Annotated[
        int, typer.Option(help="Streams of one decode worker; 0 asks the worker.")
    ] = 0,
    max_request_inflight: Annotated[
        int,
        typer.Option(
            help="Sequences of one request (n, prompts) that run at once; 0 takes as many as at "
            "most double a worker's step."
        ),
    ] = 0,
    max_inflight_tokens: Annotated[
        int, typer.Option(help="Tokens that it is given to hold; 0 takes its KV capacity.")
    ] = 0,
    prefill_ahead: Annotated[
        int,
        typer.Option(
            help="Milliseconds of prompts that a worker is sent ahead; 0: 50 where the order "
            "holds requests back, else no limit."
        ),
    ] = 0,
    queue_timeout: Annotated[
        float, typer.Option(help="Seconds that a request waits before it is answered 503.")
    ] = 60.0,
    peer_reads: Annotated[
        bool,
        typer.Option(
            help="Let workers read a prompt's beginning from another one's cache, where both can "
            "and it is cheaper than computing it or a lower tier."
        ),
    ] = True,
    index_max_blocks: Annotated[
        int, typer.Option(help="Blocks of one worker that the prefix index keeps.")
    ] = 2**20,
    index_max_total: Annotated[
        int, typer.Option(help="Blocks of all workers together that it keeps.")
    ] = 2**22,
    index_ttl: Annotated[
        float,
        typer.Option(help="Seconds that it expects a worker without KV events to keep a prompt."),
    ] = 120.0,
    api_keys_file: Annotated[
        str | None,
        typer.Option(
            help="Hashed API keys (`pigou key TENANT` makes them), in lines, or .yaml with what "
            "each key may do."
        ),
    ] = None,
    fleet_secret_file: Annotated[
        str,
        typer.Option(
            help="File with the secret that workers on other hosts were started with, too; by "
            "default PIGOU_FLEET_SECRET of the environment, or a new one for the local workers."
        ),
    ] = "",
    open_metrics: Annotated[
        bool,
        typer.Option(help="Let scrapers without a key read /metrics, but for what names tenants."),
    ] = False,
    allow_open: Annotated[
        bool, typer.Option(help="Listen beyond loopback although there are no keys.")
    ] = False,
    journal: Annotated[
        str | None,
        typer.Option(help="File to which decisions, and all they depend on, are appended."),
    ] = None,
    release: Annotated[
        str,
        typer.Option(
            help="Name of what is released with the fleet (prompts, policies, applications); "
            "another one voids all that is cached."
        ),
    ] = "",
    max_body: Annotated[int, typer.Option(help="Most bytes of a request's body.")] = 16 * 2**20,
    allow_special_tokens: Annotated[
        bool,
        typer.Option(
            help="Let special tokens that clients type in chats become control tokens, as vLLM "
            "does; by default they stay text."
        ),
    ] = False,
    unknown_fields: Annotated[
        str,
        typer.Option(
            help="Fields of requests that are unknown: warn (log once, name them in a header of "
            "the reply) or refuse. With --attach, stock servers judge fields themselves."
        ),
    ] = "warn",
    max_connections: Annotated[
        int,
        typer.Option(help="Client connections at once; 0 takes what the limit of files allows."),
    ] = 0,
    max_peer_connections: Annotated[
        int, typer.Option(help="The same for one address; 0 for no limit.")
    ] = 0,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may use the gateway, or *. Repeat it for more."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which a gateway on a loopback address may be called besides loopback "
            "ones. Repeat it for more."
        ),
    ] = None,
    hang_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without progress of its engine after which a worker is restarted, by its "
            "own account; 0 for never."
        ),
    ] = 60.0,
    client_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that a client may take nothing of its stream before it is cut off; 0 for "
            "ever."
        ),
    ] = 60.0,
    drain: Annotated[
        float, typer.Option(help="Seconds that requests under way are given at the end.")
    ] = 30.0,
    log_format: Annotated[LogFormat, typer.Option(help="Of the lines on stderr.")] = "text",
    log_level: Annotated[LogLevel, typer.Option(help="Least level of them.")] = "warning",
    access_log: Annotated[
        bool,
        typer.Option(
            help="Log each request once it is answered: status, tenant, tokens, times; never "
            "prompts or keys."
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="As --log-level info, which shows the workers' logs, too."
        ),
    ] = False,
) -> None:
    """Serve a model on a fleet: a gateway, and the workers behind it."""
    try:
        check_port(host, port)
    except ConfigError as error:
        typer.echo(f"pigou serve: {error}", err=True)
        raise typer.Exit(2) from None
    progress = StageProgress()
    with uncollected():
        from pigou.fleet.config import AttachedWorker, FleetError, WatchConfig
        from pigou.fleet.serve import local_workers, threads_each
        from pigou.gateway.config import GatewayConfig
        from pigou.wire.fleet_secret import FleetSecret

    level: LogLevel = "info" if verbose and log_level == "warning" else log_level
    logs.configure(log_format, level, access=access_log, times=False)
    try:
        attached = [AttachedWorker.parse(text, i) for i, text in enumerate(attach or [])]
        counts = (
            _LOCAL[0] * (not attached) if prefill is None else prefill,
            _LOCAL[1] * (not attached and not both) if decode is None else decode,
            both,
        )
        if prefill is None and both:
            counts = (0, *counts[1:])
        if min(counts) < 0 or not (attached or counts[1] + counts[2]):
            raise ConfigError("there is nobody to decode; start --decode or --both workers")
        if sum(counts) and not timing and not _sleeps(worker_arguments or []):
            require("worker", "a worker that computes")
        arguments = ["--model", model, "--dtype", dtype, "--kv-transfer", kv_transfer]
        arguments += ["--threads", str(threads or threads_each(sum(counts)))]
        arguments += ["--served-model-name", served_model_name] if served_model_name else []
        arguments += ["--timing", timing] if timing else []
        arguments += ["--log-format", log_format] if log_format != "text" else []
        arguments += ["--log-level", level] if level == "debug" else []
        arguments += ["--access-log"] if access_log else []
        arguments += ["--unknown-fields", unknown_fields]
        arguments += ["--allow-special-tokens"] if allow_special_tokens else []
        if timing and not sum(counts):
            raise ConfigError(
                f"--timing is {timing!r}, and no worker is started here; leave it out"
            )
        local = local_workers(*counts, [*arguments, *(worker_arguments or [])], device.split(","))
        gateway = GatewayConfig(
            host=host, port=port, max_body=max_body, api_keys_file=api_keys_file,
            allow_open=allow_open, open_metrics=open_metrics, journal=journal,
            release=release, strict=not attached, unknown_fields=unknown_fields,
            allow_special_tokens=allow_special_tokens,
            client_timeout=client_timeout,
            max_connections=max_connections, max_peer_connections=max_peer_connections,
            cors_origins=tuple(cors_origin or ()), allowed_hosts=tuple(allowed_host or ()),
        )  # fmt: skip
        control = _control(
            policy, controller, detector, temperature=temperature, softmax=softmax,
            admission=admission, weights=tenant_weights, max_queued=max_queued,
            max_queued_tokens=max_queued_tokens, max_inflight=max_inflight,
            max_request_inflight=max_request_inflight,
            max_inflight_tokens=max_inflight_tokens, prefill_ahead_ms=prefill_ahead,
            queue_timeout=nanoseconds("--queue-timeout", queue_timeout), peer_reads=peer_reads,
            index={
                "max_blocks": index_max_blocks,
                "max_total": index_max_total,
                "ttl": nanoseconds("--index-ttl", index_ttl),
            },
        )  # fmt: skip
        watch = WatchConfig(hang=hang_timeout, drain=drain)
        secret = FleetSecret.given(fleet_secret_file)
        _run(gateway, control, [*local, *attached], watch, tokenizer, progress, secret)
    except ConfigError as error:
        typer.echo(f"pigou serve: {typed(str(error), _options())}", err=True)
        raise typer.Exit(2) from None
    except (FleetError, OSError) as error:
        typer.echo(f"pigou serve: {error}", err=True)
        raise typer.Exit(1) from None


def _sleeps(arguments: list[str]) -> bool:
    """Whether workers are told to sleep in place of computing."""
    return any(each.startswith(("--timing", "--executor=sleep")) for each in arguments) or (
        ("--executor", "sleep") in itertools.pairwise(arguments)
    )


def _control(
    policy: str, controller: str, detector: str, *, admission: str, weights: str, **rest: object
) -> ControlConfig:
    name, params = named("--policy", policy)
    control, control_params = named("--controller", controller)
    signal, signal_params = named("--detector", detector)
    order, order_params = named("--admission", admission)
    values = {
        "admission": {"order": order, **order_params},
        "tenant_weights": named("--tenant-weights", f"_,{weights}")[1] if weights else {},
        "policy": name,
        "params": params,
        "controller": {"controller": control, **control_params},
        "saturation": {"detector": signal, **signal_params},
        **rest,
    }
    try:
        return msgspec.convert(values, ControlConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(wrong(error, ControlConfig, values)) from error


def _run(
    gateway: GatewayConfig,
    control: ControlConfig,
    workers: list[LocalWorker | AttachedWorker],
    watch: WatchConfig,
    tokenizer: str,
    progress: StageProgress,
    secret: FleetSecret | None,
) -> None:
    from pigou.fleet.serve import Serving

    async def main() -> None:
        serving = Serving(gateway, control, workers, watch, tokenizer, progress.report, secret)
        typer.echo(f"Starting {_roles(workers)} ...")

        def ready() -> None:
            progress.close()
            _ready(_banner(serving, gateway.host))

        with progress:
            await serving.run(ready)
        typer.echo("Stopped.")

    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(main())


def _ready(banner: str) -> None:
    # What lives until the end need not be looked through by each garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
    typer.echo(banner)


def _loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _roles(workers: list[LocalWorker | AttachedWorker]) -> str:
    names = [
        f"{sum(w.role is role for w in workers)} {role.value}"
        for role in dict.fromkeys(w.role for w in workers)
    ]
    return " + ".join(names) + (" worker" if len(workers) == 1 else " workers")


def _banner(serving: Serving, host: str) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{serving.port}"
    ups = list(serving.plane_driver.upstreams.values())
    model = ups[0].engine.model if ups else "MODEL"
    lines = [f"  {row.id:<12} {row.state:<8} {row.url}" for row in serving.supervisor.rows()]
    request = (
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", "max_tokens": 64, '
        '"messages": [{"role": "user", "content": "Good morning! How are you?"}]}\''
    )
    return "\n".join(
        [
            "",
            f"Pigou serves {model} at {url}/v1, and shows the fleet at {url}/",
            *lines,
            "",
            "Try it:",
            request,
            "",
            "Ctrl-C ends it.",
        ]
    )


def _options() -> dict[str, str]:
    """Return the option of each field of the configuration."""
    from pigou.fleet.config import WatchConfig
    from pigou.gateway.config import GatewayConfig

    return {
        **names(
            GatewayConfig, ControlConfig, WatchConfig, hang="hang_timeout",
            prefill_ahead_ms="prefill_ahead",
        ),
        "detector": "--detector", "cors_origins": "--cors-origin",
        "allowed_hosts": "--allowed-host", "fleet_secret_file": "--fleet-secret-file",
        **{f"index.{name}": f"--index-{name.replace('_', '-')}" for name in
           IndexConfig.__struct_fields__},
    }  # fmt: skip
