"""`pigou frontier`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from pigou.cli.config_options import Override
from pigou.cli.option_values import check_json, write_json
from pigou.cli.progress import WorkProgress, wide_console
from pigou.config import ConfigError, ControlConfig, Option, RunError, check_fields, option
from pigou.control.planner.config import RequestClassConfig
from pigou.registry import require
from pigou.sim.fleet_config import ScalingConfig
from pigou.sim.setup import Setup

if TYPE_CHECKING:
    from pigou.capacity.class_tuning import ClassTuning, EvaluatedSettings
    from pigou.capacity.frontier import EvaluatedPoint, Frontier, Watch
    from pigou.objectives import Slo

_SEARCH = "Search"
#: Options of the control plane; those that are searched are given by the operating points.
_CONTROL = Override(
    "policy saturation admission seed",
    policy="Routing policy: NAME[,parameter=value]...; what is given is the point as configured.",
    saturation="Saturation detector, as in `pigou serve`: it says which load is light, and heavy.",
    admission="Order of waiting requests, as in `pigou serve`.",
    seed=Option(help="Seed of arrivals, lengths, ties and candidates.", group=_SEARCH),
)  # fmt: skip


_CLASSES = Override(
    "classes",
    classes=Option(
        help="Class of requests, as in `pigou serve`: chunk, streams of each class and the lane "
        "of long prompts are sought instead, for the worst-off class. Repeatable.",
        group=_SEARCH, name="slo_class", form="entries",
    ),
)  # fmt: skip


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How operating points are sought."""

    candidates: Annotated[
        int, option("Settings in the first round; each further one has half of them.", _SEARCH)
    ] = 32
    requests: Annotated[
        int, option("Requests of a simulation in the last round; each before has half.", _SEARCH)
    ] = 600
    seeds: Annotated[int, option("Simulations of each setting, of different seeds.", _SEARCH)] = 2
    jobs: Annotated[int, option("Parallel simulations; 0 for one per core.", _SEARCH)] = 0

    def __post_init__(self) -> None:
        check_fields(self, "candidates", ge=2)
        check_fields(self, "requests", ge=80)
        check_fields(self, "seeds", ge=1)
        check_fields(self, "jobs", ge=0)


def frontier(
    search: SearchOptions,
    setup: Setup,
    control: Annotated[ControlConfig, _CONTROL],
    scaling: Annotated[ScalingConfig, _CLASSES],
    workload: Annotated[
        str, typer.Option(help="Trace, or made-up requests, as in `pigou simulate`.",
                          rich_help_panel="Load")
    ] = "",
    fleet: Annotated[
        str, typer.Option(help="Fleet: 4xboth, 1p+2d, or a YAML file.", rich_help_panel="Fleet")
    ] = "1xboth",
    slo: Annotated[
        str,
        typer.Option(
            help="Objective that picks the points: ttft=500ms,itl=40ms[,percentile=99]. By "
            "default those of least regret.",
        ),
    ] = "",
    given: Annotated[
        str,
        typer.Option("--from", help="File of an earlier --json: pick again, and simulate nothing."),
    ] = "",
    json: Annotated[
        str,
        typer.Option(
            help="File to write the points to, which `pigou serve --operating-points` takes.",
            rich_help_panel="Results",
        ),
    ] = "",
    picture: Annotated[
        str, typer.Option(help="PNG file to draw the points to.", rich_help_panel="Results")
    ] = "",
) -> None:  # fmt: skip
    """Find settings of router and engines by load: TTFT, ITL and tokens/s that they trade."""
    from pigou.objectives import Slo

    check_json(json)
    check_json(picture, "--picture")
    if picture:
        require("report", "--picture")
    if bool(workload) == bool(given):
        raise ConfigError("--workload and --from: give one of the two")
    if scaling.classes:
        for option, value in (("--from", given), ("--picture", picture), ("--slo", slo)):
            if value:
                raise ConfigError(f"{option} is {value!r}, and --slo-class is given; leave one out")
        tuning = _tune(search, setup, control, scaling.classes, workload, fleet)
        write_json("--json", json, tuning)
        _show_classes(tuning, scaling.classes)
        return
    objective = Slo.parse(slo if "percentile" in slo else f"{slo},percentile=99") if slo else None
    if given:
        result = _read(given).choose(objective)
    else:
        result = _search(search, setup, control, workload, fleet, objective)
    result = msgspec.structs.replace(result, run=result.run | {"slo": slo})
    write_json("--json", json, result)
    if picture:
        _draw(result, picture)
    _show(result)


