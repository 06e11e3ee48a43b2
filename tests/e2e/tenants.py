"""Tenants and tenures of one gateway, and what each finds in the others' caches."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from tests.e2e.client import SECRET
from tests.gateway.tenure_requests import pairs

from benchmarks.lib.servers import post_json
from pigou.gateway.auth.keys import make_key

_HITS = re.compile(
    r"^(?:vllm:prefix_cache_hits_total|pigou_(tier)_restored_blocks_total)(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Tenants:
    """Keys of two tenants, and the file that the gateway reads."""

    file: Path
    one: str
    other: str

    @classmethod
    def make(cls, folder: Path) -> Tenants:
        """Write a keys file for tenants `one` and `other`."""
        keys, lines = zip(*(make_key(n, admin=n == "one") for n in ("one", "other")), strict=True)
        file = folder / "keys"
        file.write_text("".join(line + "\n" for line in lines))
        return cls(file, *keys)

    @classmethod
    def granted(cls, folder: Path) -> Tenants:
        """Write a structured keys file, in which `one` may set everything, and `other` little."""
        keys, lines = zip(*(make_key(name) for name in ("one", "other")), strict=True)
        everything = {name: ["*"] for name in FIELDS} | {"ttl": 315_360_000}
        entries = [
            {"tenant": tenant, "sha256": digest, "admin": tenant == "one", **rest}
            for (tenant, _, digest), rest in zip(
                (line.partition(":") for line in lines),
                ({"may": everything}, {"tenure": {"safety": "v1"}, "may": {"principal": ["a*"]}}),
                strict=True,
            )
        ]
        file = folder / "keys.json"
        file.write_text(json.dumps({"keys": entries}))
        return cls(file, *keys)


FIELDS = ("principal", "release", "template", "corpus", "safety", "permissions", "tools")


@dataclass(frozen=True)
class Ask:
    """One request: by which tenant (where there are keys), with what headers and body."""

    tenant: str
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)

    def send(self, url: str, tenants: Tenants | None, prompt: Sequence[int]) -> str:
        """Return the text of a greedy completion."""
        body = {"prompt": list(prompt), "max_tokens": 4, "temperature": 0, **self.body}
        headers = {}
        if tenants is not None:
            headers["authorization"] = f"Bearer {getattr(tenants, self.tenant)}"
        for name, value in self.headers.items():
            headers[f"X-Pigou-Tenure-{name}"] = value.encode().decode("latin-1")
        reply = post_json(url + "/v1/completions", body, headers=headers)
        return str(reply["choices"][0]["text"])

    def status(self, url: str, tenants: Tenants | None, prompt: Sequence[int]) -> int:
        """Return the status of the answer."""
        try:
            self.send(url, tenants, prompt)
        except urllib.error.HTTPError as error:
            return error.code
        return 200


#: Requests of which no two are of one tenure.
APART = (
    Ask("one"),
    *(Ask("one", {name.capitalize(): "a"}) for name in FIELDS),
    *(
        Ask("one", {"Principal": name})
        for name in ("A", "ab", "one", "\u00e9", "e\u0301", "1", "a,b")
    ),
    *(Ask("one", {"Permissions": items}) for items in ("a,b", "ab", "b")),
    Ask("one", {"Principal": "a", "Corpus": "b"}),
    Ask("one", {"Principal": "b", "Corpus": "a"}),
    Ask("one", {"TTL": "315360000"}),
    Ask("one", {"TTL": "315359999"}),
    Ask("one", {}, {"cache_salt": "a"}),
    Ask("one", {}, {"cache_salt": "one"}),
    Ask("one", {"Principal": "a"}, {"cache_salt": "a"}),
    Ask("other"),
    Ask("other", {"Principal": "a"}),
    Ask("other", {"Principal": "ab"}),
    Ask("other", {}, {"cache_salt": "one"}),
)
#: Requests that say the same as one of those, in another way.
AGAIN = (
    Ask("one", {"Permissions": ""}),
    Ask("one", {"Permissions": "b, a,b"}),
    Ask("other", {"Safety": "v1"}),
)
REFUSED = (
    (Ask("one", {"Tenant": "other"}), 400),
    (Ask("one", {"Expiry": "1000000000"}), 400),
    (Ask("other", {"Principal": "b"}), 403),
    (Ask("other", {"Safety": "v2"}), 403),
    (Ask("other", {"TTL": "60"}), 403),
)


def assert_apart(url: str, tenants: Tenants, workers: Sequence[str], block: int) -> None:
    """Send one prompt under many tenures: each hits what is its own, once it is there."""
    assert assert_none_crosses(url, tenants, workers, block) == len(APART) + len(AGAIN)
    for ask, status in REFUSED:
        assert ask.status(url, tenants, [350] * block) == status, ask


def assert_none_crosses(
    url: str, tenants: Tenants, workers: Sequence[str], block: int, *, tiers: bool = False
) -> int:
    """Send one prompt under many tenures, and again: none hits what is not its own.

    Returns:
        How many hit something the second time; with `tiers` also below the device.
    """
    prompt = [350 + i % 561 for i in range(3 * block + 5)]
    before = hits(workers, tiers)
    texts = set()
    for ask in APART:
        texts.add(ask.send(url, tenants, prompt))
        assert hits(workers, tiers) == before, f"{ask} hit another tenure's blocks"
    own = 0
    for ask in (*APART, *AGAIN):
        for _ in workers:  # each worker may have to see it once
            texts.add(ask.send(url, tenants, prompt))
        own += (now := hits(workers, tiers)) > before
        before = now
    assert len(texts) == 1
    return own


def assert_random_apart(url: str, workers: Sequence[str], block: int, count: int) -> None:
    """Send one prompt in pairs of random requests to an open gateway: equal tenures alone hit."""
    prompt = [390 + i % 521 for i in range(block + 5)]
    seen: list[tuple[Any, ...]] = []
    refused = hit = 0
    before = hits(workers)
    for pair in pairs(count, count, time.time_ns()):
        for asked in pair:
            body = {**json.loads(asked.body), "prompt": prompt, "max_tokens": 1, "model": None}
            said = msgspec.json.encode(body | {"tools": None})
            told = replace(asked, tenant="", release="", releases=frozenset(), body=said)
            named = {f"{name.capitalize()}": value for name, value in told.headers.items()}
            del body["model"]
            body.pop("tools", None)
            known = told.said() in seen
            if Ask("", named, body).status(url, None, prompt) != 200:
                refused += 1
                continue
            now = hits(workers)
            assert (now > before) == known, told
            before = now
            hit += known
            seen.append(told.said())
    assert hit > count / 5
    assert refused < count


def assert_expiring(
    url: str, tenants: Tenants, workers: Sequence[str], block: int, *, tiers: bool = False
) -> None:
    """Send one prompt before and after the expiry of its tenure: it never hits what is void."""
    prompt = [400 + i % 511 for i in range(3 * block + 5)]
    void = (Ask("one", {"TTL": "1"}), Ask("one", {"TTL": "1"}, {"cache_salt": "a"}))
    date = Ask("one", {"Expiry": str(int(time.time()) + 2)})
    assert date.status(url, tenants, prompt) in (200, 400)  # two seconds may have passed
    before = hits(workers, tiers)
    for _ in range(2):
        for ask in void:
            ask.send(url, tenants, prompt)
            assert hits(workers, tiers) == before, f"{ask} hit what is void"
        time.sleep(1.0)  # it expires within a second, whatever the machine is doing
    assert date.status(url, tenants, prompt) == 400


def complete(url: str, key: str, prompt: Sequence[int], **fields: Any) -> str:
    """Return the text of a greedy completion, asked with a key."""
    body = {"prompt": list(prompt), "max_tokens": 4, "temperature": 0, **fields}
    headers = {"authorization": f"Bearer {key}"}
    reply = post_json(url + "/v1/completions", body, headers=headers)
    return str(reply["choices"][0]["text"])


def hits(urls: Sequence[str], tiers: bool = False) -> float:
    """Return prompt tokens that the workers' prefix caches gave, all together.

    With `tiers`, blocks that were restored from tiers below the device are added.
    """
    total = 0.0
    for url in urls:
        headers = {"authorization": f"Bearer {SECRET}"}
        asked = urllib.request.Request(url + "/metrics", headers=headers)
        with urllib.request.urlopen(asked, timeout=30) as reply:
            found = _HITS.findall(reply.read().decode())
        total += sum(float(value) for below, value in found if tiers or not below)
    return total


def assert_isolated(url: str, tenants: Tenants, workers: Sequence[str], block: int) -> None:
    """Send one prompt many times by both tenants: only the own cache is ever hit."""
    prompt = [300 + i % 611 for i in range(3 * block + 5)]
    before = hits(workers)
    text = complete(url, tenants.one, prompt)
    assert hits(workers) == before, "the first request found something"
    assert complete(url, tenants.other, prompt) == text
    assert hits(workers) == before, "a tenant hit the other's blocks"
    complete(url, tenants.other, prompt, cache_salt="guess")
    assert hits(workers) == before, "a salt of its own led to blocks that are not its own"
    for _ in range(len(workers)):  # each worker may have to see it once
        complete(url, tenants.one, prompt)
    assert hits(workers) > before, "the tenant's own blocks were not hit"
