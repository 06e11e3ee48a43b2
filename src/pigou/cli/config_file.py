"""Options from a file (`--config FILE.yaml`) and from the environment (`PIGOU_COMMAND_OPTION`).

The command line goes before the environment, the environment before the file, the file before
the defaults.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from pigou.small_file import read_bytes
from pigou.yaml_file import load_yaml

_OPTION, _HELP = "config", "help_all"
#: Options that `--help` shows of commands with more than twenty; `--help-all` shows the others.
COMMON = {
    "serve": "model prefill decode both device attach registry model_pool host port api_keys_file "
    "journal prices policy admission slo planner max_workers log_level",
    "worker": "model role device dtype threads host port blocks memory block_size max_seqs "
    "max_batched_tokens max_model_len kv_transfer timing log_level fleet_secret_file registry "
    "prefill_queue",
    "bench": "model api_key chat concurrency rate requests duration warmup input output ignore_eos "
    "prefixes prefix_length trace sessions seed timeout slo json",
    "simulate": "workload fleet model gpu tp timing blocks engine tier prefill_queue prices policy "
    "admission seed slo planner gateways json report",
    "sweep": "isl workers utilisation requests concurrency contexts osl model gpu tp timing blocks "
    "max_seqs engine seed out url decode_workers api_key",
}
_MARK = "__configured__"


def configured(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the command with `--config`, and a variable of the environment for each option."""
    if hasattr(function, _MARK):
        return function

    @functools.wraps(function)
    def command(**options: Any) -> Any:
        options.pop(_OPTION)
        options.pop(_HELP, None)
        return function(**options)

    prefix = f"PIGOU_{name}_".upper().replace(" ", "_").replace("-", "_")
    signature = inspect.signature(function, eval_str=True)
    variables = {f"{prefix}CONFIG"}
    options = list[inspect.Parameter]()
    for parameter in signature.parameters.values():
        options.append(_with_variable(parameter, prefix, variables))

    def read(context: typer.Context, file: str) -> str:
        _warn_of_unknown(name, prefix, variables)
        return _read(context, file)

    example = f"{prefix}PORT" if f"{prefix}PORT" in variables else f"{prefix}OPTION"
    file = inspect.Parameter(
        _OPTION, inspect.Parameter.KEYWORD_ONLY, default="",
        annotation=Annotated[str, typer.Option(
            "--config", callback=read, is_eager=True, metavar="FILE.yaml",
            envvar=f"{prefix}CONFIG", show_envvar=False,
            help="YAML file with options by name, as in `port: 8000`. Before it goes the "
            f"environment, as in {example}=..., and before that what is typed.",
        )],
    )  # fmt: skip
    parameters = [*options, file]
    if name in COMMON:
        text = "Show all options, and exit."
        every = typer.Option("--help-all", callback=_show_all, is_eager=True, help=text)
        parameters.append(inspect.Parameter(
            _HELP, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, every]
        ))  # fmt: skip
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    setattr(command, _MARK, True)
    return command


def _with_variable(
    parameter: inspect.Parameter, prefix: str, variables: set[str]
) -> inspect.Parameter:
    """Return an option that the environment sets, too; add its variable. An argument stays."""
    kind, *infos = get_args(parameter.annotation) or (None,)
    given = next((name for name in infos if isinstance(name, OptionInfo)), None)
    if given is None:
        return parameter
    info = copy.copy(given)
    typed = [name[2:] for name in info.param_decls or () if name.startswith("--")]
    names = [option.split("/")[0] for option in typed] or [parameter.name]
    named = [prefix + option.upper().replace("-", "_") for option in names]
    own = [info.envvar] if isinstance(info.envvar, str) else list(info.envvar or ())
    info.envvar = [*named, *(variable for variable in own if variable not in named)]
    info.show_envvar = bool(own)
    variables.update(named)
    return parameter.replace(annotation=Annotated[kind, info])


def _show_all(context: typer.Context, requested: bool) -> None:
    if requested:
        context.meta[_HELP] = True
        typer.echo(context.get_help())
        raise typer.Exit


def shown_in_help(context: typer.Context, option: str) -> bool:
    """True if the help of a command shows this option."""
    name = context.info_name or ""
    common = f"{COMMON.get(name, option)} {_OPTION} {_HELP} help".split()
    return option in common or _HELP in context.meta


def _warn_of_unknown(name: str, prefix: str, known: set[str]) -> None:
    """Tell of variables that look like options of a command, and are none."""
    for variable in sorted(os.environ):
        if variable.startswith(prefix) and variable not in known:
            near = difflib.get_close_matches(variable, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            print(f"pigou {name}: {variable} is set, and names no option{hint}", file=sys.stderr)


def _read(context: typer.Context, file: str) -> str:
    """Take the defaults of the other options from a file."""
    if file:
        values = _load(file)
        context.default_map = {
            _key(context, key, file): _value(key, value, file) for key, value in values.items()
        }
    return file


def _load(file: str) -> Mapping[Any, Any]:
    try:
        values = load_yaml(read_bytes(file))
    except OSError as error:
        raise typer.BadParameter(f"{file!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{file!r} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{file!r} must hold options by name, as in `port: 8000`")
    return values


def _key(context: typer.Context, key: Any, file: str) -> str:
    """Return the parameter that a key of the file names."""
    known = {}
    for parameter in context.command.params:
        if parameter.name in (None, _OPTION, _HELP, "help"):
            continue
        known[parameter.name] = parameter.name
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("--") and not option.startswith("--no-"):
                known[option[2:].replace("-", "_")] = parameter.name
    name = known.get(str(key).replace("-", "_"))
    if name is None:
        near = difflib.get_close_matches(str(key).replace("-", "_"), known, 1)
        hint = f"did you mean {near[0].replace('_', '-')!r}?" if near else "see --help"
        raise typer.BadParameter(f"{file!r} has {key!r}, which is no option; {hint}")
    return str(name)


def _value(key: Any, value: Any, file: str) -> Any:
    """Return a value as if it had been typed, so that it is checked as what is typed."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value):
        return [str(item) for item in value]
    raise typer.BadParameter(
        f"{file!r} has {key}: {value!r}; give a text, a number, true, false, or a list of texts"
    )
