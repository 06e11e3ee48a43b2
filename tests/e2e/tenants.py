"""Two tenants of one gateway, and what each finds in the other's caches."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import post_json
from pigou.gateway.keys import make_key

_HITS = re.compile(r"^vllm:prefix_cache_hits_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Tenants:
    """Keys of two tenants, and the file that the gateway reads."""

    file: Path
    one: str
    other: str

    @classmethod
    def make(cls, folder: Path) -> Tenants:
        """Write a keys file for tenants `one` and `other`."""
        keys, lines = zip(*(make_key(name) for name in ("one", "other")), strict=True)
        file = folder / "keys"
        file.write_text("".join(line + "\n" for line in lines))
        return cls(file, *keys)


def complete(url: str, key: str, prompt: Sequence[int], **fields: Any) -> str:
    """Return the text of a greedy completion, asked with a key."""
    body = {"prompt": list(prompt), "max_tokens": 4, "temperature": 0, **fields}
    headers = {"authorization": f"Bearer {key}"}
    reply = post_json(url + "/v1/completions", body, headers=headers)
    return str(reply["choices"][0]["text"])


def hits(urls: Sequence[str]) -> float:
    """Return prompt tokens that the workers' prefix caches gave, all together."""
    total = 0.0
    for url in urls:
        with urllib.request.urlopen(url + "/metrics", timeout=30) as reply:
            total += sum(float(each) for each in _HITS.findall(reply.read().decode()))
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
