"""Runs one attack in a process of its own: `python -m tests.hostile.run NAME URL KEY`."""

from __future__ import annotations

import asyncio
import sys

from tests.hostile import bodies, connections, grammars, machine, sharing, upstreams
from tests.hostile.registry import ATTACKS, Target

#: The files of attacks: importing one registers what it has.
FILES = (bodies, connections, grammars, machine, sharing, upstreams)


async def main(name: str, url: str, key: str) -> None:
    """Attack, for some seconds at most."""
    async with asyncio.timeout(60):
        await ATTACKS[name](Target(url, key))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