def _search(
    search: SearchOptions, setup: Setup, control: ControlConfig, workload: str, fleet: str,
    slo: Slo | None,
) -> Frontier:  # fmt: skip
    from pigou.capacity.frontier import FrontierSearch, find_frontier, shortened
    from pigou.cli.plan import processes
    from pigou.cli.simulate import check_link, without_limits
    from pigou.sim.fleet_config import read_fleet
    from pigou.workload.workload_spec import read_workload_spec

    members = read_fleet(fleet)
    check_link(members, setup.model)
    specs = [read_workload_spec(workload, control.seed + i) for i in range(search.seeds)]
    sought = FrontierSearch(
        workloads=[shortened(spec.workload, 1.0, search.requests) for spec in specs],
        fleet=members, setup=setup, control=without_limits(control), client=specs[0].client,
        slo=slo, requests=search.requests, candidates=search.candidates,
    )  # fmt: skip
    with processes(search.jobs) as pool, watching() as watch:
        result = find_frontier(sought, pool, watch)
    policy = ",".join([control.policy, *(f"{k}={v}" for k, v in control.params.items())])
    run = {"workload": workload, "fleet": fleet, "policy": policy, "seed": control.seed,
           "max_seqs": setup.max_seqs, "max_batched_tokens": setup.max_batched_tokens}  # fmt: skip
    return msgspec.structs.replace(result, run=run)


def _tune(
    search: SearchOptions, setup: Setup, control: ControlConfig,
    classes: tuple[RequestClassConfig, ...], workload: str, fleet: str,
) -> ClassTuning:  # fmt: skip
    from pigou.capacity.class_tuning import ClassSearch, halves, tune_classes
    from pigou.cli.plan import processes
    from pigou.cli.simulate import check_link, without_limits
    from pigou.sim.fleet_config import read_fleet
    from pigou.workload.workload_spec import read_workload_spec

    members = read_fleet(fleet)
    check_link(members, setup.model)
    specs = [read_workload_spec(workload, control.seed + i) for i in range(2 * search.seeds)]
    workloads = [spec.workload for spec in specs]
    if all(one == workloads[0] for one in workloads):
        workloads = halves(workloads[0])
        typer.echo("all seeds give the same requests: the first half chooses, the second reports")
    sought = ClassSearch(
        workloads=workloads, classes=classes, fleet=members, setup=setup,
        control=without_limits(control), client=specs[0].client, requests=search.requests,
        candidates=search.candidates,
    )  # fmt: skip
    with processes(search.jobs) as pool, watching() as watch:
        return tune_classes(sought, pool, watch)


@contextmanager
def watching() -> Iterator[Watch]:
    """Show the stages of a search."""
    with WorkProgress() as progress:
        task = progress.add_task("", total=None)

        def watch(stage: str, done: int, total: int) -> None:
            progress.update(task, description=stage, completed=done, total=total)

        yield watch


def _show_classes(tuning: ClassTuning, classes: tuple[RequestClassConfig, ...]) -> None:
    """Print figures by class, and the options to start with."""
    from pigou.capacity.class_tuning import tuned

    console = wide_console()
    table = Table("class", "settings", "TTFT", "ITL", "tok/s", "inside", "chunk", "streams")
    table.add_column("lane", overflow="fold")
    for at, one in enumerate(classes):
        rows: dict[str, EvaluatedSettings] = {
            "as configured": tuning.configured, "chosen": tuning.chosen,
            "configured, reported": tuning.reported[0], "chosen, reported": tuning.reported[1],
            "best for it alone": tuning.best[at],
        }  # fmt: skip
        for name, entry in rows.items():
            figures, settings = entry.figures[at], entry.settings
            table.add_row(
                one.name, name, f"{figures.ttft_s:.3g} s", f"{figures.itl_s * 1e3:.3g} ms",
                f"{figures.output_tok_s:.0f}", f"{figures.attained or 0.0:.1%}",
                str(settings.chunk), str(settings.concurrency[at] or "-"),
                settings.long_lane or "-",
            )  # fmt: skip
        table.add_section()
    console.print(table)
    console.print(f"chosen: {tuning.reason}; reported: for requests that chose nothing. Use:")
    typer.echo(f"  worker: {worker_options(tuning)}")
    for one in tuned(classes, tuning.chosen.settings):
        typer.echo(f"  --slo-class {class_text(one)}")


