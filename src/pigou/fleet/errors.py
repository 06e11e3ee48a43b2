"""Errors of the fleet."""

from __future__ import annotations


class FleetError(RuntimeError):
    """The fleet cannot be what was asked for; the message says why."""
