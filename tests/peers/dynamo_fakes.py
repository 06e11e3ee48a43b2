"""Stand-ins for Dynamo where no real one is needed: a router, a controller, frontends."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from pigou.control.routing_controller import E2ESample
from pigou.control.saturation.regime import Regime, TTFTSample
from pigou_lab.dynamo_host.steering import SteeredRequest, Steering
from pigou_lab.routing_controllers import RegimeConfig, RegimeController, RegimeTable

TEMPERATURE = "router_temperature"
WEIGHT = "prefill_load_scale"
#: The paper's Table 2.
PAPER = RegimeTable()


class FakeRouter:
    """Routes as Dynamo 1.x does, on idle workers of which one holds every prompt it has seen.

    Attributes:
        overrides: those of each call, as they came.
        workers: ids.
    """

    def __init__(
        self, workers: int = 4, *, honours: bool = True, temperature: float = 0.0,
        cached: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        self.workers = list(range(10, 10 + workers))
        self.overrides: list[Mapping[str, float] | None] = []
        self.freed: list[str] = []
        self._honours = honours
        self._temperature = temperature
        self._cached = cached
        self._held: set[tuple[int, ...]] = set()
        self._random = random.Random(seed)

    async def best_worker(
        self, token_ids: Sequence[int], router_config_override: Any = None, **_: Any
    ) -> tuple[int, int, int]:
        self.overrides.append(router_config_override)
        given = router_config_override if self._honours and router_config_override else {}
        temperature = given.get(TEMPERATURE, self._temperature)
        held = tuple(token_ids) in self._held
        gap = held and given.get(WEIGHT, 1.0) > 0
        if not gap:
            return self._random.choice(self.workers), 0, 16 * held
        if temperature == 0:
            return self.workers[0], 0, 16
        weights = [1.0] + [math.exp(-1 / temperature)] * (len(self.workers) - 1)
        return self._random.choices(self.workers, weights)[0], 0, 16

    async def generate(
        self, token_ids: Sequence[int], model: str, *, router_config_override: Any = None,
        **_: Any,
    ) -> AsyncIterator[Any]:  # fmt: skip
        self.overrides.append(router_config_override)
        if self._cached:
            self._held.add(tuple(token_ids))
        return self._answers()

    async def generate_from_request(
        self, request: Mapping[str, Any], **_: Any
    ) -> AsyncIterator[Any]:
        self.overrides.append(request.get("router_config_override"))
        return self._answers()

    async def get_potential_loads(self, token_ids: Sequence[int]) -> list[dict[str, int]]:
        return [{"worker_id": each, "dp_rank": 0, "potential_decode_blocks": 3}
                for each in self.workers]  # fmt: skip

    async def free(self, request: str) -> None:
        self.freed.append(request)

    async def _answers(self) -> AsyncIterator[Any]:
        yield {"token_ids": []}
        yield {"token_ids": [1]}
        yield {"token_ids": [2], "finish_reason": "length"}


class ScriptedDetector:
    """Tells the regime that it is told."""

    signal = float("nan")
    thresholds = (1.0, 2.0)

    def __init__(self, regime: Regime) -> None:
        self.regime = regime

    def update(self, now: int, sample: TTFTSample) -> Regime:
        return self.regime

    def tick(self, now: int, waiting: int) -> Regime:
        return self.regime


class ScriptedSteering(Steering):
    """The paper's table over a regime that is set by hand; writes down what it hears."""

    def __init__(self, regime: Regime = Regime.BELOW) -> None:
        self.script = ScriptedDetector(regime)
        self.heard: list[str] = []
        super().__init__(self.script, RegimeController(RegimeConfig(), self.script))

    def to(self, regime: Regime) -> None:
        self.script.regime = regime

    def arrive(self, now: int) -> SteeredRequest:
        self.heard.append("arrived")
        return super().arrive(now)

    def first_token(self, now: int, sample: TTFTSample) -> None:
        self.heard.append("first")
        super().first_token(now, sample)

    def end(self, now: int, finish: E2ESample | None) -> None:
        self.heard.append("ended" if finish else "left")
        super().end(now, finish)


class FakeFrontend:
    """An HTTP server that streams as Dynamo's frontend does.

    Attributes:
        requests: bodies that came.
        cut: streams whose reader left.
        gate: streams go on to their end while it is set.
        break_after: cut the connection after so many chunks; negative never.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[Any] = []
        self.headers: list[Mapping[str, str]] = []
        self.cut = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.break_after = -1
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeFrontend:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name}]}, headers={"x-from": self.name})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.break_after == 0:
            assert request.transport is not None
            request.transport.abort()
        if not body.get("stream"):
            return web.json_response({"from": self.name}, status=body.get("status", 200))
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        try:
            for number in range(4):
                if number == self.break_after:
                    assert request.transport is not None
                    request.transport.abort()
                await reply.write(b"data: %d %b\n\n" % (number, self.name.encode()))
                if number == 1:
                    await self.gate.wait()
            await reply.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.cut += 1
            raise
        return reply
