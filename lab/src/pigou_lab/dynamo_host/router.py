"""The paper's artefact: Dynamo's Python router, with parameters per request from the regime."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from pigou.control.routing_controller import Parameters
from pigou_lab.dynamo_host import binding
from pigou_lab.dynamo_host.binding import KvRouter, Placement
from pigou_lab.dynamo_host.meters import Meters
from pigou_lab.dynamo_host.probe import TEMPERATURE, WEIGHTS, Honoured, ProbeVerdict, probe
from pigou_lab.dynamo_host.steering import SteeredRequest, Steering, shown

_log = logging.getLogger("pigou_lab.dynamo_host")
_OVERRIDE = "router_config_override"


class OverridesIgnored(RuntimeError):
    """The installed Dynamo takes per-request parameters and does not apply them."""

    def __init__(self, verdict: ProbeVerdict) -> None:
        super().__init__(
            f"this Dynamo does not honour the temperature of a single request: {verdict}. Run two "
            "or more frontends with different settings, and `python -m pigou_lab.dynamo_host "
            "switch` before them; or use a Dynamo that honours it (1.4.2 does)"
        )
        self.verdict = verdict


class AdaptiveRouter:
    """Drop-in for Dynamo's `KvRouter` with the regime's parameters (Georgiou 2026, Algorithm 1)."""

    def __init__(
        self,
        router: KvRouter,
        steering: Steering,
        verdict: ProbeVerdict,
        *,
        startup: Parameters | None = None,
        pretend: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Wrap a router; `start` probes it, and raises OverridesIgnored unless `pretend`."""
        self.verdict = verdict
        self.meters = Meters()
        self._router = router
        self._steering = steering
        self._startup = startup or Parameters(0.0, 1.0)
        self._clock = clock
        self._weight = ""
        if verdict.weight.verdict is Honoured.YES:
            self._weight = next(iter(verdict.weight.override))
        if not verdict.honoured:
            if not pretend:
                raise OverridesIgnored(verdict)
            _log.warning("%s; the start-up parameters stay in force", OverridesIgnored(verdict))
        elif not self._weight:
            _log.warning("the overlap weight stays as at start-up: %s", verdict.weight)

    @classmethod
    async def start(
        cls, router: KvRouter, steering: Steering, model: str, *, block_size: int,
        startup: Parameters | None = None, pretend: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> Self:  # fmt: skip
        """Probe a router and wrap it. Arguments and errors as those of `probe` and the class."""
        verdict = await probe(router, model, block_size=block_size)
        return cls(router, steering, verdict, startup=startup, pretend=pretend, clock=clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)

    @property
    def force(self) -> Parameters:
        """Parameters in force, whatever the controller wants."""
        return self._force(self._steering.parameters(self._clock()))

    async def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, float] | None = None,
        **options: Any,
    ) -> Placement:
        """Return (worker, data-parallel rank, cached blocks); a given override wins."""
        override = self._override(self.force, router_config_override)
        start = time.perf_counter()
        placement = await self._router.best_worker(token_ids, override, **options)
        self.meters.decided(time.perf_counter() - start)
        return placement

    async def generate(
        self,
        token_ids: Sequence[int],
        model: str,
        *,
        router_config_override: Mapping[str, float] | None = None,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """Route a prompt and stream the worker's answers; observes the first token."""
        run = self._steering.arrive(self._clock())
        override = self._override(self._force(run.parameters), router_config_override)
        try:
            stream = await self._router.generate(
                token_ids, model, router_config_override=override, **options
            )
        except BaseException:
            run.end(self._clock())
            raise
        return self._observed(stream, run)

    async def generate_from_request(
        self, request: Mapping[str, Any], **options: Any
    ) -> AsyncIterator[Any]:
        """Route a preprocessed request and stream the worker's answers."""
        run = self._steering.arrive(self._clock())
        body = dict(request)
        override = self._override(self._force(run.parameters), body.get(_OVERRIDE))
        if override:
            body[_OVERRIDE] = override
        try:
            stream = await self._router.generate_from_request(body, **options)
        except BaseException:
            run.end(self._clock())
            raise
        return self._observed(stream, run)

    def status(self) -> dict[str, Any]:
        """Return regime, wanted and real parameters, and the probe's evidence, ready for JSON."""
        wanted = self._steering.parameters(self._clock())
        signal = self._steering.signal
        return {
            "regime": self._steering.regime.value,
            "signal": None if math.isnan(signal) else signal,
            "wanted": shown(wanted),
            "in_force": shown(self._force(wanted)),
            "per_request": self.verdict.honoured,
            "probe": self.verdict.status(),
        }

    def _force(self, wanted: Parameters) -> Parameters:
        if not self.verdict.honoured:
            return self._startup
        if self._weight:
            return wanted
        return replace(wanted, overlap_weight=self._startup.overlap_weight)

    def _override(
        self, force: Parameters, given: Mapping[str, float] | None
    ) -> dict[str, float] | None:
        """Return the override for Dynamo; None if it changes nothing."""
        self.meters.routed(self._steering.regime, force, "router")
        if not self.verdict.honoured:
            return dict(given) if given else None
        override = {TEMPERATURE: force.temperature}
        if self._weight and not any(name in (given or {}) for name in WEIGHTS):
            override[self._weight] = force.overlap_weight
        return override | dict(given or {})

    async def _observed(
        self, stream: AsyncIterator[Any], run: SteeredRequest
    ) -> AsyncIterator[Any]:
        try:
            async for answer in stream:
                if answer.get("token_ids"):
                    run.first_token(self._clock())
                yield answer
        finally:
            run.end(self._clock())


#: Name of the one request that the probe sends; it reaches no model by name.
_MODEL = "pigou-probe"


def serve_router(steering: Steering, arguments: Sequence[str], *, pretend: bool) -> None:
    """Serve Dynamo's router inside `AdaptiveRouter`; DynamoMissing or OverridesIgnored."""
    service: Any = binding.load("dynamo.router.__main__")
    stock: Any = service.StandaloneRouterHandler

    class Handler(stock):  # type: ignore[misc]
        """Dynamo's handler with the wrapped router."""

        async def initialize(self) -> None:
            await super().initialize()
            await self.worker_client.wait_for_instances()
            config = service.parse_args(arguments)
            scale = getattr(config, "prefill_load_scale", None)
            startup = Parameters(config.router_temperature, 1.0 if scale is None else scale)
            self.kv_router: Any = await AdaptiveRouter.start(
                self.kv_router, steering, _MODEL, block_size=self.block_size, startup=startup,
                pretend=pretend,
            )  # fmt: skip
            where = self.runtime.endpoint(f"{config.namespace}.router.status")
            self.telling = asyncio.ensure_future(where.serve_endpoint(self.status))

        async def status(self, _: Any) -> AsyncIterator[dict[str, Any]]:
            yield self.kv_router.status()

    service.StandaloneRouterHandler = Handler
    sys.argv = ["dynamo.router", *arguments]
    service.main()