def worker_options(tuning: ClassTuning) -> str:
    """Return the chosen options of workers."""
    chosen = tuning.chosen.settings
    lane = f" --long-lane {chosen.long_lane}" if chosen.long_lane else ""
    return f"--max-batched-tokens {chosen.chunk}{lane}"


def class_text(config: RequestClassConfig) -> str:
    """Return a class as `--slo-class` reads it."""
    default = RequestClassConfig(name="")
    values = {name: getattr(config, name) for name in config.__struct_fields__[1:]}
    given = [f"{name}={v}" for name, v in values.items() if v != getattr(default, name)]
    return ",".join([config.name, *given])


def _read(file: str) -> Frontier:
    from pigou.capacity.frontier import Frontier
    from pigou.small_file import read_bytes

    try:
        return msgspec.json.decode(read_bytes(file), type=Frontier)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--from is {file!r}, and cannot be read as a file of --json: {error}"
        ) from None


def _show(result: Frontier) -> None:
    console = wide_console()
    percentile = f"p{result.percentile:g}"
    for name, load in result.regimes.items():
        regime = "Below" if name == "light" else "Saturated"
        console.print(
            f"{name}: {load.load:g} times the workload's load, {regime} {load.in_regime:.0%} of "
            f"the time as configured; {len(load.points)} settings"
        )
        table = Table("", f"TTFT {percentile}", f"ITL {percentile}", "tok/s", "inside", "settings")
        for entry in load.points:
            if entry.final:
                table.add_row(*_row(entry, result), style="dim" if entry.dominated else "")
        console.print(table)
        console.print(f"chosen: {_settings(load.chosen, result)}: {load.reason}")
    console.print(
        "Dim rows are dominated; settings that an earlier round left out are in the JSON."
    )


def _row(entry: EvaluatedPoint, result: Frontier) -> list[str]:
    figures = entry.figures
    return [
        "*" if entry.chosen else "",
        f"{figures.ttft_s:.3g} s", f"{figures.itl_s * 1e3:.3g} ms", f"{figures.output_tok_s:.0f}",
        "-" if figures.attained is None else f"{figures.attained:.1%}",
        _settings(entry.point, result),
    ]  # fmt: skip


def _settings(point: object, result: Frontier) -> str:
    """Return what a point sets, in a line."""
    values = msgspec.to_builtins(point)
    params = values.pop("params", {})
    names = {"max_batched_tokens": "chunk", "max_seqs": "streams"}
    parts = [f"{names.get(name, name)} {value:g}" for name, value in {**params, **values}.items()]
    return ", ".join(parts) or f"as configured ({result.run.get('policy', '')})"


def _draw(result: Frontier, file: str) -> None:
    from pathlib import Path

    from pigou.report.figure import Axis, Chart, ChartLine
    from pigou.report.figure_png import png

    lines: list[ChartLine] = []
    for colour, (name, load) in enumerate(result.regimes.items()):
        for group, shade in (("dominated", -1), ("frontier", colour), ("chosen", colour + 4)):
            entries = [e for e in load.points if e.final and _group(e) == group]
            lines.append(ChartLine(
                name=f"{name}, {group}", x=[entry.figures.ttft_s for entry in entries],
                y=[entry.figures.itl_s for entry in entries], colour=shade, bare=True,
            ))  # fmt: skip
    percentile = f"p{result.percentile:g}"
    chart = Chart(
        "frontier", f"TTFT and ITL {percentile} of settings under a light and a heavy load", "",
        Axis("TTFT", "seconds", log=True), Axis("ITL", "seconds", log=True), tuple(lines),
    )  # fmt: skip
    try:
        png(chart, Path(file))
    except OSError as error:
        raise RunError(f"--picture is {file!r}: {error}") from None


def _group(entry: EvaluatedPoint) -> str:
    return "chosen" if entry.chosen else "dominated" if entry.dominated else "frontier"
