"""Imports: optional dependencies with their remedies, and imports without garbage collection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from pigou.config import ConfigError

T = TypeVar("T")
#: Pigou is on no package registry: an extra is installed from its source.
_WHERE = "in a checkout of Pigou"
#: Extra of the package -> modules that it brings.
EXTRAS = {
    "worker": ("torch", "safetensors", "llguidance", "obstore"),
    "report": ("matplotlib", "plotly"),
    "traces": ("zstandard",),
    "nats": ("nats",),
    "etcd": ("aetcd",),
    "k8s": ("kopf",),
}


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


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop, or on asyncio's own loop where the platform has no other."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


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
