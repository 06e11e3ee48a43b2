"""What an installation has: plug-ins by name, their parameters, and extras with their remedies."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec

from pigou.config import ConfigError, key_values, wrong

#: Pigou is on no package registry: an extra is installed from its source.
_WHERE = "in a checkout of Pigou"
#: Extra of the package -> modules that it brings.
EXTRAS = {
    "worker": ("torch", "safetensors", "llguidance", "obstore"),
    "transformers": ("transformers",),
    "gguf": ("gguf",),
    "report": ("matplotlib", "plotly"),
    "traces": ("zstandard",),
    "nats": ("nats",),
    "etcd": ("aetcd",),
    "k8s": ("kopf",),
    "epp": ("grpc", "envoy"),
}
#: Names that `pigou-lab` registers, by entry point group: without it, its remedy is told.
LAB_NAMES = {
    "pigou.command": "experiment game",
    "pigou.controller": "bandit interpolated regime",
    "pigou.detector": "config-variance paper second-difference",
    "pigou.eviction": "arc fifo frequency gdsf kvbm lfu random s3fifo sieve",
    "pigou.planner": "apa dynamo dynamo-load dynamo-sla heteroscale hpa-cpu hpa-qps kpa ray wva",
    "pigou.predictor": "auto-arima dynamo-arima dynamo-kalman holt-winters kalman seasonal-naive",
    "pigou.report": "experiment",
    "pigou.routing": "aibrix-prefix dynamo dynamo-conditional dynamo-paper llm-d "
    "llm-d-blend llm-d-conditional lmetric mooncake ray-prefix "
    "sglang-cache-aware",
    "pigou.token_eviction": "fifo h2o lru oracle random snapkv streaming",
}
_LAB_REMEDY = f"pip install ./lab {_WHERE}"
T = TypeVar("T", bound=msgspec.Struct)
#: Entry points of all groups; a lookup reads the metadata of every installed distribution.
_entry_points = cache(entry_points)


def named(group: str, name: Any, what: str) -> Any:
    """Load the object registered under a name in an entry point group.

    `what` names the thing in messages, as in "policy".

    Raises:
        ConfigError: nothing has that name (the message lists the names, or says how to install
            the lab that has it), or it cannot be loaded.
    """
    entries = _entry_points().select(group=group)
    for entry in entries:
        if entry.name == name:
            try:
                return entry.load()
            except (ImportError, AttributeError) as error:
                raise ConfigError(f"{what} {name!r} cannot be loaded: {error}") from error
    if name in LAB_NAMES.get(group, "").split():
        raise ConfigError(
            f"{what} {name!r} is part of pigou-lab, which is not installed; {_LAB_REMEDY}"
        )
    names = ", ".join(sorted(entries.names))
    raise ConfigError(f"{what} is {name!r}; it must be one of: {names}")


def read_struct(where: str, kind: type[T], values: Any, *, strict: bool = False) -> T:
    """Read values as a struct; unless `strict`, they may be text. ConfigError names `where`."""
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {wrong(error, kind, values)}") from error


def read_keys(where: str, kind: type[T], text: str) -> T:
    """Read `key=value,...` as a struct; ConfigError names `where`."""
    form = f"key=value with a key of: {', '.join(kind.__struct_fields__)}"
    return read_struct(where, kind, key_values(where, text, form))


@contextmanager
def uncollected() -> Iterator[None]:
    """Import large packages within it: without collection a fifth of the time is saved."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def require(extra: str, what: str, otherwise: str = "") -> None:
    """Raise ConfigError, with the remedies, where `what` needs an extra that is not installed."""
    missing = [module for module in EXTRAS[extra] if not _is_there(module)]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}; {remedy(extra)}{otherwise}")


def extra_of(module: str) -> str | None:
    """Return the extra that brings a module; None where none does."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if top in modules), None)


def remedy(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '.[{extra}]' {_WHERE}"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
