"""What a request states of its tenure: the headers `X-Pigou-Tenure-...`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pigou.request import NEVER, SECOND
from pigou.wire.errors import APIError, bad_request

_PREFIX = "x-pigou-tenure"
#: Fields that are a text, those that are a set of texts, and those that are whole seconds.
TEXTS = ("principal", "release", "template", "corpus", "safety")
SETS = ("permissions", "tools")
TIMES = ("ttl", "expiry")
#: Characters of a value, and items of a set, at most.
LONGEST = 256
MOST = 64
#: Seconds that a tenure lasts at most: ten years.
LONGEST_TTL = 10 * 365 * 86_400
#: What HTTP allows around a value.
_SPACE = " \t"
_SECONDS = re.compile(r"[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The fields that a request sets itself; None for those that it leaves to its key.

    `ttl` is a number of seconds, `expiry` one of seconds since 1970; the others are those of
    `pigou.kv.tenure.Tenure`.
    """

    principal: str | None = None
    release: str | None = None
    template: str | None = None
    corpus: str | None = None
    safety: str | None = None
    permissions: frozenset[str] | None = None
    tools: frozenset[str] | None = None
    ttl: int | None = None
    expiry: int | None = None


def header(field: str) -> str:
    """Return the name of a field's header."""
    return f"X-Pigou-Tenure-{'TTL' if field == 'ttl' else field.capitalize()}"


_FIELDS = {header(field).lower(): field for field in (*TEXTS, *SETS, *TIMES)}


def read_stated(headers: Mapping[str, str]) -> Stated:
    """Read a request's headers; sets are lists with commas, an empty one is the empty set.

    Raises:
        APIError: 400 for a header that is unknown, comes twice, or has no such value.
    """
    found: dict[str, str] = {}
    for name, value in headers.items():
        lower = name.lower()
        if not lower.startswith(_PREFIX):
            continue
        field = _FIELDS.get(lower)
        if field is None:
            names = ", ".join(map(header, _FIELDS.values()))
            raise bad_request(f"{name} is no header of a tenure; these are: {names}.", str(name))
        if field in found:
            raise bad_request(f"{header(field)} comes twice; keep one.", header(field))
        found[field] = value.strip(_SPACE)
    if {"ttl", "expiry"} <= found.keys():
        why = f"{header('ttl')} is given too: keep one"
        raise refused("expiry", found["expiry"][:60], why)
    return Stated(**{field: _read(field, value) for field, value in found.items()})


def refused(field: str, value: object, why: str, *, status: int = 400) -> APIError:
    """Return the error for a header's value."""
    name = header(field)
    return APIError(status, f"{name} is {value!r}; {why}.", name)


def is_value(field: str, value: str) -> bool:
    """Whether a header can say this value, or this item of a set."""
    whole = field in TEXTS or "," not in value
    return 1 <= len(value) <= LONGEST and value == value.strip(_SPACE) and whole


def _read(field: str, value: str) -> Any:
    read = _text if field in TEXTS else _set if field in SETS else _seconds
    return read(field, value)


def _text(field: str, value: str) -> str:
    if not 1 <= len(value) <= LONGEST:
        why = f"it must have 1 to {LONGEST} characters; else leave it out"
        raise refused(field, value[:60], why)
    return value


def _set(field: str, value: str) -> frozenset[str]:
    items = [item.strip(_SPACE) for item in value.split(",")] if value else []
    if len(items) > MOST:
        raise refused(field, f"{value[:60]}...", f"it has {len(items)} items, at most {MOST} work")
    return frozenset(_text(field, item) for item in items)


def _seconds(field: str, value: str) -> int:
    most = LONGEST_TTL if field == "ttl" else NEVER // SECOND - 1
    if not _SECONDS.fullmatch(value) or not 1 <= int(value) <= most:
        raise refused(field, value[:60], f"it must be a whole number of seconds in [1, {most}]")
    return int(value)
