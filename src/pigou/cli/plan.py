"""`pigou plan`."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pigou.cli.option_values import check_json, write_json
from pigou.cli.progress import WorkProgress
from pigou.config import ConfigError, check_bounds, option
from pigou.sim.setup import TierConfig

if TYPE_CHECKING:
    from pigou.capacity.plan.plan import (
        CapacityPlan,
        PlannedConfiguration,
        PlanRequest,
        StressResult,
    )
    from pigou.capacity.plan.tiers import TierSplit

_MAX_GPUS = 4096
#: Columns of a terminal that the whole table needs; on fewer it is shown as two: by position,
#: first the figures, then what the workers are.
_WIDE = 110
_NARROW = ((0, 1, 5, 6, 7, 9, 10), (0, 2, 3, 4, 8, 11))
#: Heading of options.
_TRIALS = "Trials"


class TrialOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How configurations are simulated."""

    top: Annotated[int, option("Configurations to simulate at length.", _TRIALS)] = 5
    jobs: Annotated[int, option("Parallel simulations; 0 for one per core.", _TRIALS)] = 0
    seed: Annotated[int, option("Seed of lengths, gaps and ties.", _TRIALS)] = 0
    tiers: Annotated[
        tuple[TierConfig, ...],
        option(
            "KV tier of each worker beyond its device, nearest first: NAME=SIZE[,gbps=200]"
            "[,latency_us=20], as host=64GiB. Repeatable.",
            _TRIALS,
            name="tier",
            form="entries",
        ),
    ] = ()

    def __post_init__(self) -> None:
        for name, value, lowest in (
            ("top", self.top, 1),
            ("jobs", self.jobs, 0),
            ("seed", self.seed, 0),
        ):
            check_bounds(name, value, ge=lowest)


def plan(
    trials: TrialOptions,
    workload: Annotated[
        str,
        typer.Option(
            help="mix=0.7:512/128,0.3:4096/256[,rate=5][,prefix=N], poisson:..., or a trace. A mix "
            "without a rate asks for the highest rate that the GPUs hold.",
        ),
    ],
    model: Annotated[str, typer.Option(help="Model name, or path of its config.json.")],
    gpus: Annotated[str, typer.Option(help="GPUs by type: H200:32,H100:64.")],
    slo: Annotated[
        str,
        typer.Option(
            help="Objective (SLO): ttft=500ms,itl=40ms[,percentile=95]; seconds without a unit."
        ),
    ],
    prices: Annotated[
        str, typer.Option(help="Prices in dollars per GPU-hour: H200=4.0,H100=2.5, or default.")
    ] = "",
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Number format of the KV cache to try; by default the model's own and fp8. "
            "Repeatable."
        ),
    ] = None,
    expert_load: Annotated[
        str,
        typer.Option(
            help="Loads of experts, as in `pigou simulate`; expert-parallel workers balance them."
        ),
    ] = "",
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Simulate the chosen fleet also at 1.3 times the load, and at the P99 rate of "
            "100 requests in a row.",
        ),
    ] = False,
    out: Annotated[
        str, typer.Option(help="Folder for fleet.yaml, serve.yaml, planner.yaml, workers.sh, and "
                     "values.yaml of the Helm chart.")
    ] = "",
    json: Annotated[str, typer.Option(help="File to write the figures to.")] = "",
) -> None:  # fmt: skip
    """Choose a fleet: thousands of configurations analysed, the best of them simulated."""
    from pigou.capacity.plan.demand import read_demand
    from pigou.capacity.plan.output import plan_document, write_files
    from pigou.capacity.plan.plan import PlanRequest, make_plan, stress
    from pigou.models.read import architecture
    from pigou.objectives import Slo

    check_json(json)
    counts = read_gpus(gpus)
    request = PlanRequest(
        model=model, gpus=counts, slo=Slo.parse(slo),
        usd_per_hour=gpu_prices(prices, counts),
        kv_dtypes=tuple(kv_dtype) if kv_dtype else ("", "fp8"), top=trials.top,
        seed=trials.seed, tiers=trials.tiers, expert_load=expert_load,
    )  # fmt: skip
    shape = architecture(model)
    for dtype in filter(None, request.kv_dtypes):
        replace(shape, kv_dtype=dtype)  # refuses what is no number format
    with processes(trials.jobs) as pool, WorkProgress() as progress:
        task = progress.add_task("reading the workload", total=None)

        def watch(stage: str, done: int, total: int) -> None:
            progress.update(task, description=stage, completed=done, total=total or None)

        demand = read_demand(workload, trials.seed)
        made = make_plan(request, demand, shape, pool, watch)
    tests = stress(made, request, shape) if check else []
    files = write_files(made, request, Path(out)) if out else []
    document = plan_document(made, request)
    if check:
        document["check"] = [
            {**msgspec.to_builtins(test), "healthy": test.healthy} for test in tests
        ]
    write_json("--json", json, document)
    _show(made, request, tests)
    for file in files:
        typer.echo(f"Written: {file}")
    if not made.meets:
        raise typer.Exit(3)


def read_gpus(text: str) -> dict[str, int]:
    """Read `H200:32,H100:64`."""
    from pigou.models.gpus import gpu as gpu_named

    counts: dict[str, int] = {}
    for item in text.split(","):
        name, _, count = item.strip().partition(":")
        if not count.isdecimal() or not 1 <= int(count) <= _MAX_GPUS:
            raise ConfigError(f"--gpus has {item!r}; write NAME:COUNT, 1 to {_MAX_GPUS}: H200:32")
        name = gpu_named(name).name
        if name in counts:
            raise ConfigError(f"--gpus names {name} twice; give it once")
        counts[name] = int(count)
    return counts


