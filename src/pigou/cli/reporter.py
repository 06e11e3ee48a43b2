"""Makes the report of a simulation: watches it, and writes the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from pigou.config import ConfigError
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.timeline import Timeline

if TYPE_CHECKING:
    from pigou.sim.result import SimulationResult


class Reporter:
    """Watches a simulation that has not run yet, and reports on it when it has."""

    def __init__(self, folder: str, simulation: Simulation) -> None:
        """Make the folder, and follow the simulation.

        Raises:
            ConfigError: the folder cannot be made.
        """
        from pigou.report.page import ReportError, prepare

        try:
            self._folder: Path = prepare(folder)
        except ReportError as error:
            raise ConfigError(str(error)) from None
        self._timeline = Timeline(simulation)

    def write(
        self,
        result: SimulationResult,
        document: Mapping[str, Any],
        title: str,
        asked: Mapping[str, Any],
    ) -> None:
        """Write the page, its pictures and its data.

        Args:
            result: of the run.
            document: its figures.
            title: of the page.
            asked: everything that was asked for, by group.

        Raises:
            Exit: a file cannot be written; the message was shown.
        """
        from pigou.cli.report import publish
        from pigou.report.page import ReportError
        from pigou.report.record_run import record
        from pigou.report.run_page import page

        config = {name: _plain(msgspec.to_builtins(group)) for name, group in asked.items()}
        found = record(result, self._timeline, document, title, config)
        try:
            publish(page(found), self._folder, found)
        except ReportError as error:
            typer.echo(f"pigou simulate: {error}", err=True)
            raise typer.Exit(1) from None


def _plain(value: Any) -> Any:
    """Return settings as they are read: what has no limit, or no end, says so."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value == UNLIMITED:
        return "no limit"
    return "never" if value == float("inf") else value
