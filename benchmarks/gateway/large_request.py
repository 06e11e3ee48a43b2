"""Time to the first token of one tenant's stream beside one request of many prompts.

    python -m benchmarks.gateway.large_request [--prompts 1000] [--output 200] [--unsplit]

`--unsplit` sends the large request to one worker as a whole, as if it were one sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import aiohttp

from pigou.config import ControlConfig
from pigou.fleet.config import WatchConfig
from pigou.fleet.serve import Serving
from pigou.fleet.sources.local import WorkerTemplate, start_workers
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.gateway.proxy import sequences

TEXT = "/v1/completions"


async def first_token_s(session: aiohttp.ClientSession, url: str, number: int) -> tuple[float, int]:
    """Return the seconds to the first chunk of a stream, and the tokens of the whole."""
    body = {"prompt": f"Request {number}: once upon a time there was", "max_tokens": 16,
            "stream": True, "ignore_eos": True}  # fmt: skip
    began, first, tokens = time.perf_counter(), 0.0, 0
    async with session.post(url + TEXT, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                tokens += 1
    return first, tokens


async def measure(arguments: argparse.Namespace) -> None:
    """Run the fleet, and print the figures."""
    if arguments.unsplit:
        sequences.splits = lambda run: False  # noqa: ARG005
    template = WorkerTemplate(arguments=tuple(arguments.worker_arguments))
    workers = start_workers([template], {"": (0, 0, arguments.workers)})
    serving = Serving(
        GatewayConfig(port=0),
        ControlConfig(),
        FleetSetup(workers=workers, watch=WatchConfig(start=600.0)),
    )
    await serving.start()
    url = f"http://127.0.0.1:{serving.port}"
    unlimited = aiohttp.ClientTimeout(total=None)
    try:
        async with aiohttp.ClientSession(timeout=unlimited) as session:
            await series(session, url, 2)
            report("idle fleet", await series(session, url, arguments.streams))
            large: dict[str, Any] = {
                "prompt": [f"{n} is a number, and the next" for n in range(arguments.prompts)],
                "max_tokens": arguments.output,
                "ignore_eos": True,
                "stream": True,
            }
            going = asyncio.create_task(swallow(session, url, large))
            await asyncio.sleep(arguments.after)
            name = f"beside {arguments.prompts} prompts x {arguments.output} tokens"
            report(name, await series(session, url, arguments.streams))
            running = serving.plane_driver.plane.state.columns.decode_requests.tolist()
            print(f"sequences at the workers: {running}; large request over: {going.done()}")
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)
    finally:
        await serving.stop()


async def series(session: aiohttp.ClientSession, url: str, count: int) -> list[float]:
    """Return the seconds to the first token of streams, one after another."""
    found = []
    for number in range(count):
        try:
            async with asyncio.timeout(120):
                found.append((await first_token_s(session, url, number))[0])
        except TimeoutError:
            found.append(120.0)
            break
    return found


async def swallow(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    """Read a stream to its end."""
    async with session.post(url + TEXT, json=body) as response:
        async for _ in response.content.iter_any():
            pass


def report(name: str, seconds: list[float]) -> None:
    """Print median and most of the first tokens."""
    middle, most = statistics.median(seconds), max(seconds)
    print(f"{name}: first token {middle:.3f} s (most {most:.3f} s, {len(seconds)} streams)")


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--after", type=float, default=5.0, help="seconds before streams begin")
    parser.add_argument("--unsplit", action="store_true")
    parser.add_argument("worker_arguments", nargs="*", help="of `pigou worker`, after --")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
