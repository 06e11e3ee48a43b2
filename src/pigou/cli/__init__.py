"""The command line: `pigou COMMAND`, one file a command.

Importing this package imports none of the commands: only the one that is run is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import typer

#: Command -> `module:function`, in the order of the help; an application where it has commands.
COMMANDS = {
    "serve": "pigou.cli.serve:serve",
    "worker": "pigou.cli.worker:worker",
    "key": "pigou.cli.key:key",
    "bench": "pigou.cli.bench:bench",
    "simulate": "pigou.cli.simulate:simulate",
    "experiment": "pigou.cli.experiment:experiment",
    "report": "pigou.cli.report:report",
    "profile": "pigou.cli.profile:profile",
    "replay": "pigou.cli.replay:replay",
    "trace": "pigou.cli.trace:trace",
    "version": "pigou.cli.version:version",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that `argv` names (default: the process's own arguments).

    Raises:
        SystemExit: always; 0 after success, 1 when the command failed, 2 after wrong usage.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    named = args[:1] if args and args[0] in COMMANDS else COMMANDS
    build(named)(args, prog_name="pigou")


def build(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """Return the Typer application with these commands, whose modules are imported."""
    app = typer.Typer(
        help="LLM serving on disaggregated fleets.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_pigou)
    for name in names:
        command = _load(COMMANDS[name])
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, no_args_is_help=False)(command)
    return app


def _pigou() -> None:
    """LLM serving on disaggregated fleets that puts a price on every externality."""


def _load(path: str) -> Any:
    module, function = path.split(":")
    return getattr(import_module(module), function)
