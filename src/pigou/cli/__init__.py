"""The command line: `pigou COMMAND`, one file a command.

Importing this package imports none of the commands: only the one that is run is loaded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from pigou import __version__
from pigou.config import ConfigError
from pigou.registry import extra_of, named, remedy

#: Command -> the first line of its help, so that the list of all loads none.
COMMANDS = {
    "serve": "Serve a model on a fleet: a gateway, and the workers behind it.",
    "epp": "Pick endpoints for Envoy and other proxies: the Gateway API's inference extension.",
    "worker": "Run one worker: an OpenAI-compatible server over one model.",
    "store": "Keep KV of other engines: a server with eviction by price, and quotas.",
    "fleet": "List and change the workers of a running gateway.",
    "operator": "Keep the fleets of a Kubernetes cluster as their `PigouFleet` objects specify.",
    "key": "Make an API key, and its hash for `pigou serve --api-keys-file`.",
    "bench": "Load an OpenAI endpoint, and measure its latency and throughput.",
    "simulate": "Simulate a fleet: the production scheduler, router and cache under a virtual clock.",  # noqa: E501
    "sweep": "Measure TTFT of prefill and ITL of decode pools, live or simulated, for planners.",
    "plan": "Choose a fleet: thousands of configurations analysed, the best of them simulated.",
    "frontier": "Find settings of router and engines by load: TTFT, ITL and tokens/s that they trade.",  # noqa: E501
    "vram": "Map a GPU's memory under a model: six terms, the KV of a token, and what a batch needs.",  # noqa: E501
    "experiment": 'Run an experiment of "The Price of Anarchy in Disaggregated Inference" again.',
    "game": "Solve games of the theory: equilibria, optimum, Price of Anarchy.",
    "report": "Compare runs, or draw an experiment: one page with plots.",
    "profile": "Measure the step times of a live, idle worker, for simulations of it.",
    "replay": "Replay a gateway's decisions from its journal, and compare them.",
    "diagnose": "Diagnose a fleet: failure modes, evidence, fixes.",
    "trace": "Find, download, describe, convert and cut recorded traces.",
    "warm": "Compile the kernels now, so that the first start of a fleet loads them.",
    "version": "Print the versions of Pigou, torch and Python.",
}
#: File of a command that is not named after it; "" for an entry point of `pigou.command`.
_FILES = {"operator": "fleet", "experiment": "", "game": ""} | {
    command: file
    for file, commands in (("measure", "bench profile sweep"), ("install", "key warm version"))
    for command in commands.split()
}
#: Commands that hand options they do not know to another, which refuses what it does not know.
PASSING = {"serve"}


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"pigou {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that `argv` names (default: the process's own arguments).

    Raises:
        SystemExit: always; 0 after success, 1 when the command failed, 2 after wrong usage.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        _run(args)
    except BaseException as error:
        if argv is None and threading.active_count() > 1:
            from pigou.stop_signals import end_with_threads

            code = error.code if isinstance(error, SystemExit) else 1
            end_with_threads(code if isinstance(code, int) else int(code is not None))
        raise


def _run(args: Sequence[str]) -> None:
    try:
        _app(args)(args, prog_name="pigou")
    except ModuleNotFoundError as error:
        if (extra := extra_of(error.name or "")) is None:
            raise
        typer.echo(f"pigou {args[0]}: {error.name} is not installed; {remedy(extra)}", err=True)
        raise SystemExit(1) from None
    except ConfigError as error:
        typer.echo(f"pigou {args[0]}: {error}", err=True)
        raise SystemExit(2) from None


def _app(args: Sequence[str]) -> typer.Typer:
    """Return the application with the command that is named, or a list of all commands."""
    if args and args[0] in COMMANDS:
        return build(args[:1])
    app = _application()
    for name, summary in COMMANDS.items():
        app.command(name, help=summary, short_help=summary)(_pigou)
    return app


def build(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """Return the Typer application with these commands, whose modules are imported."""
    from pigou.cli.config_options import GroupedCommand, configured

    app = _application()
    for name in names:
        command = _load(name)
        if isinstance(command, typer.Typer):
            for subcommand in command.registered_commands:
                assert subcommand.callback is not None
                inner = subcommand.name or subcommand.callback.__name__.replace("_", "-")
                subcommand.callback = configured(subcommand.callback, f"{name} {inner}")
                subcommand.cls = GroupedCommand
            app.add_typer(command, name=name)
        else:
            function = configured(command, name)
            settings = {"ignore_unknown_options": name in PASSING}
            app.command(name, cls=GroupedCommand, no_args_is_help=False, context_settings=settings)(
                function
            )
    return app


def _application() -> typer.Typer:
    app = typer.Typer(
        help="LLM serving on disaggregated fleets.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # brackets stay text, and long names are not cut
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 120,
        },
    )
    app.callback()(_root)
    return app


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Show the version, and exit.", callback=_show_version,
                     is_eager=True),
    ] = False,
) -> None:  # fmt: skip
    """LLM serving on disaggregated fleets that puts a price on every externality."""


def _pigou() -> None:
    """Stand for a command in the list of all, which is shown without loading them."""


def _load(name: str) -> Any:
    file = _FILES.get(name, name)
    if not file:
        return named("pigou.command", name, "command")
    return getattr(import_module(f"pigou.cli.{file}"), name)
