"""A `pigou` whose event loop has a thread that waits, as it says, for a FIFO nobody writes."""

from __future__ import annotations

#: To be run by `python -c`, with the FIFO and the arguments of `pigou`.
STUCK_COMMAND = """
import asyncio, sys
fifo, *rest = sys.argv[1:]
sys.argv[1:] = rest
run = asyncio.Runner.run

def stuck():
    print("stuck", flush=True)
    open(fifo)

def runs(self, work, **options):
    async def both():
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, loop.run_in_executor, None, stuck)
        return await work
    return run(self, both(), **options)

asyncio.Runner.run = runs
from pigou.cli import main
main()
"""
