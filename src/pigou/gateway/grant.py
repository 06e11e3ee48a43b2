"""The grant: which tenure a key's requests have, and what of it they may set themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.gateway.stated import LONGEST_TTL, SETS, TEXTS, Stated, is_value, refused
from pigou.kv.tenure import Tenure
from pigou.request import SECOND
from pigou.wire.errors import APIError

#: Ends a name that stands for all names that begin so; alone, for any.
ANY = "*"


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of the tenure where a request sets no other; `ttl` is in seconds."""

    principal: str | None = None
    release: str | None = None
    template: str | None = None
    corpus: str | None = None
    safety: str | None = None
    permissions: frozenset[str] | None = None
    tools: frozenset[str] | None = None
    ttl: int | None = None


class May(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The names that a request may set a field to; None for a field that it may not set.

    A name that ends in `*` stands for all that begin so. Each item of a set must be among the
    names, which so are the most that it may have. `ttl` is the most seconds until an expiry.
    """

    principal: tuple[str, ...] | None = None
    release: tuple[str, ...] | None = None
    template: tuple[str, ...] | None = None
    corpus: tuple[str, ...] | None = None
    safety: tuple[str, ...] | None = None
    permissions: tuple[str, ...] | None = None
    tools: tuple[str, ...] | None = None
    ttl: int | None = None


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a key gives: the `tenure` of its requests, and what they `may` set instead."""

    tenure: Fixed = Fixed()
    may: May = May()

    def check(self, where: str) -> None:
        """Raise `ConfigError`, which begins with `where`, for what no request could have."""
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
            if ttl is not None and not 1 <= ttl <= LONGEST_TTL:
                raise ConfigError(
                    f"{where}: {part}.ttl is {ttl}; it must be in [1, {LONGEST_TTL}] seconds"
                )

    def apply(self, tenant: str, stated: Stated, now: int) -> Tenure:
        """Return the tenure of a tenant's request at `now` (ns since 1970).

        Raises:
            APIError: 403 for what the key does not let it set; 400 for an expiry that is past.
        """
        found: dict[str, Any] = {}
        for field in (*TEXTS, *SETS):
            value, fixed = getattr(stated, field), getattr(self.tenure, field)
            if value is None:
                value = fixed
            elif value != fixed:
                self._check(field, value)
            if value is not None:
                found[field] = value
        return self._until(Tenure(tenant=tenant, **found), stated, now)

    def _check(self, field: str, value: str | frozenset[str]) -> None:
        names = getattr(self.may, field)
        if names is None:
            raise _forbidden(field, _shown(value), "")
        for item in sorted(_items(value)):
            if not any(_matches(name, item) for name in names):
                raise _forbidden(field, item, ", ".join(map(repr, names)))

    def _until(self, tenure: Tenure, stated: Stated, now: int) -> Tenure:
        if stated.expiry is not None:
            expiry = stated.expiry * SECOND
            if expiry <= now:
                raise refused("expiry", stated.expiry, "it is past: send a later one, or none")
            self._check_time("expiry", stated.expiry, -((now - expiry) // SECOND))
            return replace(tenure, expiry=expiry)
        ttl = self.tenure.ttl if stated.ttl is None else stated.ttl
        if ttl is None:
            return tenure
        if ttl != self.tenure.ttl:
            self._check_time("ttl", ttl, ttl)
        return tenure.lasting(ttl * SECOND, now)

    def _check_time(self, field: str, value: int, seconds: int) -> None:
        most = self.may.ttl
        if most is None:
            raise _forbidden(field, value, "")
        if seconds > most:
            raise _forbidden(field, value, f"at most {most} seconds from now")


#: Everything may be set: without keys, and with keys of which nothing is said. Whoever has such a
#: key may use all that is cached for its tenant.
OPEN = Grant(may=May(**dict.fromkeys((*TEXTS, *SETS), (ANY,)), ttl=LONGEST_TTL))


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
