"""Run a gateway and its fleet from a JSON description; what `pigou serve` does, less its options.

Tests use it where a fleet needs what the command line does not offer: workers that differ, or a
watch that is quick enough for a test.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import msgspec
import uvloop
from tests.lib.forked_python import Forks, Popen

from pigou.config import ControlConfig
from pigou.fleet.config import AttachedWorker, LocalWorker, WatchConfig
from pigou.fleet.peers.bus import NatsBus, PeersConfig
from pigou.fleet.registry.registry import open_registry
from pigou.fleet.serve import Serving
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.wire.fleet_secret import FleetSecret


async def main(settings: dict[str, Any]) -> None:
    workers: list[LocalWorker | AttachedWorker] = [
        *(msgspec.convert(each, LocalWorker) for each in settings["workers"]),
        *(AttachedWorker.parse(text, i) for i, text in enumerate(settings["attach"])),
    ]
    secret, url = FleetSecret.given(), settings.get("registry", "")
    serving = Serving(
        msgspec.convert(settings["gateway"], GatewayConfig),
        msgspec.convert(settings["control"], ControlConfig),
        FleetSetup(
            workers=workers,
            watch=msgspec.convert(settings["watch"], WatchConfig),
            secret=secret,
            registry=open_registry(url, secret) if url else None,
            prefill_queue=settings.get("prefill_queue", ""),
            forks=Forks(),
        ),
    )
    if peers := settings.get("peers"):
        serving.join_peers(NatsBus(PeersConfig(peers=peers).address(), "pigou"))
    await serving.run(lambda: print(json.dumps({"port": serving.port}), flush=True))


if __name__ == "__main__":
    Popen.server()  # before there are threads
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(json.loads(sys.argv[1])))
