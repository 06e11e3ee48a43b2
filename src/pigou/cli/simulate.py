"""`pigou simulate`."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pigou.cli.named import named
from pigou.cli.options import check_json, names, nanoseconds, typed
from pigou.config import ConfigError, ControlConfig, wrong
from pigou.extras import require
from pigou.request import SECOND, Role

if TYPE_CHECKING:
    from pigou.sim.fleet_config import FleetConfig
    from pigou.sim.result import Result
    from pigou.sim.setup import Setup, TierConfig
    from pigou.sim.simulation import Simulation

_LATENCIES = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "client_wait_s")
_FIGURES = ("mean", "p50", "p90", "p95", "p99")


def simulate(
    workload: Annotated[
        str,
        typer.Option(
            help="A trace, or closed:C=128,in=128,out=256,ramp=30,hold=120, or "
            "poisson:rate=5,in=512,out=128,hold=600; see docs/guide/simulate.md."
        ),
    ],
    fleet: Annotated[str, typer.Option(help="4xboth, 1p+2d, or a YAML file.")] = "1xboth",
    model: Annotated[str, typer.Option(help="llama-3.1-8b ..., or a config.json.")] = "",
    gpu: Annotated[str, typer.Option(help="A100, H100, H200, B200, RTX4090 ..., or cpu.")] = "",
    tp: Annotated[int, typer.Option(help="GPUs of each worker.")] = 1,
    timing: Annotated[
        str,
        typer.Option(
            help="roofline, profile:FOLDER, law:340b, law:itl_a=..,itl_b=..,prefill=.., or "
            "FILE.json of `pigou profile`"
        ),
    ] = "roofline",
    policy: Annotated[
        str, typer.Option(help="Routing policy: NAME[,parameter=value]...")
    ] = "least-loaded",
    temperature: Annotated[
        float, typer.Option(help="Of the choice among candidates; 0 takes the cheapest.")
    ] = 0.0,
    controller: Annotated[
        str, typer.Option(help="As of `pigou serve`: NAME[,parameter=value]...")
    ] = "static",
    detector: Annotated[
        str, typer.Option(help="As of `pigou serve`: NAME[,parameter=value]...")
    ] = "cusum",
    admission: Annotated[
        str, typer.Option(help="As of `pigou serve`: NAME[,parameter=value]...")
    ] = "fcfs",
    blocks: Annotated[
        int,
        typer.Option(
            help="KV blocks of a worker; 0 takes the profiled worker's, or computes them."
        ),
    ] = 0,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="A tier of each worker beyond its device, nearest first: "
            "NAME,gib=64[,gbps=200][,latency_us=20][,policy=price]; may be given again."
        ),
    ] = None,
    tier_recall: Annotated[
        bool, typer.Option(help="Bring back what a session needs before it is expected.")
    ] = True,
    max_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 2048,
    max_seqs: Annotated[int, typer.Option(help="Sequences of a step.")] = 256,
    max_model_len: Annotated[
        int, typer.Option(help="Tokens of a sequence; 0 takes the workload's longest.")
    ] = 0,
    peer_reads: Annotated[
        bool | None,
        typer.Option(
            "--peer-reads/--no-peer-reads",
            help="Let workers read a prompt's beginning from another one's cache.  [default: with "
            "--engine pigou; a vLLM lends nothing]",
        ),
    ] = None,
    rehearses: Annotated[
        bool | None,
        typer.Option(
            "--rehearses/--no-rehearses",
            help="Let workers measure their speed before they are ready, and tell it. "
            "[default: with --engine pigou; a vLLM does not]",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Whose ways workers have: vllm (steps decided ahead, no blocks kept back), pigou."
        ),
    ] = "vllm",
    max_inflight: Annotated[
        int, typer.Option(help="Streams that a decode worker is given; 0 for no limit.")
    ] = 0,
    max_inflight_tokens: Annotated[
        int, typer.Option(help="Tokens that it is given to hold; 0 for no limit.")
    ] = 0,
    max_queued: Annotated[
        int, typer.Option(help="Requests that may wait for a worker; 0 for no limit.")
    ] = 0,
    queue_timeout: Annotated[
        float, typer.Option(help="Seconds that a request waits for a worker; 0 for no limit.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of arrivals, lengths, ties, losses, scatter of steps.")
    ] = 0,
    json: Annotated[str, typer.Option(help="File to write the figures to.")] = "",
    report: Annotated[
        str, typer.Option(help="Folder for a page with plots and tables, and pictures.")
    ] = "",
) -> None:
    """Simulate a fleet: the production scheduler, router and cache under a virtual clock."""
    from pigou.sim.fleet_config import read_fleet
    from pigou.sim.simulation import UNLIMITED, Simulation, warm_up
    from pigou.workload.offered import offered

    try:
        check_json(json)
        if report:
            require("report", "--report")
        from pigou.cli.reporter import Reporter

        name, params = named("--policy", policy)
        order, orders = named("--admission", admission)
        steering, steers = named("--controller", controller)
        sensing, senses = named("--detector", detector)
        control = ControlConfig(
            policy=name,
            params=params,
            temperature=temperature,
            admission={"order": order, **orders},
            controller={"controller": steering, **steers},
            saturation={"detector": sensing, **senses},
            max_inflight=max_inflight or UNLIMITED,
            max_inflight_tokens=max_inflight_tokens or UNLIMITED,
            max_queued=max_queued or UNLIMITED,
            queue_timeout=nanoseconds("--queue-timeout", queue_timeout) or UNLIMITED,
            seed=seed,
        )
        values = {
            "model": model, "gpu": gpu, "tp": tp, "timing": timing, "blocks": blocks,
            "max_batched_tokens": max_batched_tokens, "max_seqs": max_seqs,
            "max_model_len": max_model_len, "engine": engine,
            "tiers": [_tier(text) for text in tier or ()], "tier_recall": tier_recall,
            "peer_reads": peer_reads,
            "rehearses": rehearses,
        }  # fmt: skip
        setup = _setup(values)
        what, members = offered(workload, seed), read_fleet(fleet)
        _check_link(members, model)
        simulation = Simulation(what.workload, members, setup, control, what.client, seed=seed)
        reporter = Reporter(report, simulation) if report else None
    except ConfigError as error:
        typer.echo(f"pigou simulate: {_told(str(error))}", err=True)
        raise typer.Exit(2) from None
    except MemoryError as error:
        typer.echo(f"pigou simulate: {error}; give fewer workers, or --blocks", err=True)
        raise typer.Exit(1) from None
    warm_up(members, setup, control)
    result = _run(simulation)
    document = result.document()
    if json:
        text = msgspec.json.format(msgspec.json.encode(document))
        try:
            Path(json).write_bytes(text + b"\n")
        except OSError as error:
            typer.echo(f"pigou simulate: --json is {json!r}: {error}", err=True)
            raise typer.Exit(1) from None
    if reporter is not None:
        run = {"workload": workload, "fleet": fleet, "policy": policy, "seed": seed}
        asked = {"run": run, "workers": setup, "control": control, "client": what.client,
                 "fleet": members}  # fmt: skip
        reporter.write(result, document, f"{policy} on {fleet}", asked)
    _show(document)  # last, so that the files are there whoever reads along, and for how long


def _check_link(fleet: FleetConfig, model: str) -> None:
    """Refuse a bandwidth that says nothing: how much there is to move, a model tells."""
    from pigou.sim.network import LinkConfig

    gbps = fleet.link.gbps
    splits = any(kind.role is Role.PREFILL for kind in fleet.workers)
    if splits and gbps not in (0.0, LinkConfig().gbps) and not model:
        raise ConfigError(
            f"fleet: gbps of link is {gbps}, and no model is given; its KV's size is needed: give "
            "--model, or leave gbps out"
        )


def _setup(values: dict[str, Any]) -> Setup:
    from pigou.sim.setup import Setup

    try:
        return msgspec.convert(values, Setup)
    except msgspec.ValidationError as error:
        raise ConfigError(wrong(error, Setup, values)) from error


def _tier(text: str) -> TierConfig:
    """Read `NAME,key=value,...`; the keys are those of `TierConfig`."""
    from pigou.sim.setup import TierConfig

    name, params = named("--tier", text)
    values = {"name": name, **params}
    try:
        return msgspec.convert(values, TierConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--tier is {text!r}: {wrong(error, TierConfig, values)}") from error


def _told(message: str) -> str:
    """Return a message in the names of the options, unless it is of a fleet's file."""
    return message if message.startswith("fleet: ") else typed(message, _options())


