"""Random and adversarial pairs of whole requests: key, headers and body."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from tests.kv.tenure_pairs import disguises, word

from pigou.gateway.auth.tenure import (
    OPEN_POLICY,
    SETS,
    TEXTS,
    header,
    read_tenure_headers,
)
from pigou.gateway.request_parsing import ServerScope, read
from pigou.request import SECOND

TENANTS = ("", "acme", "a", "ab")
RELEASES = ("", "r", "r1", "1;0:", "0;")
TOOLS: tuple[Any, ...] = (None, [], [{"a": 1}], [{"a": "1"}], [{"a": 1}, {"b": 2}], [[{"a": 1}]])


@dataclass(frozen=True)
class BodyFields:
    """What decides on the tenure of a request."""

    tenant: str
    headers: dict[str, str]
    release: str
    releases: frozenset[str]
    body: bytes

    def said(self) -> tuple[Any, ...]:
        """Return what is equal exactly where the tenures ought to be, told from the parts."""
        headers: dict[str, Any] = {}
        for field, value in self.headers.items():
            value = value.strip(" \t")
            items = frozenset(item.strip(" \t") for item in value.split(",")) if value else None
            if field not in SETS:
                headers[field] = value
            elif items:  # the empty set is that of who says nothing
                headers[field] = items
        body = msgspec.json.decode(self.body)
        tools = frozenset(msgspec.json.encode(tool) for tool in body.get("tools") or ())
        salt = body.get("cache_salt")
        if not (headers or self.tenant or salt or self.release):
            return ()
        return (self.tenant, headers, self.release, self.releases, salt, body["model"], tools)

    def salt(self, now: int) -> str:
        """Return the salt that workers are sent at a time (ns); raises APIError."""
        named = {header(field): value for field, value in self.headers.items()}
        tenure = OPEN_POLICY.apply(self.tenant, read_tenure_headers(named), now)
        scope = ServerScope("m", self.release, self.releases, "t")
        return read(self.body, chat=False, strict=False, tenure=tenure, scope=scope).salt


def plain(at: random.Random) -> str:
    """A word that an HTTP header and a JSON text can carry."""
    text = word(at).encode("utf-8", "ignore").decode()
    return "".join(char for char in text if char.isprintable() or char in "\t\ufeff\u200b")


def body(at: random.Random) -> bytes:
    found: dict[str, Any] = {"prompt": "x", "model": at.choice(("m", "n"))}
    if at.random() < 0.5:
        found["cache_salt"] = plain(at)
    if at.random() < 0.5:
        found["tools"] = at.choice(TOOLS)
    return msgspec.json.encode(found)


def one(at: random.Random, now: int) -> BodyFields:
    """Return a request at a time (ns)."""
    fields = [field for field in (*TEXTS, *SETS) if at.random() < 0.3]
    headers = {
        field: plain(at) if field in TEXTS else ",".join(plain(at) for _ in range(at.randrange(3)))
        for field in fields
    }
    if at.random() < 0.2:
        headers["expiry"] = str(now // SECOND + 10_000 + at.choice((1, 2, 10, 11)))
    releases = frozenset(at.sample(RELEASES[1:], at.randrange(3)))
    return BodyFields(at.choice(TENANTS), headers, at.choice(RELEASES), releases, body(at))


def other(at: random.Random, asked: BodyFields, now: int) -> BodyFields:
    """Return one that says the same, or almost."""
    headers = dict(asked.headers)
    match at.randrange(7):
        case 0:
            turned = {
                field: ",".join(sorted(value.split(","), reverse=True)) if field in SETS else value
                for field, value in headers.items()
            }
            return replace(asked, headers=turned)
        case 1:
            return replace(asked, body=body(at))
        case 2:
            return replace(asked, tenant=at.choice(TENANTS), release=at.choice(RELEASES))
        case 3 if len(headers) > 1:
            first, second = at.sample(sorted(headers), 2)
            headers[first], headers[second] = headers[second], headers[first]
        case 4 if headers:
            moved = at.choice(sorted(headers))
            headers[at.choice(TEXTS + SETS)] = headers.pop(moved)
        case 5 if headers:
            field = at.choice(sorted(headers))
            headers[field] = at.choice(sorted(disguises(headers[field])) or [""])
        case _:
            return one(at, now)
    return replace(asked, headers=headers)


def pairs(seed: int, count: int, now: int) -> Iterator[tuple[BodyFields, BodyFields]]:
    at = random.Random(seed)
    for _ in range(count):
        asked = one(at, now)
        yield asked, other(at, asked, now)
