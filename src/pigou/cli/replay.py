"""`pigou replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
import typer

from pigou import __version__
from pigou.cli.config_options import Override
from pigou.cli.option_values import check_json, named
from pigou.cli.progress import WorkProgress
from pigou.config import ConfigError, ControlConfig, check_bounds
from pigou.gateway.config import GatewayConfig

if TYPE_CHECKING:
    from pigou.control.plane import ControlPlane
    from pigou.cost.cost_meter import CostMeter
    from pigou.cost.fleet_bill import FleetBill
    from pigou.workload.counterfactual import Rival
    from pigou.workload.journal_replay import Difference, JournalReplay


_COSTS = Override(
    "prices gpu priced_model",
    prices="Prices to bill by, as in `pigou serve`; needs --gpu.",
    gpu="GPUs of a worker, as in `pigou serve`.",
    priced_model="Model, as in `pigou serve`.",
)


def replay(
    journal: Annotated[str, typer.Argument(help="File that `pigou serve --journal` wrote.")],
    policy: Annotated[
        str,
        typer.Option(help="Rival policy, asked what it would choose: NAME[,parameter=value]..."),
    ] = "",
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature of the rival policy. (default: the journal's)"),
    ] = None,
    softmax: Annotated[
        str,
        typer.Option(help="Softmax of the rival policy: raw or min-max. (default: the journal's)"),
    ] = "",
    seed: Annotated[
        int | None, typer.Option(help="Seed of the rival policy's ties. (default: the journal's)")
    ] = None,
    *,
    costs: Annotated[GatewayConfig, _COSTS],
    json: Annotated[str, typer.Option(help="File to write the figures to.")] = "",
) -> None:
    """Replay a gateway's decisions from its journal, and compare them.

    Exits with 0 if all are equal, with 1 at the first difference.
    """
    check_json(json)
    other = _rival(policy, temperature, softmax, seed)
    meters = _Meters(costs)
    result = _run(journal, other, meters)
    try:
        if json:
            document = _document(result) | meters.document()
            text = msgspec.json.format(msgspec.json.encode(document))
            Path(json).write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(str(error)) from None
    _tell(journal, result, policy)
    meters.show()
    raise typer.Exit(1 if result.difference else 0)


def _rival(policy: str, temperature: float | None, softmax: str, seed: int | None) -> Rival | None:
    from pigou.workload.counterfactual import Rival

    if not policy and temperature is None and not softmax and seed is None:
        return None
    if softmax not in ("", "raw", "min-max"):
        raise ConfigError(f"--softmax is {softmax!r}; it must be raw or min-max")
    for name, value in (("--temperature", temperature), ("--seed", seed)):
        if value is not None:
            check_bounds(name, value, ge=0)
    chosen, params = named("--policy", policy) if policy else (None, {})
    form = cast(Literal["raw", "min-max"], softmax) if softmax else None
    return Rival(chosen, params, temperature, form, seed)


class _Meters:
    """Bills of a journal's runs, where there are prices."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._meters: list[CostMeter] = []
        self.make_plane(ControlConfig())  # refuses what is not understood
        self._meters.clear()

    def make_plane(self, control: ControlConfig) -> ControlPlane:
        """Return the plane of a run."""
        from pigou.cost.cost_meter import MeteredControlPlane
        from pigou.fleet.costs import make_plane

        plane = make_plane(control, self._config)
        if isinstance(plane, MeteredControlPlane):
            self._meters.append(plane.cost_meter)
        return plane

    def bill(self) -> FleetBill | None:
        """Return the sum of the bills; None without prices."""
        from pigou.cost.fleet_bill import sum_bills

        if not self._meters:
            return None
        return sum_bills([meter.bill(meter.now_ns) for meter in self._meters])

    def document(self) -> dict[str, Any]:
        """Return the bill for JSON; empty without prices."""
        bill = self.bill()
        return {} if bill is None else {"cost": bill.document(), "energy": bill.energy_document()}

    def show(self) -> None:
        """Print a line for each tenant."""
        bill = self.bill()
        if bill is None:
            return
        whole = bill.total
        typer.echo(f"The fleet cost ${bill.usd:.4f}, {bill.utilisation:.1%} in use.")
        for (tenant,), usage in sorted(bill.by("tenant").items()):
            usd, joules = bill.allocation(usage, whole)
            typer.echo(
                f"  {tenant or '-'}: ${usd:.4f} (used ${usage.usd:.4f}), {joules / 1e3:.4g} kJ, "
                f"{usage.output_tokens} output tokens"
            )