def _run(simulation: Simulation) -> Result:
    from pigou.sim.virtual_clock import EPOCH

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True,
        refresh_per_second=2,
    ) as progress:  # fmt: skip
        total = simulation.client.expected
        task = progress.add_task("", total=total)

        def watch(now: Simulation) -> None:
            client = now.client
            ended = len(client.calls) - client.open
            progress.update(
                task,
                completed=ended,
                description=f"{(now.clock.now - EPOCH) / SECOND:.0f} s, {ended} ended, "
                f"{client.open} in flight",
            )

        gc.freeze()  # what was read stays; the collector need not look at it again
        return simulation.run(watch)


def _show(document: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
    console.print(
        "{offered} offered, {completed} completed, {failed} failed, {unfinished} unfinished\n"
        "{simulated_s:.1f} s simulated in {wall_s:.1f} s, {peak_rss_mb:.0f} MB\n"
        "{throughput_rps:.3f} requests/s, {output_tok_s:.1f} tokens/s, "
        "prefix hits {prefix_hit_ratio:.1%}, {preemptions} preemptions".format_map(document)
    )
    table = Table("seconds", *_FIGURES)
    for name in _LATENCIES:
        found = document[name]
        table.add_row(name.removesuffix("_s"), *(_figure(found[each]) for each in _FIGURES))
    console.print(table)
    parts = {name: _figure(value) for name, value in document["poa"].items()}
    console.print("price of anarchy: " + ", ".join(f"{k} {v}" for k, v in parts.items()))


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.4g}" if value else "0"


def _options() -> dict[str, str]:
    """Return the option of each field of the configuration."""
    from pigou.sim.setup import Setup

    return {
        **names(Setup, ControlConfig, tiers="tier"), "detector": "--detector", "fleet": "--fleet",
    }  # fmt: skip
