"""Ranges of policy parameters, with a message that names field, value and remedy."""

from __future__ import annotations

import math

import msgspec


def at_least(params: msgspec.Struct, least: float, *names: str) -> None:
    """Check that fields are numbers from `least` up; infinity is one.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(params, name)
        if not value >= least:
            raise ValueError(f"{name} is {value}; it must be a number from {least:g}")


def finite(params: msgspec.Struct, *names: str) -> None:
    """Check that fields are finite numbers from 0.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; it must be a finite number from 0")


def share(params: msgspec.Struct, *names: str) -> None:
    """Check that fields are shares.

    Raises:
        ValueError: one is not from 0 to 1.
    """
    for name in names:
        value = getattr(params, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it must be from 0 to 1")
