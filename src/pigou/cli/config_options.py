"""Options of a command, made from its configuration classes.

A field that is annotated with `pigou.config.option` is an option of every command that
takes its class. The field gives name, type, default, help and group; the file of `--config` and
the variable `PIGOU_COMMAND_OPTION` follow from the name.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from pigou import registry
from pigou.cli.option_values import (
    named,
    nanoseconds,
    number_or_text,
    numbers,
    read_part,
    sizes,
)
from pigou.config import OTHER_OPTIONS, ConfigError, Option, RunError, check_all, option_of, wrong
from pigou.kv.tier_config import TierOption, format_size, parse_size, split_tier
from pigou.request import SECOND
from pigou.small_file import load_yaml, read_bytes

_OPTION, _HELP = "config", "help_all"
#: Options that `--help` shows of commands with more than twenty; `--help-all` shows the others.
COMMON = {
    "serve": "model prefill decode both device attach registry model_pool host port api_keys_file "
    "journal prices policy admission slo planner max_workers log_level",
    "epp": "pool host port tls_cert tls_key plaintext fallbacks objectives isolate_tenants attach "
    "registry status_host status_port policy admission max_queued peers",
    "worker": "model role device dtype threads host port blocks memory block_size max_seqs "
    "max_batched_tokens max_model_len kv_transfer tier timing log_level fleet_secret_file registry "
    "prefill_queue",
    "bench": "model api_key chat concurrency rate count duration warmup input output ignore_eos "
    "prefixes prefix_length trace sessions seed timeout slo json requests",
    "simulate": "workload fleet model gpu tp timing blocks engine tier prefill_queue prices policy "
    "admission seed slo planner gateways json requests report",
    "frontier": "workload fleet model gpu tp timing blocks engine policy seed slo slo_class given "
    "candidates requests seeds jobs json picture",
    "sweep": "isl workers utilisation requests concurrency contexts osl model gpu tp timing blocks "
    "max_seqs engine seed out url decode_workers api_key",
    "vram": "model gpu tp data_parallel_size enable_expert_parallel num_redundant_experts kv_dtype "
    "block_size adapters adapter_rank adapter_targets max_seqs max_batched_tokens sequences "
    "memory_gib utilization runtime_gib margin worker json",
}
_MARK, _FLAGS = "__configured__", "__field_flags__"
_TIERS = "give --tier, as host=8GiB, disk=100GiB@/DIR or bucket=1TiB@s3://BUCKET/PREFIX"
#: Replacements of removed options, by parameter.
REPLACED = dict.fromkeys(
    ("host_cache", "disk_cache", "disk_path", "bucket_cache", "bucket_url"), _TIERS
) | {
    "bucket_endpoint": "give --tier bucket=SIZE@s3://BUCKET/PREFIX?endpoint=URL",
    "bucket_region": "give --tier bucket=SIZE@s3://BUCKET/PREFIX?region=NAME",
    "tier_policy": "give --tier NAME=SIZE,policy=NAME",
    "gateway_lag": "give --gateways COUNT,lag_s=SECONDS",
    "gateway_loss": "give --gateways COUNT,loss=SHARE",
    "gateway_split": "give --gateways COUNT,split=tenant",
    "gateway_exchange": "leave it out, or turn it off by --gateways COUNT,exchanges=false",
    "no_gateway_exchange": "give --gateways COUNT,exchanges=false",
}
Struct = TypeVar("Struct", bound=msgspec.Struct)
_HEAD = re.compile(r"([\w.]+)(?=:? (?:is|of) | ')")


def configured(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the command with `--config`, and a variable of the environment for each option.

    A ConfigError ends it with status 2, a RunError with status 1.
    """
    if hasattr(function, _MARK):
        return function

    configs = CommandConfigs(function)

    @functools.wraps(function)
    def command(**typed: Any) -> Any:
        try:
            return configs.call(typed)
        except (ConfigError, RunError) as error:
            for line in str(error).splitlines():
                typer.echo(f"pigou {name}: {line}", err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None

    prefix = f"PIGOU_{name}_".upper().replace(" ", "_").replace("-", "_")
    variables = {f"{prefix}CONFIG"}
    options = [_with_variable(entry, prefix, variables) for entry in configs.parameters]

    def read(context: typer.Context, file: str) -> str:
        _warn_of_unknown(name, prefix, variables)
        return _read(context, file)

    example = f"{prefix}PORT" if f"{prefix}PORT" in variables else f"{prefix}OPTION"
    file = inspect.Parameter(
        _OPTION, inspect.Parameter.KEYWORD_ONLY, default="",
        annotation=Annotated[str, typer.Option(
            "--config", callback=read, is_eager=True, metavar="FILE.yaml",
            envvar=f"{prefix}CONFIG", show_envvar=False,
            help="YAML file with options by name, as in `port: 8000`. The environment, as in "
            f"{example}=..., and then the command line override it.",
        )],
    )  # fmt: skip
    parameters = [*options, file]
    if name in COMMON:
        text = "Show all options and exit."
        every = typer.Option("--help-all", callback=_show_all, is_eager=True, help=text)
        parameters.append(inspect.Parameter(
            _HELP, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, every]
        ))  # fmt: skip
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
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
    """Warn of environment variables that look like options of a command but are not."""
    for variable in sorted(os.environ):
        if variable.startswith(prefix) and variable not in known:
            near = difflib.get_close_matches(variable, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if replaced := REPLACED.get(variable.removeprefix(prefix).lower()):
                hint = f" any more; {replaced}"
            print(f"pigou {name}: {variable} is set, and names no option{hint}", file=sys.stderr)


def _read(context: typer.Context, file: str) -> str:
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
        if replaced := REPLACED.get(str(key).replace("-", "_")):
            raise typer.BadParameter(f"{file!r} has {key!r}, no option any more; {replaced}")
        near = difflib.get_close_matches(str(key).replace("-", "_"), known, 1)
        hint = f"did you mean {near[0].replace('_', '-')!r}?" if near else "see --help"
        raise typer.BadParameter(f"{file!r} has {key!r}, which is no option; {hint}")
    return str(name)


def _value(key: Any, value: Any, file: str) -> Any:
    """Return a file's value in command-line form, so that it is checked the same way."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value):
        return [str(item) for item in value]
    raise typer.BadParameter(
        f"{file!r} has {key}: {value!r}; give a text, a number, true, false, or a list of texts"
    )


class Override:
    """What one command says of the options of a configuration class that others take, too."""

    def __init__(self, only: str = "", **options: Option | str) -> None:
        """Choose the options of some fields (`only`, separated by blanks), and replace some.

        A text replaces the help alone.
        """
        self.fields = set(only.split())
        self.options = options

    def option_of(self, field: str, own: Option | None) -> Option | None:
        """Return the option of a field, which has an option of its `own`, or none."""
        given = self.options.get(field, own)
        if not isinstance(given, str):
            return given
        assert own is not None, f"{field} has no option, whose help would be replaced"
        return replace(own, help=given)


@dataclass(frozen=True)
class ConfigOption:
    """An option, and the field that its value goes to."""

    path: tuple[str, ...]  # field names from the config down
    kind: Any  # the field's type
    default: Any  # the field's default; `NODEFAULT` if it must be given
    option: Option  # how it is shown and written

    @property
    def name(self) -> str:
        """Parameter of the command, and key in its file."""
        return self.option.name or "_".join(self.path)

    @property
    def flag(self) -> str:
        """As it is typed, for messages."""
        return "--" + self.name.replace("_", "-")

    def parameter(self) -> inspect.Parameter:
        """Return the parameter that the parser is made from."""
        option = self.option
        info: Any
        if option.argument:
            info = typer.Argument(help=option.help)
        else:
            info = typer.Option(
                *option.flags, help=option.help, rich_help_panel=option.group,
                envvar=list(option.variables) or None, show_default=option.show_default,
            )  # fmt: skip
        default = self._typed_default()
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[self._typed(), info],
            default=inspect.Parameter.empty if default is msgspec.NODEFAULT else default,
        )  # fmt: skip

    @property
    def repeatable(self) -> bool:
        """Whether it may be given several times."""
        return self.option.form in ("numbers", "sizes", "entries") or get_origin(self.kind) is tuple

    def _typed(self) -> Any:
        if self.repeatable:
            return list[str] | None
        if self.option.form in ("size", "named", "weights", "file"):
            return str
        if self.option.form == "rate":
            return str | None
        if self.option.form == "seconds":
            return float
        if get_origin(self.kind) is Literal and not self.option.choices:
            return str
        return self.kind

    def _typed_default(self) -> Any:
        option, default = self.option, self.default
        if option.default is not msgspec.NODEFAULT:
            return option.default
        if self.repeatable:
            return None
        match option.form:
            case "size":
                default = format_size(default)
            case "seconds":
                default = default / SECOND
            case "weights" | "file":
                default = ""
            case "named" if option.key:
                default = default[option.key]
        return default

    def put(self, values: dict[str, Any], typed: Any) -> None:
        """Parse the typed value, and add it to `values`."""
        for part in self.path[:-1]:
            values = values.setdefault(part, {})
        name, form, flag = self.path[-1], self.option.form, self.flag
        if form == "size":
            values[name] = parse_size(typed)
        elif form == "seconds":
            values[name] = nanoseconds(flag, typed)
        elif form == "rate":
            values[name] = typed if typed is None else number_or_text(typed)
        elif form in ("numbers", "sizes"):
            values[name] = (numbers if form == "numbers" else sizes)(flag, typed or [])
        elif form in ("weights", "file"):
            values[name] = self._mapping(typed) if typed else {}
        elif form == "named":
            chosen, params = named(flag, typed)
            if self.option.key:
                values[name] = {self.option.key: chosen, **params}
            else:
                values[name], values[self.option.params] = chosen, params
        elif form == "entries":
            kind = get_args(self.kind)[0]
            values[name] = [read_struct(flag, text, kind) for text in typed or ()]
        elif get_origin(self.kind) is tuple:
            values[name] = typed or (() if self.default is msgspec.NODEFAULT else self.default)
        else:
            values[name] = typed

    def _mapping(self, typed: str) -> dict[str, object]:
        if self.option.form == "file":
            return read_part(self.flag, typed, self.option.key)
        return named(self.flag, f"_,{typed}")[1]


def read_struct(flag: str, text: str, kind: type[Struct], first: str = "name") -> Struct:
    """Read `VALUE,key=value,...` (a tier: `NAME=SIZE[@PLACE],...`); `first` is VALUE's field."""
    if issubclass(kind, TierOption):
        values = _tier(flag, text)
    else:
        name, params = named(flag, text)
        values = {first: name, **params}
    return registry.read_struct(f"{flag} is {text!r}", kind, values)


def _tier(flag: str, text: str) -> dict[str, object]:
    """Read `NAME=SIZE[@PLACE][,key=value]...`."""
    try:
        name, size, uri, rest = split_tier(text)
        params = named(flag, name + rest)[1]
        if twice := params.keys() & {"name", "gib", "uri"}:
            raise ConfigError(f"{min(twice)} is not written so; give NAME=SIZE[@PLACE]")
    except ConfigError as error:
        raise ConfigError(f"{flag} is {text!r}: {error}") from None
    values = {"name": name, "gib": parse_size(size) / 2**30, **params}
    return {**values, "uri": uri} if uri else values


def config_options(
    config: type[msgspec.Struct], override: Override | None = None, path: tuple[str, ...] = ()
) -> Iterator[ConfigOption]:
    """Yield the options of a configuration class, in the order of its fields."""
    override = override or Override()
    hints = get_type_hints(config, include_extras=True)
    for field in msgspec.structs.fields(config):
        kind, *metadata = get_args(hints[field.name]) if _annotated(hints[field.name]) else (
            hints[field.name],
        )  # fmt: skip
        if override.fields and field.name not in override.fields:
            continue
        option = override.option_of(field.name, option_of(tuple(metadata)))
        if option is not None:
            yield ConfigOption((*path, field.name), kind, _default(field), option)
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from config_options(kind, path=(*path, field.name))


def _annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def field_flags(**flags: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator with the options of fields that messages name under another name."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        setattr(function, _FLAGS, flags)
        return function

    return decorate


class CommandConfigs:
    """The configuration classes of a command, and options of their fields.

    A parameter of the command that is annotated with a Struct class gets an object of it. With
    `Annotated[Class, Override(...)]` the command chooses among its options. Other parameters stay
    as they are. A ConfigError of the command is told in the names of the options.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._configs: dict[str, tuple[type[msgspec.Struct], list[ConfigOption]]] = {}
        self._own: set[str] = set()
        self.parameters: list[inspect.Parameter] = []  # typed parameters
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            kind, *metadata = get_args(parameter.annotation) or (parameter.annotation,)
            if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
                self._own.add(parameter.name)
                self.parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            override = next((entry for entry in metadata if isinstance(entry, Override)), None)
            options = list(config_options(kind, override))
            self._configs[parameter.name] = kind, options
            self.parameters += (entry.parameter() for entry in options)
        self._flags = {".".join(entry.path): entry.flag for _, options in self._configs.values()
                       for entry in options} | getattr(function, _FLAGS, {})  # fmt: skip

    def call(self, typed: Mapping[str, Any]) -> Any:
        """Call the command with the objects of typed values."""
        built = self.read(typed)
        rest = {key: value for key, value in typed.items() if key in self._own}
        with _in_flags(self._flags):
            return self._function(**rest, **built)

    def read(self, typed: Mapping[str, Any]) -> dict[str, msgspec.Struct]:
        """Return the objects of typed values."""
        built: dict[str, msgspec.Struct] = {}

        def build(key: str, config: type[msgspec.Struct], options: list[ConfigOption]) -> None:
            values: dict[str, Any] = {}
            for entry in options:
                entry.put(values, typed[entry.name])
            try:
                built[key] = msgspec.convert(values, config)
            except msgspec.ValidationError as error:
                raise ConfigError(wrong(error, config, values)) from error

        with _in_flags(self._flags):
            check_all(*(functools.partial(build, key, *made)
                        for key, made in self._configs.items()))  # fmt: skip
        return built


@contextmanager
def _in_flags(flags: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(in_flags(line, flags) for line in lines)) from None


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return a message about fields of a configuration in the names of their options.

    A field that is a plain word (`order`, `port`) is looked for at the beginning alone.
    """
    if (head := _HEAD.match(message)) and head[1] in flags:
        message = flags[head[1]] + message[head.end(1) :]
    marked = "|".join(re.escape(name) for name in flags if "_" in name or "." in name)
    if not marked:
        return message
    return re.sub(rf"(?<![\w.$'/-])({marked})\b", lambda match: flags[match[1]], message)


class GroupedCommand(TyperCommand):
    """A command whose help shows its options in groups, in plain text of the terminal's width."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and name the replacement of removed options."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = str(getattr(error, "option_name", ""))
            remedy = REPLACED.get(name.removeprefix("--").replace("-", "_"))
            if remedy is None:
                raise
            raise typer.BadParameter(f"{name} is no option any more; {remedy}") from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, required options, groups of options, and those without a group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Required": []}
        others: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                group = "Arguments"
            elif parameter.required:
                group = "Required"
            elif not shown_in_help(ctx, parameter.name or ""):
                continue
            else:
                group = getattr(parameter, "rich_help_panel", None) or OTHER_OPTIONS
            records = others if group == OTHER_OPTIONS else groups.setdefault(group, [])
            records.append(record)
        for group, records in (*groups.items(), (OTHER_OPTIONS, others)):
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)