def _run(journal: str, other: Rival | None, meters: _Meters) -> JournalReplay:
    from pigou.workload.journal_file import lines
    from pigou.workload.journal_replay import replay_journal

    with WorkProgress() as progress:
        task = progress.add_task(journal)
        return replay_journal(
            lines(journal),
            other,
            lambda so_far: progress.update(task, description=f"{so_far.entries} entries"),
            meters.make_plane,
        )


def _tell(journal: str, result: JournalReplay, policy: str) -> None:
    for number in result.cut:
        typer.echo(f"Line {number} was cut off, its gateway was killed; it is left out.")
    if result.versions - {__version__}:
        written = ", ".join(sorted(result.versions))
        typer.echo(f"Written by version {written}, read by {__version__}.")
    if result.difference is not None:
        typer.echo(_difference(journal, result.difference))
        return
    speed = result.seconds / result.took if result.took else 0.0
    windows = f" and {result.windows} windows of a planner" if result.windows else ""
    runs = f" in {result.runs} runs" if result.runs > 1 else ""
    typer.echo(
        f"The same decisions: {result.decisions} of {result.decisions}, for {result.requests} "
        f"requests{windows} and {result.entries} entries{runs}.\n"
        f"{result.seconds:.1f} s of journal in {result.took:.2f} s: {speed:.0f} times as fast, "
        f"{result.entries / max(result.took, 1e-9):.0f} entries/s."
    )
    compared = result.comparison
    if compared is not None and compared.choices:
        share = compared.other / compared.choices
        mean = compared.seconds / compared.choices
        typer.echo(
            f"{policy or 'The same policy, set otherwise,'} would have chosen otherwise "
            f"{compared.other} times of {compared.choices} ({share:.1%}), {compared.moved} times "
            f"with the prompt computed remotely for locally or the other way round.\n"
            f"Its choices cost {mean * 1e3:+.3f} ms each on average, by the toll's prices at "
            "the time."
        )
    elif compared is not None:
        typer.echo("There is no choice to compare.")


def _difference(journal: str, difference: Difference) -> str:
    from pigou.control.journal import encode

    def show(value: Any) -> str:
        return msgspec.json.encode(value).decode()

    call = msgspec.structs.replace(difference.entry, out=[], error="")
    return (
        f"Another decision at line {difference.line} of {journal}:\n"
        f"  told:     {encode(call).decode().rstrip()}\n"
        f"  recorded: {show(difference.recorded)}\n"
        f"  now:      {show(difference.now)}"
    )


def _document(result: JournalReplay) -> dict[str, Any]:
    same = result.difference is None
    document: dict[str, Any] = {
        "same": same, "runs": result.runs, "versions": sorted(result.versions),
        "entries": result.entries, "requests": result.requests, "decisions": result.decisions,
        "planner_windows": result.windows,
        "seconds": result.seconds, "took_s": result.took, "cut_lines": result.cut,
    }  # fmt: skip
    if result.difference is not None:
        names = ("line", "recorded", "now")
        document["difference"] = {name: getattr(result.difference, name) for name in names}
    if result.comparison is not None:
        counts = ("choices", "other", "moved", "seconds")
        document["comparison"] = {name: getattr(result.comparison, name) for name in counts}
    return document
