"""A proxy's side of ext_proc streams, and a picker with scripted workers behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from tests.fleet.harness import WATCH
from tests.gateway.stub import Stub
from tests.lib.forked_python import Forks

from pigou.config import ControlConfig
from pigou.fleet.config import AttachedWorker
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.integrations.epp_config import EppConfig
from pigou.integrations.epp_server import PickerServing

DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
STREAMED, BUFFERED, NONE = ProcessingMode.STREAMED, ProcessingMode.BUFFERED, ProcessingMode.NONE
DESTINATION = "x-gateway-destination-endpoint"
SSE = {":status": "200", "content-type": "text/event-stream"}
JSON = {":status": "200", "content-type": "application/json"}


def chunk(text: str = "", **fields: Any) -> bytes:
    """One event of a worker's stream."""
    choice = {"index": 0, "text": text, "finish_reason": fields.pop("finish_reason", None)}
    document = {"id": "x", "choices": [choice] if text or choice["finish_reason"] else [], **fields}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    """The last event of a stream that reports its usage."""
    return chunk(usage={"prompt_tokens": prompt, "completion_tokens": completion})


def headers_of(headers: Mapping[str, str]) -> HeaderMap:
    return HeaderMap(
        headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    )


def completion(prompt: str = "Once upon a time", **fields: Any) -> bytes:
    return json.dumps({"model": "stub", "prompt": prompt, "max_tokens": 8, **fields}).encode()


@dataclass
class Picked:
    """What a picker answered to a request."""

    status: int = 0  # of an immediate response; 0 for none
    error: str = ""
    headers: dict[str, str] = field(default_factory=dict)  # for the worker, or with the status
    removed: list[str] = field(default_factory=list)
    metadata: str = ""  # the destination in the dynamic metadata
    clears: bool = False  # the route cache
    body: bytes | None = None  # that the worker gets; None if the proxy keeps its own
    sizes: list[int] = field(default_factory=list)  # of the body's chunks
    kinds: list[str] = field(default_factory=list)  # of the responses, in order
    ended: bool = False  # the body, or trailers

    @property
    def endpoints(self) -> list[str]:
        assert self.headers[DESTINATION] == self.metadata, "header and metadata differ"
        return self.metadata.split(",")


