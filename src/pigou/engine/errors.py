"""Why the engine refuses a call."""

from __future__ import annotations


class RequestTooLarge(ValueError):
    """A request that could never run here, even alone."""


class QueueFull(RuntimeError):
    """As many requests wait as `EngineConfig.max_waiting` allows."""


class DuplicateRequest(ValueError):
    """A request of this id is in flight, held, or its load has not been answered."""


class UnknownLoad(KeyError):
    """`loaded` for a request that has no load under way."""


class OutOfTurn(RuntimeError):
    """`schedule` and `apply` must alternate."""
