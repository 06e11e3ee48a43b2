"""Dynamo's standalone router service (`python -m dynamo.router`) under Pigou's controller."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pigou.control.regimes.parameters import Parameters
from pigou.integrations.dynamo import binding
from pigou.integrations.dynamo.router import AdaptiveRouter
from pigou.integrations.dynamo.steering import Steering

#: Name of the one request that the probe sends; it reaches no model by name.
_MODEL = "pigou-probe"


def run(steering: Steering, arguments: Sequence[str], *, pretend: bool) -> None:
    """Serve Dynamo's router until it is told to stop, its router wrapped in `AdaptiveRouter`.

    Beside Dynamo's endpoints `generate`, `best_worker_id` and `get_overlap_scores`,
    `NAMESPACE.router.status` tells the regime, the parameters in force and the probe's evidence.

    Args:
        steering: says the parameters.
        arguments: of `python -m dynamo.router`.
        pretend: as of `AdaptiveRouter`.

    Raises:
        DynamoMissing: Dynamo is not installed.
        OverridesIgnored: this Dynamo ignores per-request parameters, and `pretend` is false.
    """
    service: Any = binding.load("dynamo.router.__main__")
    stock: Any = service.StandaloneRouterHandler

    class Handler(stock):  # type: ignore[misc]
        """Dynamo's handler, with the wrapped router in place of its own."""

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