class EnvoyStream:
    """One HTTP request, as a proxy shows it to its external processor."""

    def __init__(self, call: Any, mode: int, response_mode: int) -> None:
        self.call, self.mode, self.response_mode = call, mode, response_mode
        self.first = True

    async def send(
        self, subset: Sequence[str] | str | None = None, served: str = "", **message: Any
    ) -> None:
        request = ProcessingRequest(**message)
        if self.first:
            request.protocol_config.CopyFrom(
                ProtocolConfiguration(
                    request_body_mode=self.mode, response_body_mode=self.response_mode,
                )
            )  # fmt: skip
            self.first = False
        spaces = request.metadata_context.filter_metadata
        if subset is not None:
            spaces["envoy.lb.subset_hint"][f"{DESTINATION}-subset"] = (
                subset if isinstance(subset, str) else list(subset)
            )
        if served:
            spaces["envoy.lb"][f"{DESTINATION}-served"] = served
        await self.call.write(request)

    async def get(self) -> ProcessingResponse:
        async with asyncio.timeout(10):
            answer = await self.call.read()
        assert answer is not grpc.aio.EOF, "the picker closed the stream"
        return answer

    async def ask(
        self, body: bytes | None = None, headers: Mapping[str, str] | None = None, *,
        path: str = "/v1/completions", pieces: int | Sequence[int] = 1, trailers: bool = False,
        subset: Sequence[str] | str | None = None,
    ) -> Picked:  # fmt: skip
        """Send a request, and return what the picker makes of it."""
        sent = {":path": path, ":method": "GET" if body is None else "POST", **(headers or {})}
        head = HttpHeaders(headers=headers_of(sent), end_of_stream=body is None)
        await self.send(request_headers=head, subset=subset)
        picked = Picked()
        if body is None or (self.mode in (BUFFERED, NONE, STREAMED)):
            if self._read(picked, await self.get()):
                return picked
            if self.mode == NONE or body is None:
                return picked
        assert body is not None
        cuts = (
            pieces
            if isinstance(pieces, Sequence)
            else range(0, max(1, len(body)), -(-max(1, len(body)) // pieces))
        )
        bounds = [*cuts, len(body)]
        count = len(bounds) - 1
        for number in range(count):
            part = body[bounds[number] : bounds[number + 1]]
            end = number == count - 1 and not trailers
            await self.send(request_body=HttpBody(body=part, end_of_stream=end))
        if trailers:
            await self.send(request_trailers=HttpTrailers(trailers=headers_of({"t": "1"})))
        while not picked.ended:
            if self._read(picked, await self.get()):
                return picked
            streams = self.mode == STREAMED and picked.kinds.count("request_body") == count
            picked.ended |= streams or (self.mode == BUFFERED and "request_body" in picked.kinds)
        return picked

    def _read(self, picked: Picked, answer: ProcessingResponse) -> bool:
        """Take an answer; return whether it ends the request."""
        kind = answer.WhichOneof("response")
        picked.kinds.append(kind)
        if kind == "immediate_response":
            now = answer.immediate_response
            picked.status, picked.error = now.status.code, now.body.decode()
            self._take(picked, now.headers)
            return True
        if kind == "request_trailers":
            picked.ended = True
            return False
        common = getattr(answer, kind).response
        self._take(picked, common.header_mutation)
        picked.clears |= common.clear_route_cache
        if answer.HasField("dynamic_metadata"):
            picked.metadata = answer.dynamic_metadata["envoy.lb"][DESTINATION]
        change = common.body_mutation.WhichOneof("mutation")
        if change == "streamed_response":
            part = common.body_mutation.streamed_response
            picked.body = (picked.body or b"") + part.body
            picked.sizes.append(len(part.body))
            picked.ended |= part.end_of_stream
        elif change == "body":
            picked.body = common.body_mutation.body
        return False

    def _take(self, picked: Picked, mutation: Any) -> None:
        for item in mutation.set_headers:
            picked.headers[item.header.key] = item.header.raw_value.decode()
        picked.removed += mutation.remove_headers

    async def reply(
        self, *parts: bytes, headers: Mapping[str, str] = SSE, served: str = "",
        trailers: bool = False, end: bool = True,
    ) -> tuple[dict[str, str], bytes]:  # fmt: skip
        """Send the worker's response; return the client's extra headers, and its body."""
        bare = not parts and end and not trailers
        head = HttpHeaders(headers=headers_of(headers), end_of_stream=bare)
        await self.send(response_headers=head, served=served)
        answer = await self.get()
        extra, body = Picked(), b""
        self._take(extra, answer.response_headers.response.header_mutation)
        for number, part in enumerate(parts):
            last = end and number == len(parts) - 1 and not trailers
            body += await self.pass_on(part, last)
        if trailers:
            await self.send(response_trailers=HttpTrailers())
            assert (await self.get()).WhichOneof("response") == "response_trailers"
        return extra.headers, body

    async def pass_on(self, part: bytes, end: bool = False) -> bytes:
        await self.send(response_body=HttpBody(body=part, end_of_stream=end))
        out = b""
        while True:
            common = (await self.get()).response_body.response
            if self.response_mode != DUPLEX:
                assert not common.HasField("body_mutation"), "only the duplex mode has bodies back"
                return part
            out += common.body_mutation.streamed_response.body
            if len(out) >= len(part):
                assert common.body_mutation.streamed_response.end_of_stream == end
                return out


@dataclass
class Picker:
    """A picker under test, its workers, and a proxy's channel to it."""

    serving: PickerServing
    stubs: list[Stub]
    channel: Any

    def at(self, number: int) -> str:
        return f"127.0.0.1:{self.stubs[number].port}"

    @asynccontextmanager
    async def stream(
        self, mode: int = DUPLEX, response_mode: int = DUPLEX
    ) -> AsyncIterator[EnvoyStream]:
        """Open a stream as for one HTTP request, and close it in good order."""
        call = ext_proc.ExternalProcessorStub(self.channel).Process()
        yield EnvoyStream(call, mode, response_mode)
        await call.done_writing()
        async with asyncio.timeout(10):
            assert await call.read() is grpc.aio.EOF

    async def ask(self, body: bytes | None = None, **options: Any) -> Picked:
        """Send one request, answered by a worker at once."""
        async with self.stream() as stream:
            picked = await stream.ask(body, **options)
            if not picked.status:
                await stream.reply(chunk(" a"), usage(4, 1))
            return picked

    async def health(self, service: str) -> int:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check", StringValue.SerializeToString, Int32Value.FromString
        )
        return (await check(StringValue(value=service))).value

    def load(self, number: int) -> int:
        """Streams that the control plane counts at a worker."""
        state = self.serving.plane_driver.plane.state
        return int(state.columns.decode_requests[state.row[f"attached-{number}"]])

    async def settled(self) -> None:
        """Wait until no request is under way."""
        async with asyncio.timeout(5):
            while self.serving.plane_driver.plane.state.requests:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def picker_of(
    *stubs: Stub, epp: EppConfig | None = None, control: ControlConfig | None = None,
    ready: bool = True, pool: Any = None, urls: Sequence[str] = (), prepare: Any = None,
    keys: Sequence[str] = (), **gateway: Any,
) -> AsyncIterator[Picker]:  # fmt: skip
    """A picker with these workers attached."""
    runners = [await stub.start() for stub in stubs]
    attach = [f"{stub.url},role={stub.role}" for stub in stubs] or list(urls)
    attach = [f"{url},key={key}" for url, key in zip(attach, keys, strict=True)] if keys else attach
    workers = [AttachedWorker.parse(text, number) for number, text in enumerate(attach)]
    serving = PickerServing(
        epp or EppConfig(listen_port=0, plaintext=True),
        GatewayConfig(port=0, strict=False, **gateway),
        control or ControlConfig(peer_reads=False),
        FleetSetup(workers=workers, watch=WATCH, forks=Forks()),
        pool=pool,
    )
    if prepare is not None:
        prepare(serving)
    try:
        await serving.start()
        if ready:
            async with asyncio.timeout(20):
                while len(serving.plane_driver.upstreams) < len(stubs):
                    await asyncio.sleep(0.02)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.epp_port}") as channel:
            yield Picker(serving, list(stubs), channel)
    finally:
        await serving.stop()
        for runner in runners:
            await runner.cleanup()
