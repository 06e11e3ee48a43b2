"""gRPC server of an endpoint picker: ext_proc streams, health, TLS, and its fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from pigou.background import cancel
from pigou.config import ControlConfig
from pigou.fleet.config import FleetError
from pigou.fleet.serve import Serving
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.gateway.startup_shutdown import StageListener
from pigou.integrations.endpoint_picker import EndpointPicker
from pigou.integrations.endpoint_pools import EndpointPool, PoolFollower
from pigou.integrations.epp_config import EppConfig, certificate
from pigou.wire.names import url_host

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
#: Services of the health check that follow readiness, and those of the process alone.
_READY, _ALIVE = ("", "readiness", EXT_PROC), ("liveness",)
_SERVING, _NOT_SERVING = 1, 2


class _Processor(ext_proc.ExternalProcessorServicer):  # type: ignore[misc]
    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker

    async def Process(self, _: AsyncIterator[ProcessingRequest], context: Any) -> None:
        """Serve one HTTP request's stream."""

        async def receive() -> ProcessingRequest | None:
            message = await context.read()
            return None if message is grpc.aio.EOF else message

        await self._picker.process(receive, context.write)


class PickerServing(Serving):
    """An endpoint picker and its fleet; the gateway's pages are on a port of their own."""

    def __init__(
        self, epp: EppConfig, gateway: GatewayConfig, control: ControlConfig, fleet: FleetSetup,
        pool: EndpointPool | None = None, on_stage: StageListener | None = None,
    ) -> None:  # fmt: skip
        super().__init__(gateway, control, fleet, on_stage=on_stage)
        self._epp, self._pool = epp, pool
        self._started = False
        self._follower = PoolFollower(self.supervisor)
        self.picker = EndpointPicker(self.gateway, epp, self.may_pick)
        self.epp_port = 0  # known after `start`
        self._grpc: grpc.aio.Server | None = None

    def may_pick(self) -> bool:
        """True once the endpoints are known, unless another replica leads."""
        return self._started and (self._pool is None or self._pool.ready)

    async def start(self) -> None:
        """Listen, and start the fleet; until then readiness is NOT_SERVING."""
        self._grpc = server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", self.gateway.config.max_body + 2**20),
            ]
        )
        ext_proc.add_ExternalProcessorServicer_to_server(_Processor(self.picker), server)
        check = grpc.unary_unary_rpc_method_handler(
            self._check, StringValue.FromString, Int32Value.SerializeToString
        )
        health = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
        server.add_generic_rpc_handlers((health,))
        address = f"{url_host(self._epp.listen_host)}:{self._epp.listen_port}"
        try:
            if self._epp.plaintext:
                self.epp_port = server.add_insecure_port(address)
            else:
                self.epp_port = server.add_secure_port(
                    address, grpc.ssl_server_credentials([certificate(self._epp)])
                )
        except RuntimeError:
            raise FleetError(
                f"{address} cannot be listened at; give another --host or --port, or --port 0"
            ) from None
        await server.start()
        if self._pool is not None:
            pool = self._pool
            self._following = self.plane_driver.background.start(
                "endpoint pool", lambda: pool.follow(self._follower.apply)
            )
        await super().start()
        self._started = True

    async def stop(self) -> None:
        """Refuse new requests, let running ones end, then stop the fleet and the server."""
        if self._pool is not None:
            await cancel(self._following)
        await super().stop()
        if self._grpc is not None:
            await self._grpc.stop(1.0)

    async def _check(self, request: StringValue, context: Any) -> Int32Value:
        """`grpc.health.v1.Health/Check`, whose messages have one field each."""
        if request.value in _ALIVE:
            return Int32Value(value=_SERVING)
        if request.value not in _READY:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.value[:80]!r}")
        ready = self.may_pick() and not self.gateway.shutdown.begun
        return Int32Value(value=_SERVING if ready else _NOT_SERVING)
