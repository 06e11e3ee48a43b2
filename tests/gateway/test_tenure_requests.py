"""Pairs of whole requests: one salt exactly where key, headers and body say the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from tests.kv.tenure_pairs import disguises, word

from pigou.control.journal import encode, submitted
from pigou.gateway.facts import Facts
from pigou.gateway.grant import OPEN
from pigou.gateway.intake import read
from pigou.gateway.stated import SETS, TEXTS, header, read_stated
from pigou.kv.tenure import salt_expiry
from pigou.request import SECOND
from pigou.wire.errors import APIError

NOW = 1_800_000_000 * SECOND
TENANTS = ("", "acme", "a", "ab")
RELEASES = ("", "r", "r1", "1;0:", "0;")
TOOLS: tuple[Any, ...] = (None, [], [{"a": 1}], [{"a": "1"}], [{"a": 1}, {"b": 2}], [[{"a": 1}]])


@dataclass(frozen=True)
class Asked:
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

    def salt(self) -> str:
        """Return the salt that workers are sent; raises APIError."""
        named = {header(field): value for field, value in self.headers.items()}
        tenure = OPEN.apply(self.tenant, read_stated(named), NOW)
        facts = Facts("m", self.release, self.releases, "t")
        return read(self.body, chat=False, strict=False, tenure=tenure, facts=facts).salt


def plain(at: random.Random) -> str:
    """A word that an HTTP header and a JSON text can carry."""
    text = word(at).encode("utf-8", "ignore").decode()
    return "".join(char for char in text if char.isprintable() or char in "\t\ufeff\u200b")


def body(at: random.Random) -> bytes:
    found: dict[str, Any] = {"prompt": "x", "model": at.choice(("m", "n", ""))}
    if at.random() < 0.5:
        found["cache_salt"] = plain(at)
    if at.random() < 0.5:
        found["tools"] = at.choice(TOOLS)
    return msgspec.json.encode(found)


def one(at: random.Random) -> Asked:
    fields = [field for field in (*TEXTS, *SETS) if at.random() < 0.3]
    headers = {
        field: plain(at) if field in TEXTS else ",".join(plain(at) for _ in range(at.randrange(3)))
        for field in fields
    }
    if at.random() < 0.2:
        headers["expiry"] = str(NOW // SECOND + at.choice((1, 2, 10, 11)))
    releases = frozenset(at.sample(RELEASES[1:], at.randrange(3)))
    return Asked(at.choice(TENANTS), headers, at.choice(RELEASES), releases, body(at))


def other(at: random.Random, asked: Asked) -> Asked:
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
            return one(at)
    return replace(asked, headers=headers)


def pairs(seed: int, count: int) -> Iterator[tuple[Asked, Asked]]:
    at = random.Random(seed)
    for _ in range(count):
        asked = one(at)
        yield asked, other(at, asked)


def judge(seed: int, count: int) -> tuple[int, int]:
    """Return how many pairs were equal, and how many requests were refused."""
    equal = refused = 0
    for pair in pairs(seed, count):
        try:
            salts = [each.salt() for each in pair]
        except APIError:
            refused += 1
            continue
        said = [each.said() for each in pair]
        assert (salts[0] == salts[1]) == (said[0] == said[1]), pair
        assert [salt == "" for salt in salts] == [each == () for each in said]
        equal += said[0] == said[1]
    return equal, refused


def test_two_requests_have_one_salt_exactly_where_they_say_the_same() -> None:
    equal, refused = judge(1, 3_000)
    assert equal > 300
    assert refused < 1_800


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_pairs_of_requests_have_one_salt_where_they_say_the_same() -> None:
    equal, refused = judge(2, 100_000)
    assert equal > 10_000
    assert refused < 60_000


def test_the_journal_has_nothing_of_a_tenure_but_its_tenant() -> None:
    secrets = {field: f"secret-{field}" for field in (*TEXTS, *SETS)}
    secrets["expiry"] = str(NOW // SECOND + 123_456)
    named = {header(field): value for field, value in secrets.items()}
    tenure = OPEN.apply("acme", read_stated(named), NOW)
    asked = b'{"prompt": "secret-prompt", "cache_salt": "secret-salt"}'
    call = read(asked, chat=False, strict=True, tenure=tenure, facts=Facts("m", "secret-r"))
    assert salt_expiry(call.salt) == tenure.expiry
    line = encode(submitted(call.request(), 0, frozenset())).decode()
    assert '"tenant":"acme"' in line
    for told in ("secret", "123456", call.salt, call.salt.split(":")[1], str(tenure.expiry)):
        assert told not in line
