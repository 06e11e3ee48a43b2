"""`pigou diagnose`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer
from rich.console import Console

from pigou.cli.option_values import check_json, write_json
from pigou.config import ConfigError
from pigou.small_file import read_bytes
from pigou.wire.errors import DECODING_ERRORS

#: Bytes of a file of windows.
_MAX_WINDOWS = 1 << 30

if TYPE_CHECKING:
    from pigou.diagnosis.mode import Diagnosis, ModeEvidence, ModeFinding
    from pigou.diagnosis.prefix_lint import PrefixReport
    from pigou.windows.observations import FleetObservation


def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            help="URL of a gateway or a worker, or a file of `pigou simulate --json`.",
            show_default=False,
        ),
    ] = "",
    journal: Annotated[
        str, typer.Option(help="Journal of `pigou serve --journal`, instead of TARGET.")
    ] = "",
    prefixes: Annotated[
        str,
        typer.Option(
            help="Trace or journal whose prompts' prefixes are compared, instead of TARGET."
        ),
    ] = "",
    seconds: Annotated[
        float | None,
        typer.Option(
            "--duration",
            "--seconds",
            show_default=False,
            help="Seconds to watch a URL. (default: 60)",
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            "--api-key", "--key", help="Administrator's API key, if the gateway has keys."
        ),
    ] = "",
    json: Annotated[str, typer.Option(help="File to write the findings to.")] = "",
) -> None:
    """Diagnose a fleet: failure modes, evidence, fixes.

    Exits with 0 if nothing is wrong, with 1 if something is, with 2 if it cannot tell.
    """
    check_json(json)
    if sum(map(bool, (target, journal, prefixes))) != 1:
        raise ConfigError("give one of a URL or a file, --journal FILE, and --prefixes FILE")
    if (key or seconds is not None) and not _is_url(target):
        option = "--api-key" if key else "--duration"
        raise ConfigError(f"{option} is for a URL, and a file is given; leave it out")
    if prefixes:
        _lint(prefixes, json)
    series = _windows(target, journal, 60.0 if seconds is None else seconds, key)
    from pigou.diagnosis.diagnose import diagnose as diagnose_windows
    from pigou.windows.observations import written

    diagnosis = diagnose_windows(series)
    document = msgspec.to_builtins(diagnosis) | {"observations": written(series)}
    write_json("--json", json, document)
    _show(diagnosis)
    raise typer.Exit(0 if diagnosis.healthy else 1)


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _windows(target: str, journal: str, seconds: float, key: str) -> tuple[FleetObservation, ...]:
    if journal:
        from pigou.windows.journal import journal_windows
        from pigou.workload.journal_file import entries

        return journal_windows(entries(journal, _tell_cut), journal)
    if _is_url(target):
        from pigou.workload.fleet_scraper import scraped_windows

        return asyncio.run(scraped_windows(target, key, seconds))
    from pigou.windows.observations import read_observations

    try:
        document = msgspec.json.decode(read_bytes(target, _MAX_WINDOWS))
    except OSError as error:
        raise ConfigError(
            f"{target!r} is no URL (http://HOST:8000), and cannot be read: {error.strerror}"
        ) from None
    except DECODING_ERRORS as error:
        raise ConfigError(f"{target} is no JSON: {error}; give what --json wrote") from None
    windows = None
    if isinstance(document, dict):
        windows = document.get("windows")
        windows = document.get("observations") if not isinstance(windows, list) else windows
    if windows is None:
        raise ConfigError(
            f"{target} has no `windows`; write it by `pigou simulate --json`, or `pigou diagnose "
            "--json`"
        )
    return read_observations(windows, target)


def _tell_cut(number: int) -> None:
    typer.echo(f"Line {number} was cut off, its gateway was killed; it is left out.", err=True)


def _show(diagnosis: Diagnosis) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{diagnosis.windows} windows, {diagnosis.seconds:.0f} s")
    if diagnosis.healthy:
        console.print("Nothing is wrong, as far as it was judged.")
    for finding in diagnosis.findings:
        _show_finding(console, finding)
    if diagnosis.not_judged:
        console.print("\nnot judged, for want of:")
        for name, missing in diagnosis.not_judged.items():
            console.print(f"  {name}: {missing}")


def _show_finding(console: Console, finding: ModeFinding) -> None:
    follows = f", follows from {finding.follows_from}" if finding.follows_from else ""
    console.print(
        f"\n{finding.number} {finding.mode} ({finding.confidence} confidence, "
        f"{finding.from_s:.0f} to {finding.to_s:.0f} s{follows})"
    )
    for row in finding.evidence:
        console.print(f"  {_figure(row)}")
    if not finding.follows_from:
        console.print(f"  fix:    {finding.smallest_fix}")
        if finding.remedy:
            console.print(f"  remedy: {finding.remedy}")


def _figure(row: ModeEvidence) -> str:
    where = f"{row.where}: " if row.where else ""
    limit = "" if row.limit is None else f" (limit {row.limit:.4g})"
    return f"{where}{row.name} {row.value:.4g} {row.unit}".rstrip() + limit


def _lint(path: str, json: str) -> NoReturn:
    """Compare the prompts of a trace or a journal; ends with 1 where something would be saved."""
    from pigou.workload.prompt_contents import lint_trace

    report = lint_trace(path)
    write_json("--json", json, msgspec.to_builtins(report))
    _show_prefixes(report)
    raise typer.Exit(1 if report.groups else 0)


def _show_prefixes(report: PrefixReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{report.prompts} prompts, {report.tokens:.0f} tokens; the prefix cache can have "
        f"{report.shared:.1%} of them, and with the volatile text behind {report.possible:.1%}"
    )
    if not report.groups:
        console.print("Nothing that recurs stands behind volatile text.")
    for group in report.groups:
        console.print(
            f"\n{group.prompts} prompts diverge at block {group.block} (token {group.token}); "
            + ("what recurs behind it, block ids do not say" if group.recurring is None else
               f"{group.recurring:.0%} of the tokens behind it recur")
        )  # fmt: skip
        if group.text:
            console.print(f"  text there: {group.text!r}")
        if group.recurring is not None:
            console.print(f"  moved behind, {group.saved_tokens:.0f} tokens a prompt would be hits")
