"""The attacks by name, and what they are aimed at."""

from __future__ import annotations

import asyncio
import json
import time
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

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        parts = urlsplit(self.url)
        assert parts.hostname == "127.0.0.1"
        return await asyncio.open_connection("127.0.0.1", parts.port)

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
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            reader, writer = await self.connect()
        except OSError:
            return 0
        try:
            writer.write(self.head(len(data), *headers, key=key).encode() + data)
            async with asyncio.timeout(wait_s):
                line = await reader.readline()
            return int(line.split()[1]) if line else 0
        except (OSError, TimeoutError, ValueError, IndexError):
            return 0
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


async def again(work: Callable[[], Awaitable[object]], at_once: int = 4) -> None:
    """Do something over and over, for `LASTS_S` seconds and `MOST` times at most."""
    end, left = time.monotonic() + LASTS_S, MOST

    async def one() -> None:
        nonlocal left
        while left > 0 and time.monotonic() < end:
            left -= 1
            await work()

    await asyncio.gather(*(one() for _ in range(at_once)))
