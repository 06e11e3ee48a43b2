"""The attacks by name, and what they are aimed at."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

#: Seconds for which an attack goes on.
LASTS_S = 1.5
#: Requests or connections of one attack, at most.
MOST = 300
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway on loopback; `key` is the attacker's own, which is accepted."""

    url: str
    key: str

    async def connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection; options are those of `asyncio.open_connection`."""
        if "sock" in options:
            return await asyncio.open_connection(**options)
        return await asyncio.open_connection(*self.address, **options)

    @property
    def address(self) -> tuple[str, int]:
        """Host, which is loopback, and port."""
        parts = urlsplit(self.url)
        assert parts.hostname == "127.0.0.1"
        assert parts.port is not None
        return parts.hostname, parts.port

    def head(self, length: int, *headers: str, key: str | None = None, version: str = "1.1") -> str:
        """Return the head of a completion request."""
        lines = [
            f"POST {COMPLETIONS} HTTP/{version}",
            "host: localhost",
            "content-type: application/json",
            f"authorization: Bearer {self.key if key is None else key}",
            f"content-length: {length}",
            *headers,
        ]
        return "\r\n".join(lines) + "\r\n\r\n"

    async def send(
        self, body: Any, *headers: str, key: str | None = None, wait_s: float = 10.0
    ) -> int:
        """Send a request; return the status of its answer, 0 for none."""
        return (await self.ask(body, *headers, key=key, wait_s=wait_s))[0]

    async def ask(
        self,
        body: Any,
        *headers: str,
        key: str | None = None,
        wait_s: float = 10.0,
        whole: bool = False,
    ) -> tuple[int, bytes]:
        """Send a request; return the status of its answer, and its head and body if `whole`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            reader, writer = await self.connect()
        except OSError:
            return 0, b""
        if whole:
            headers = (*headers, "connection: close")
        try:
            writer.write(self.head(len(data), *headers, key=key).encode() + data)
            async with asyncio.timeout(wait_s):
                line = await reader.readline()
                rest = await reader.read() if whole else b""
            return int(line.split()[1]) if line else 0, rest
        except (OSError, TimeoutError, ValueError, IndexError):
            return 0, b""
        finally:
            writer.close()


Attack = Callable[[Target], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}


def attack(family: str) -> Callable[[Attack], Attack]:
    """Register an attack under its family and name."""

    def register(function: Attack) -> Attack:
        ATTACKS[f"{family}.{function.__name__}"] = function
        return function

    return register


async def again(work: Callable[[], Awaitable[Any]], at_once: int = 4) -> Counter[Any]:
    """Do something over and over, for `LASTS_S` seconds and `MOST` times at most.

    Returns how often each result came.
    """
    end, left = time.monotonic() + LASTS_S, MOST
    results: Counter[Any] = Counter()

    async def one() -> None:
        nonlocal left
        while left > 0 and time.monotonic() < end:
            left -= 1
            results[await work()] += 1

    await asyncio.gather(*(one() for _ in range(at_once)))
    return results


def expect(results: Counter[Any], *statuses: int) -> None:
    """Raise AssertionError unless all answers had one of these statuses, and there were some."""
    assert results, "nothing was answered"
    assert set(results) <= set(statuses), f"answers were {dict(results)}, not {statuses}"
