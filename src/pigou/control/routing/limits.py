"""Ranges of policy parameters, with a message that names field, value and remedy."""

from __future__ import annotations

import msgspec

#: Weights up to here leave every cost a finite number.
_MOST = 1e9


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
    """Check that fields are numbers from 0 to 1e9, with which every cost is finite.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(params, name)
        if not 0.0 <= value <= _MOST:
            raise ValueError(f"{name} is {value}; it must be a number from 0 to {_MOST:g}")


def share(params: msgspec.Struct, *names: str) -> None:
    """Check that fields are shares.

    Raises:
        ValueError: one is not from 0 to 1.
    """
    for name in names:
        value = getattr(params, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it must be from 0 to 1")
