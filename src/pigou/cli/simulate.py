"""`pigou simulate`."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from pigou.cli.config_options import Override, field_flags, read_struct
from pigou.cli.option_values import check_json, write_json
from pigou.cli.progress import WorkProgress, wide_console
from pigou.config import ConfigError, ControlConfig, Option
from pigou.registry import require
from pigou.request import SECOND, Role
from pigou.sim.fleet_config import GatewaysConfig, ScalingConfig
from pigou.sim.setup import Setup

if TYPE_CHECKING:
    from pigou.sim.fleet_config import FleetConfig
    from pigou.sim.result import SimulationResult
    from pigou.sim.simulation import Simulation

_LATENCIES = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "client_wait_s")
_FIGURES = ("mean", "p50", "p90", "p95", "p99")


#: Options of the control plane that differ from those of `pigou serve`: a simulation of the workers
#: alone has no limits unless they are given.
_CONTROL = Override(
    "policy temperature controller operating_points saturation admission max_inflight "
    "max_inflight_tokens max_queued queue_timeout seed",
    policy="Routing policy: NAME[,parameter=value]...",
    controller="Controller of temperature, as in `pigou serve`.",
    saturation="Saturation detector, as in `pigou serve`.",
    admission="Order of waiting requests, as in `pigou serve`.",
    max_inflight="Maximum of streams per decode worker; 0 for no limit.",
    max_inflight_tokens="Maximum of tokens held per decode worker; 0 for no limit.",
    max_queued=Option(
        help="Maximum of requests that wait for a worker; 0 for no limit.",
        group="Admission", default=0,
    ),
    queue_timeout=Option(
        help="Seconds that a request may wait for a worker; 0 for no limit.", group="Admission",
        form="seconds", default=0.0,
    ),
    seed=Option(help="Seed of arrivals, lengths, ties, losses and scatter of steps.", group="Load"),
)  # fmt: skip


@field_flags(detector="--detector", fleet="--fleet")
def simulate(
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Option(
            help="Trace, or closed:C=128,in=128,out=256,ramp=30,hold=120, or "
            "poisson:rate=5,in=512,out=128,hold=600; see docs/guide/simulate.md.",
            rich_help_panel="Load",
        ),
    ],
    setup: Setup,
    control: Annotated[ControlConfig, _CONTROL],
    scaling: ScalingConfig,
    fleet: Annotated[
        str, typer.Option(help="Fleet: 4xboth, 1p+2d, or a YAML file.", rich_help_panel="Fleet")
    ] = "1xboth",
    gateways: Annotated[
        str,
        typer.Option(
            help="Gateways, each with a control plane of its own: COUNT[,lag_s=0.1][,loss=0.01]"
            "[,split=tenant][,exchanges=false].",
            rich_help_panel="Fleet",
        ),
    ] = "1",
    json: Annotated[
        str, typer.Option(help="File to write the figures to.", rich_help_panel="Results")
    ] = "",
    requests: Annotated[
        str,
        typer.Option(
            help="File to write each request to, as JSON lines that --workload reads.",
            rich_help_panel="Results",
        ),
    ] = "",
    report: Annotated[
        str,
        typer.Option(
            help="Folder for a report page with plots and tables.",
            rich_help_panel="Results",
        ),
    ] = "",
) -> None:
    """Simulate a fleet: the production scheduler, router and cache under a virtual clock."""
    from pigou.sim.fleet_config import read_fleet
    from pigou.sim.observed_windows import WindowObserver
    from pigou.sim.simulation import Simulation, warm_up
    from pigou.windows.observations import written
    from pigou.workload.request_log import simulated_rows
    from pigou.workload.trace_formats import write_rows
    from pigou.workload.workload_spec import read_workload_spec

    check_json(json)
    check_json(requests, "--requests")
    if report:
        require("report", "--report")
    from pigou.cli.report import Reporter

    seed = control.seed
    control = without_limits(control)
    try:
        what, members = read_workload_spec(workload, seed), read_fleet(fleet)
        if gateways != "1":
            replicas = read_struct("--gateways", gateways, GatewaysConfig, "count")
            members = msgspec.structs.replace(members, gateways=replicas)
        check_link(members, setup.model)
        simulation = Simulation(
            what.workload, members, setup, control, what.client, seed=seed, scaling=scaling
        )
        reporter = Reporter(report, simulation) if report else None
        observer = WindowObserver(simulation) if json else None
    except ConfigError as error:
        if not str(error).startswith("fleet: "):
            raise  # and told in the names of the options
        typer.echo(f"pigou simulate: {error}", err=True)
        raise typer.Exit(2) from None
    except MemoryError as error:
        typer.echo(f"pigou simulate: {error}; give fewer workers, or --blocks", err=True)
        raise typer.Exit(1) from None
    warm_up(members, setup, control)
    result = _run(simulation)
    document = result.document()
    if observer is not None:
        document["windows"] = written(observer.windows)
        write_json("--json", json, document)
    if requests:
        write_rows(Path(requests), simulated_rows(result, simulation.workload))
    if reporter is not None:
        policy = context.params["policy"]
        run = {"workload": workload, "fleet": fleet, "policy": policy, "seed": seed}
        groups = {"run": run, "workers": setup, "control": control, "client": what.client,
                  "fleet": members}  # fmt: skip
        if scaling != ScalingConfig():
            groups["scaling"] = scaling
        reporter.write(result, document, f"{policy} on {fleet}", groups)
    _show(document)  # last: the files are written even where the pipe is closed


def without_limits(control: ControlConfig) -> ControlConfig:
    """Return a configuration whose limits of 0 are none."""
    from pigou.sim.simulation import LIMITS, UNLIMITED

    limits = {name: getattr(control, name) or UNLIMITED for name in LIMITS}
    return msgspec.structs.replace(control, **limits)


def check_link(fleet: FleetConfig, model: str) -> None:
    """Refuse a bandwidth that says nothing: how much there is to move, a model tells."""
    from pigou.sim.network import LinkConfig

    gbps = fleet.link.gbps
    splits = any(kind.role is Role.PREFILL for kind in fleet.workers)
    if splits and gbps not in (0.0, LinkConfig().gbps) and not model:
        raise ConfigError(
            f"fleet: gbps of link is {gbps}, and no model is given; its KV's size is needed: give "
            "--model, or leave gbps out"
        )


def _run(simulation: Simulation) -> SimulationResult:
    from pigou.sim.virtual_clock import EPOCH

    with WorkProgress() as progress:
        total = simulation.client.expected
        task = progress.add_task("", total=total)

        def watch(now: Simulation) -> None:
            client = now.client
            ended = len(client.runs) - client.open
            progress.update(
                task,
                completed=ended,
                description=f"{(now.clock.now - EPOCH) / SECOND:.0f} s, {ended} ended, "
                f"{client.open} in flight",
            )

        gc.freeze()  # the collector need not scan the workload again
        return simulation.run(watch)


def _show(document: dict[str, Any]) -> None:
    console = wide_console()
    console.print(
        "{offered} offered, {completed} completed, {failed} failed, {unfinished} unfinished\n"
        "{simulated_s:.1f} s simulated in {wall_s:.1f} s, {peak_rss_mb:.0f} MB\n"
        "{throughput_rps:.3f} requests/s, {output_tok_s:.1f} tokens/s, "
        "prefix hits {prefix_hit_ratio:.1%}, {preemptions} preemptions".format_map(document)
    )
    table = Table("seconds", *_FIGURES)
    for name in _LATENCIES:
        figures = document[name]
        table.add_row(name.removesuffix("_s"), *(_figure(figures[figure]) for figure in _FIGURES))
    console.print(table)
    intervals = document["poa"]["interval"] or {}
    parts = {
        name: _figure(value) + _interval(intervals.get(name))
        for name, value in document["poa"].items() if name != "interval"
    }  # fmt: skip
    if len(tiers := document["tier_hits"]) > 1:
        shares = ", ".join(f"{level} {hits['share']:.1%}" for level, hits in tiers.items())
        console.print(f"prefix hits by tier: {shares}")
    if "slo" in document:
        console.print("inside the objective: {attained:.1%} of offered".format_map(document["slo"]))
    if "planner" in document:
        console.print(
            "planner {name}: {gpu_hours:.2f} GPU-hours, {moves} moves, {reversals} reversals, "
            "settled in {settle_s:.0f} s, {peak_workers} workers at most".format_map(
                document["planner"]
            )
        )
    if "gateways" in document:
        console.print(
            "{count} gateways, {lag_s:g} s of lag: {requests} requests, {messages} messages, "
            "{gaps} gaps, {snapshots} snapshots".format_map(document["gateways"])
        )
    if "cost" in document:
        console.print(_cost(document["cost"], document["energy"]))
    console.print("price of anarchy: " + ", ".join(f"{k} {v}" for k, v in parts.items()))


def _cost(cost: dict[str, Any], energy: dict[str, Any]) -> str:
    prices = cost["usd_per_million"]
    parts = ", ".join(
        f"{name.replace('_', ' ')} {_figure(prices[name])}"
        for name in ("uncached_input", "cached_input", "output")
    )
    at_slo = prices["all_per_output_at_slo"]
    whole = "all_per_output" if at_slo is None else "all_per_output_at_slo"
    return (
        f"cost: ${_figure(cost['usd'])}, {cost['utilisation']:.1%} in use; dollars a million "
        f"tokens: {parts}; all, an output token {'served' if at_slo is None else 'at the SLO'}: "
        f"{_figure(prices[whole])}\n"
        f"energy: {energy['joules'] / 1e3:.4g} kJ, {energy['mean_watts']:.0f} W, "
        f"{_figure(energy['joules_per_output_token'])} J an output token"
    )


def _interval(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f" ({bounds[0]:.4g} to {bounds[1]:.4g})"


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.4g}" if value else "0"
