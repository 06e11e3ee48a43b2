"""Tenure of a request, from `X-Pigou-Tenure-...` headers, its key's policy, and salt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec

from pigou.config import ConfigError
from pigou.kv.tenure import Tenure
from pigou.request import NEVER, SECOND
from pigou.wire.errors import APIError, bad_request

_PREFIX = "x-pigou-tenure"
#: Fields that are a text, those that are a set of texts, and those that are whole seconds.
TEXTS = ("principal", "release", "template", "corpus", "safety")
SETS = ("permissions", "tools")
TIMES = ("ttl", "expiry")
#: Characters of a value, and items of a set, at most.
MAX_VALUE_CHARS = 256
MAX_SET_ITEMS = 64
#: Seconds that a tenure lasts at most: ten years.
MAX_TTL_S = 10 * 365 * 86_400
#: White space that HTTP allows around a value.
_SPACE = " \t"
_SECONDS = re.compile(r"[0-9]{1,10}", re.ASCII)
#: Ends a name that stands for all names that begin so; alone, for any.
ANY = "*"
_Text = TypeVar("_Text")
_Set = TypeVar("_Set")


class _TenureFields(
    msgspec.Struct, Generic[_Text, _Set], frozen=True, forbid_unknown_fields=True, kw_only=True
):
    principal: _Text | None = None
    release: _Text | None = None
    template: _Text | None = None
    corpus: _Text | None = None
    safety: _Text | None = None
    permissions: _Set | None = None
    tools: _Set | None = None
    ttl: int | None = None


class TenureDefaults(_TenureFields[str, frozenset[str]], frozen=True, kw_only=True):
    """Default tenure fields; `ttl` is in seconds."""


class TenureHeaders(TenureDefaults, frozen=True, kw_only=True):
    """Tenure fields set by a request; None leaves one to its key."""

    expiry: int | None = None  # Unix time in seconds


def header(field: str) -> str:
    """Return the name of a field's header."""
    return f"X-Pigou-Tenure-{'TTL' if field == 'ttl' else field.capitalize()}"


_FIELDS = {header(field).lower(): field for field in (*TEXTS, *SETS, *TIMES)}


def read_tenure_headers(headers: Mapping[str, str]) -> TenureHeaders:
    """Parse a request's headers, an empty list as empty set; raise `APIError` 400."""
    values: dict[str, str] = {}
    for name, value in headers.items():
        lower = name.lower()
        if not lower.startswith(_PREFIX):
            continue
        field = _FIELDS.get(lower)
        if field is None:
            names = ", ".join(map(header, _FIELDS.values()))
            raise bad_request(f"{name} is no header of a tenure; these are: {names}.", str(name))
        if field in values:
            raise bad_request(f"{header(field)} comes twice; keep one.", header(field))
        values[field] = value.strip(_SPACE)
    if {"ttl", "expiry"} <= values.keys():
        why = f"{header('ttl')} is given too: keep one"
        raise refused("expiry", values["expiry"][:60], why)
    return TenureHeaders(**{field: _read(field, value) for field, value in values.items()})


def refused(field: str, value: object, why: str, *, status: int = 400) -> APIError:
    """Return the error for a refused header value."""
    name = header(field)
    return APIError(status, f"{name} is {value!r}; {why}.", name)


def is_value(field: str, value: str) -> bool:
    """True if a header can carry this value or set item."""
    whole = field in TEXTS or "," not in value
    return 1 <= len(value) <= MAX_VALUE_CHARS and value == value.strip(_SPACE) and whole


def _read(field: str, value: str) -> Any:
    read = _text if field in TEXTS else _set if field in SETS else _seconds
    return read(field, value)


def _text(field: str, value: str) -> str:
    if not 1 <= len(value) <= MAX_VALUE_CHARS:
        why = f"it must have 1 to {MAX_VALUE_CHARS} characters; else leave it out"
        raise refused(field, value[:60], why)
    return value


def _set(field: str, value: str) -> frozenset[str]:
    items = [item.strip(_SPACE) for item in value.split(",")] if value else []
    if len(items) > MAX_SET_ITEMS:
        raise refused(
            field, f"{value[:60]}...", f"it has {len(items)} items, at most {MAX_SET_ITEMS} work"
        )
    return frozenset(_text(field, item) for item in items)


