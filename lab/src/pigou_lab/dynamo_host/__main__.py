"""Command line: `python -m pigou_lab.dynamo_host {probe,switch,route,attribute}`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pigou.cli.option_values import named
from pigou.config import ConfigError
from pigou.stop_signals import END_S, StopSignals
from pigou_lab.dynamo_host import binding
from pigou_lab.dynamo_host.attribution import RequestLedger
from pigou_lab.dynamo_host.event_plane import Envelope, EventPlane
from pigou_lab.dynamo_host.probe import Honoured, probe
from pigou_lab.dynamo_host.router import OverridesIgnored, serve_router
from pigou_lab.dynamo_host.steering import Steering
from pigou_lab.dynamo_host.switch import Frontend, Switch, serve, ticking

_IGNORED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        return int(options.run(options))
    except OverridesIgnored as error:
        print(f"pigou dynamo: {error}", file=sys.stderr)
        return _IGNORED
    except (ConfigError, binding.DynamoMissing, OSError) as error:
        print(f"pigou dynamo: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pigou_lab.dynamo_host",
        description="Pigou's controller for NVIDIA Dynamo.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("probe", help="Tell whether per-request overrides are honoured.")
    _runtime(one)
    one.add_argument("--model", default="pigou-probe", help="Name that the test request carries.")
    one.add_argument("--calls", type=int, default=100, help="Queries of each kind.")
    one.set_defaults(run=_probe)

    one = commands.add_parser("switch", help="Switch between frontends by the regime.")
    one.add_argument("--frontend", action="append", default=[],
                     metavar="URL,temperature=T[,overlap-weight=W]",
                     help="A frontend and how it was started; give two or more.")  # fmt: skip
    one.add_argument("--host", default="127.0.0.1")
    one.add_argument("--port", type=int, default=8000)
    _saturation(one)
    one.set_defaults(run=_switch)

    one = commands.add_parser(
        "route", help="Serve Dynamo's router with the regime's parameters in every request.",
        epilog="Options after -- are those of `python -m dynamo.router`.",
    )  # fmt: skip
    one.add_argument("--pretend", action="store_true",
                     help="Serve although this Dynamo ignores overrides, and say so.")  # fmt: skip
    _saturation(one)
    one.add_argument("rest", nargs="*", metavar="-- OPTIONS")
    one.set_defaults(run=_route)

    one = commands.add_parser("attribute", help="Print which worker served each request.")
    one.add_argument("--folder", type=Path, help="Folder of file discovery (DYN_FILE_KV).")
    one.add_argument("--endpoint", action="append", default=[], help="ZMQ address to join.")
    one.set_defaults(run=_attribute)
    return parser


def _runtime(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", default="dynamo.backend.generate",
                        help="Endpoint of the workers: namespace.component.endpoint.")  # fmt: skip
    parser.add_argument("--block-size", type=int, default=16, help="Tokens in a KV block.")
    parser.add_argument("--discovery-backend", default="file",
                        choices=("file", "etcd", "kubernetes", "mem"))  # fmt: skip
    parser.add_argument("--request-plane", default="tcp", choices=("tcp", "nats"))
    parser.add_argument("--event-plane", default="zmq", choices=("zmq", "nats"))


def _saturation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--controller", default="regime", metavar="NAME[,KEY=VALUE]...",
                        help="Who sets the parameters: regime, interpolated, bandit, static; "
                        "such as regime,table.transition.temperature=0.5.")  # fmt: skip
    parser.add_argument("--detector", default="paper", metavar="NAME[,KEY=VALUE]...",
                        help="Who tells the regime: paper, cusum, ...; such as paper,theta1=1. "
                        "Times of the detector in nanoseconds, thresholds in seconds.")  # fmt: skip


def _steering(options: argparse.Namespace) -> Steering:
    return Steering.of(
        _named("controller", options.controller), _named("detector", options.detector)
    )


def _named(what: str, text: str) -> dict[str, Any]:
    """Parse `NAME[,key=value]...`; a dot in a key reaches a nested parameter."""
    name, params = named(what, text)
    return {what: name, **params}


def _probe(options: argparse.Namespace) -> int:
    async def ask() -> int:
        runtime = binding.runtime(
            options.discovery_backend, options.request_plane, options.event_plane
        )
        try:
            router = await binding.router(runtime, options.endpoint, options.block_size)
            verdict = await probe(
                router, options.model, block_size=options.block_size, calls=options.calls
            )
        finally:
            runtime.shutdown()
        print(msgspec.json.format(msgspec.json.encode(verdict.status())).decode())
        codes = {Honoured.YES: 0, Honoured.NO: _IGNORED, Honoured.UNKNOWN: 4}
        return codes[verdict.temperature.verdict]

    code = asyncio.run(ask())
    sys.stdout.flush()
    # Threads of Dynamo's runtime may crash an interpreter that ends in order (seen with 1.4.2).
    os._exit(code)


def _switch(options: argparse.Namespace) -> int:
    steering = _steering(options)
    switch = Switch([Frontend.parse(text) for text in options.frontend], steering)

    async def work() -> None:
        runner = await serve(switch, options.host, options.port)
        ticker = asyncio.create_task(ticking(steering))
        print(f"The switch is at http://{options.host}:{runner.addresses[0][1]}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            ticker.cancel()
            await runner.cleanup()

    return _until_signal(work())


def _route(options: argparse.Namespace) -> int:
    serve_router(_steering(options), options.rest, pretend=options.pretend)
    return 0


def _attribute(options: argparse.Namespace) -> int:
    if options.folder is None and not options.endpoint:
        raise ConfigError("attribute: give --folder, or --endpoint for each publisher")
    ledger = RequestLedger()
    printed: set[tuple[str, int]] = set()

    def sink(message: Envelope) -> None:
        for event in ledger.take(message):
            if (event.request, event.worker) not in printed:
                printed.add((event.request, event.worker))
                line = {
                    "request": event.request, "worker": str(event.worker),
                    "rank": event.rank, "told_by": "worker" if event.own else "router",
                }  # fmt: skip
                print(msgspec.json.encode(line).decode(), flush=True)

    async def work() -> None:
        async with EventPlane(sink, folder=options.folder, endpoints=options.endpoint):
            await asyncio.Event().wait()

    return _until_signal(work())


def _until_signal(work: Coroutine[Any, Any, None]) -> int:
    async def both() -> None:
        task = asyncio.create_task(work)
        with StopSignals(task.cancel, END_S), contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(both())
    return 0


if __name__ == "__main__":
    sys.exit(main())