def gpu_prices(text: str, counts: Mapping[str, int]) -> dict[str, float]:
    """Read `default`, or `H200=4.0,H100=2.5`; all GPUs have a price, or none."""
    from pigou.cost.price_list import PriceList, read_prices
    from pigou.models.gpus import gpu as gpu_named

    if text.strip() == "default":
        return {name: PriceList().gpu(name) for name in counts}
    prices = read_prices(text, lambda name: gpu_named(name).name) if text else {}
    for name, usd in prices.items():
        if name not in counts:
            raise ConfigError(f"--prices has {name}, and --gpus has none; leave it out")
        if usd <= 0.0:
            raise ConfigError(f"--prices has {name}={usd:g}; a price is above 0")
    if prices and (missing := set(counts) - set(prices)):
        raise ConfigError(f"--prices has none for {', '.join(sorted(missing))}; give it")
    return prices


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """Yield a pool of processes that share loaded modules; None if one process is enough."""
    from pigou.capacity.plan.trial import warm_up
    from pigou.worker.engine_thread.heartbeat import watch_parent

    def begin() -> None:
        watch_parent()  # else what is killed leaves them behind
        warm_up()

    jobs = jobs or len(os.sched_getaffinity(0))
    if jobs == 1:
        yield None
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), begin) as pool:
        pool.submit(int)  # starts them, so that they warm up during the analysis
        yield pool


def _show(made: CapacityPlan, request: PlanRequest, tests: Sequence[StressResult]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=_WIDE)
    demand, slo = made.demand, request.slo
    rate = f"{demand.rate_rps:.3g} requests/s" if demand.rate_rps else "as many as the GPUs hold"
    console.print(
        f"{demand.mix.isl:.0f} prompt tokens ({demand.mix.hit_rate:.0%} shared), "
        f"{demand.mix.osl:.0f} output tokens, {rate}; {made.configurations:,} configurations "
        f"analysed in {made.analytic_seconds:.1f} s, {made.seconds:.1f} s in all."
    )
    percentile = f"p{slo.percentile:g}"
    names = ("fleet", "GPUs", "tp", "batch", "KV", "req/s", f"TTFT {percentile}",
             f"ITL {percentile}", "tok/s/GPU", "$/M out", "inside", "error")  # fmt: skip
    shown = [range(len(names))] if console.width >= _WIDE else _NARROW
    for columns in shown:
        table = Table(*(names[at] for at in columns))
        for items, style in ((made.pareto, ""), (made.dominated, "dim")):
            for item in items:
                row = _row(item)
                table.add_row(*(row[at] for at in columns), style=style)
        console.print(table)
    best = made.best
    verdict = "keeps the objective" if made.meets else "does not keep the objective"
    console.print(
        f"Recommended: {best.configuration.name}, {_reason(made, request)}; it {verdict} in "
        "simulation. Dim rows are dominated; error is TTFT, ITL and E2E of the analysis against "
        "the simulation."
    )
    duals = ", ".join(
        f"{name.replace('_', ' ')} {figures['share']:+.1%}" for name, figures in made.duals.items()
    )
    console.print(f"Worth in output tokens/s, by the analysis: {duals}.")
    if (use := made.tiers) is not None:
        console.print(
            f"Tiers: {use.recurring_gb:.1f} GB of KV recur; {_placed(use.split)} by the linear "
            f"programme, {_placed(use.greedy)} fastest first. Hits {use.hit_rate:.1%}, "
            f"{use.half_hit_rate:.1%} with half of the tiers."
        )
    for test in tests:
        health = "healthy" if test.healthy else f"not healthy: {test.reason}"
        console.print(
            f"{test.name} ({test.rate_rps:.3g} requests/s): {test.attained:.1%} inside; {health}."
        )


def _placed(split: TierSplit) -> str:
    parts = " + ".join(f"{gb:.1f} {name}" for name, gb in split.gb.items())
    return f"{parts} GB read in {split.seconds:.3g} s"


def _reason(made: CapacityPlan, request: PlanRequest) -> str:
    gpus = ", ".join(f"{count} {name}" for name, count in made.best.configuration.gpus.items())
    rivals = [item for item in (*made.pareto, *made.dominated) if item is not made.best]
    inside = [item for item in rivals if (item.figures.attained or 0.0) >= request.slo.share]
    if not inside:
        return f"on {gpus}, nearest to the objective of those simulated"
    return f"on {gpus}, cheapest for a token of the {len(inside) + 1} that keep the objective"


def _row(item: PlannedConfiguration) -> list[str]:
    made, figures, error = item.configuration, item.figures, item.error
    usd = figures.usd_per_million_output
    return [
        made.name,
        " ".join(f"{count}x{name}" for name, count in made.gpus.items()),
        "/".join(f"{pool.kind.dp}ep" if pool.kind.ep else f"{pool.kind.tp}" for pool in made.pools),
        "/".join(str(batch) for batch in made.batch.values()),
        made.kv_dtype or "model",
        f"{figures.rate_rps:.3g}",
        f"{figures.ttft_s:.3g} s",
        f"{figures.itl_s * 1e3:.3g} ms",
        f"{figures.output_tok_s_per_gpu:.0f}",
        "-" if usd is None else f"{usd:.3f}",
        "-" if figures.attained is None else f"{figures.attained:.1%}",
        "-" if error is None else " ".join(f"{value:+.0%}" for value in error.values()),
    ]