def _seconds(field: str, value: str) -> int:
    max_s = MAX_TTL_S if field == "ttl" else NEVER // SECOND - 1
    if not _SECONDS.fullmatch(value) or not 1 <= int(value) <= max_s:
        raise refused(field, value[:60], f"it must be a whole number of seconds in [1, {max_s}]")
    return int(value)


class TenureChoices(_TenureFields[tuple[str, ...], tuple[str, ...]], frozen=True, kw_only=True):
    """Values that a request may set for each field; None if it must not.

    `NAME*` allows all names with that prefix. `ttl` is the maximum of seconds until expiry.
    """


class KeyPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A key's tenure defaults, and the values that requests `may` set."""

    tenure: TenureDefaults = TenureDefaults()
    may: TenureChoices = TenureChoices()

    def check(self, where: str) -> None:
        """Raise `ConfigError`, starting with `where`, for values no request can send."""
        for field in (*TEXTS, *SETS):
            fixed, names = getattr(self.tenure, field), getattr(self.may, field)
            for value in _items(fixed):
                if not is_value(field, value):
                    raise ConfigError(f"{where}: tenure.{field} has {value!r}, which is no value")
            for name in names or ():
                if ANY in name[:-1] or not is_value(field, name):
                    raise ConfigError(
                        f"{where}: may.{field} has {name!r}; it must be a value, or the beginning "
                        f"of some with one {ANY} at its end"
                    )
        for part, ttl in (("tenure", self.tenure.ttl), ("may", self.may.ttl)):
            if ttl is not None and not 1 <= ttl <= MAX_TTL_S:
                raise ConfigError(
                    f"{where}: {part}.ttl is {ttl}; it must be in [1, {MAX_TTL_S}] seconds"
                )

    def apply(self, tenant: str, headers: TenureHeaders, now: int) -> Tenure:
        """Return the tenure of a request at `now` (ns since 1970); raise `APIError` 400 or 403."""
        values: dict[str, Any] = {}
        for field in (*TEXTS, *SETS):
            value, fixed = getattr(headers, field), getattr(self.tenure, field)
            if value is None:
                value = fixed
            elif value != fixed:
                self._check(field, value)
            if value is not None:
                values[field] = value
        return self._until(Tenure(tenant=tenant, **values), headers, now)

    def _check(self, field: str, value: str | frozenset[str]) -> None:
        names = getattr(self.may, field)
        if names is None:
            raise _forbidden(field, _shown(value), "")
        for item in sorted(_items(value)):
            if not any(_matches(name, item) for name in names):
                raise _forbidden(field, item, ", ".join(map(repr, names)))

    def _until(self, tenure: Tenure, headers: TenureHeaders, now: int) -> Tenure:
        if headers.expiry is not None:
            expiry = headers.expiry * SECOND
            if expiry <= now:
                raise refused("expiry", headers.expiry, "it is past: send a later one, or none")
            self._check_time("expiry", headers.expiry, -((now - expiry) // SECOND))
            return replace(tenure, expiry=expiry)
        ttl = self.tenure.ttl if headers.ttl is None else headers.ttl
        if ttl is None:
            return tenure
        if ttl != self.tenure.ttl:
            self._check_time("ttl", ttl, ttl)
        return tenure.lasting(ttl * SECOND, now)

    def _check_time(self, field: str, value: int, seconds: int) -> None:
        max_ttl_s = self.may.ttl
        if max_ttl_s is None:
            raise _forbidden(field, value, "")
        if seconds > max_ttl_s:
            raise _forbidden(field, value, f"at most {max_ttl_s} seconds from now")


#: Everything may be set: without keys, and with keys that name no policy. Such a key may use all
#: that is cached for its tenant.
OPEN_POLICY = KeyPolicy(may=TenureChoices(**dict.fromkeys((*TEXTS, *SETS), (ANY,)), ttl=MAX_TTL_S))


def _forbidden(field: str, value: object, allowed: str) -> APIError:
    if allowed:
        why = f"this key allows {allowed}: send such a value, or leave the header out"
    else:
        why = "this key does not let requests set it: leave the header out"
    return refused(field, value, why, status=403)


def _items(value: str | Iterable[str] | None) -> Iterable[str]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _shown(value: str | frozenset[str]) -> str:
    return value if isinstance(value, str) else ",".join(sorted(value))


def _matches(name: str, value: str) -> bool:
    return value.startswith(name[:-1]) if name.endswith(ANY) else value == name
