"""State machine of one ext_proc stream: messages of the proxy in, responses out, no I/O.

Seam: `envoy.service.ext_proc.v3`, endpoint picker protocol v1.0.0 of the Gateway API Inference
Extension. A stream is one HTTP request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from pigou.wire.errors import APIError, too_large

#: Versions that this follows.
SEAM = "ext_proc v3, endpoint picker protocol v1.0.0"
DESTINATION = "x-gateway-destination-endpoint"
_LB, _SUBSET_SPACE = "envoy.lb", "envoy.lb.subset_hint"
#: Envoy itself tells who served where `response_attributes` of its filter ask for it.
_FILTER, _ADDRESS = "envoy.filters.http.ext_proc", "upstream.address"
#: Bytes of a streamed chunk: proxies refuse more than 64 KiB in one.
MAX_CHUNK = 62_000
_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_WHOLE = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)
Headers: TypeAlias = Mapping[str, str]


class PickRequest(msgspec.Struct, frozen=True):
    """A request, to be answered by `ExtProcStream.picked` or `refused`."""

    headers: Headers  # by lower-case name, repeated ones joined by commas
    body: bytes
    is_whole: bool = True  # False if the proxy may have cut the body, or does not show it
    subset: frozenset[str] | None = None  # endpoints to pick from, ip:port or ip; None for all


class EndpointPick(msgspec.Struct, frozen=True):
    """Where a request goes."""

    endpoints: str  # ip:port, fallbacks after commas
    headers: Headers = {}  # further request headers
    removed: tuple[str, ...] = ()  # request headers that the worker must not see
    body: bytes | None = None  # replaces the request's body; None keeps it


class ResponseStart(msgspec.Struct, frozen=True):
    """Status (0 if unknown) and headers of the response; `end` if no body follows."""

    status: int
    headers: Headers
    end: bool


class ResponsePart(msgspec.Struct, frozen=True):
    """Bytes of the response."""

    data: bytes
    end: bool


Event: TypeAlias = PickRequest | ResponseStart | ResponsePart
Step: TypeAlias = tuple[list[pb.ProcessingResponse], Event | None]


class ExtProcStream:
    """Answers the messages of one stream.

    FULL_DUPLEX_STREAMED: the headers' answer waits for the whole request, and precedes its body.
    BUFFERED: headers are let pass, and the body's answer has the pick. STREAMED and NONE: picked by
    the headers alone.

    Example:
        responses, event = stream.take(message)
        if isinstance(event, PickRequest):
            responses += stream.picked(EndpointPick("10.0.0.1:8000"))
    """

    def __init__(self, max_body: int) -> None:
        self.served = ""  # endpoint that served the request, once the proxy says it
        self.refused_by: APIError | None = None
        self.answered = False  # the pick was sent
        self.reply: dict[str, str] = {}  # further response headers for the client
        self.request_mode = self.reply_mode = _DUPLEX
        self._max_body, self._size = max_body, 0
        self._headers: Headers = {}
        self._subset: frozenset[str] | None = None
        self._chunks: list[bytes] = []
        self._by = ""  # message that the pick answers; empty before it

    def take(self, message: pb.ProcessingRequest) -> Step:
        """Take the proxy's next message; return what to send, and what happened."""
        kind = message.WhichOneof("request")
        if self.refused_by is not None or kind is None:
            return [], None
        if kind == "request_headers":
            return self._request_headers(message)
        if kind == "request_body":
            return self._request_body(message.request_body)
        if kind == "request_trailers":
            if self._by:
                return [pb.ProcessingResponse(request_trailers=pb.TrailersResponse())], None
            return [], self._ask(kind)
        return self._response(kind, message)

    def picked(self, pick: EndpointPick) -> list[pb.ProcessingResponse]:
        """Return the answer to a `PickRequest`."""
        self.answered = True
        headers = {**pick.headers, DESTINATION: pick.endpoints}
        if pick.body is not None:
            headers["content-length"] = str(len(pick.body))
        common = pb.CommonResponse(
            clear_route_cache=True,
            header_mutation=pb.HeaderMutation(
                set_headers=_options(headers), remove_headers=pick.removed
            ),
        )
        metadata = Struct()
        metadata.get_or_create_struct(_LB)[DESTINATION] = pick.endpoints
        if self._by == "request_body" and self.request_mode in _WHOLE:
            if pick.body is not None:
                common.body_mutation.body = pick.body
            answer = pb.BodyResponse(response=common)
            return [pb.ProcessingResponse(request_body=answer, dynamic_metadata=metadata)]
        head = pb.HeadersResponse(response=common)
        responses = [pb.ProcessingResponse(request_headers=head, dynamic_metadata=metadata)]
        body = b"".join(self._chunks) if pick.body is None else pick.body
        is_last = self._by == "request_body"
        if is_last or (body and self._by == "request_trailers"):
            responses += _passed("request_body", _DUPLEX, body, is_last)
        if self._by == "request_trailers":
            responses.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        self._chunks.clear()
        return responses

    def refused(self, error: APIError) -> list[pb.ProcessingResponse]:
        """Return the error as the client's response; the stream is over."""
        self.refused_by = error
        self._chunks.clear()
        headers = {"content-type": "application/json", **error.headers, **self.reply}
        now = pb.ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=pb.HeaderMutation(set_headers=_options(headers)),
            body=error.body(),
            details="pigou_epp",
        )
        return [pb.ProcessingResponse(immediate_response=now)]

    def _request_headers(self, message: pb.ProcessingRequest) -> Step:
        if message.HasField("protocol_config"):
            self.request_mode = message.protocol_config.request_body_mode
            self.reply_mode = message.protocol_config.response_body_mode
        self._headers = _read_headers(message.request_headers.headers)
        self._subset = _subset(message)
        if message.request_headers.end_of_stream:
            return [], self._ask("request_headers")
        if self.request_mode == _DUPLEX:
            return [], None
        if self.request_mode in _WHOLE:
            return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())], None
        return [], self._ask("request_headers", is_whole=False)

    def _request_body(self, part: pb.HttpBody) -> Step:
        end = part.end_of_stream or part.end_of_stream_without_message
        if self._by:
            return _passed("request_body", self.request_mode, part.body, end), None
        self._size += len(part.body)
        if self._size > self._max_body:
            return self.refused(too_large(self._max_body)), None
        self._chunks.append(part.body)
        if end or self.request_mode in _WHOLE:
            return [], self._ask("request_body", is_whole=end)
        return [], None

    def _ask(self, by: str, *, is_whole: bool = True) -> PickRequest:
        self._by = by
        return PickRequest(self._headers, b"".join(self._chunks), is_whole, self._subset)

    def _response(self, kind: str, message: pb.ProcessingRequest) -> Step:
        if not self.served:
            served = _metadata(message, _LB, f"{DESTINATION}-served")
            address = message.attributes[_FILTER].fields[_ADDRESS].string_value
            self.served = served.strip() if isinstance(served, str) else address
        if kind == "response_headers":
            headers = _read_headers(message.response_headers.headers)
            answer, status = pb.HeadersResponse(), headers.get(":status", "")
            if self.reply:
                answer.response.header_mutation.set_headers.extend(_options(self.reply))
            start = ResponseStart(
                int(status) if status.isdecimal() else 0, headers,
                message.response_headers.end_of_stream,
            )  # fmt: skip
            return [pb.ProcessingResponse(response_headers=answer)], start
        if kind == "response_body":
            part = message.response_body
            end = part.end_of_stream or part.end_of_stream_without_message
            return _passed(kind, self.reply_mode, part.body, end), ResponsePart(part.body, end)
        trailers = pb.ProcessingResponse(response_trailers=pb.TrailersResponse())
        return [trailers], ResponsePart(b"", True)


def _read_headers(headers: HeaderMap) -> dict[str, str]:
    """Return headers by lower-case name, repeated ones joined by commas."""
    read: dict[str, str] = {}
    for header in headers.headers:
        name = header.key.lower()
        value = header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        read[name] = f"{read[name]},{value}" if name in read else value
    return read


def _options(headers: Headers) -> list[HeaderValueOption]:
    overwrite = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    values = (HeaderValue(key=name, raw_value=text.encode()) for name, text in headers.items())
    return [HeaderValueOption(header=value, append_action=overwrite) for value in values]


def _metadata(message: pb.ProcessingRequest, space: str, name: str) -> object:
    """Return an entry of the proxy's metadata: text, a list of texts, or None if absent."""
    spaces = message.metadata_context.filter_metadata
    if space not in spaces or name not in spaces[space].fields:
        return None
    value = spaces[space].fields[name]
    if value.WhichOneof("kind") == "list_value":
        return [item.string_value for item in value.list_value.values]
    return value.string_value


def _subset(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """Return the endpoints that the proxy restricts a pick to; None for no restriction."""
    value = _metadata(message, _SUBSET_SPACE, f"{DESTINATION}-subset")
    if value is None:
        return None
    texts = value if isinstance(value, list) else [str(value)]
    items = (item.strip() for text in texts for item in text.split(","))
    return frozenset(item for item in items if item)


def _passed(kind: str, mode: int, data: bytes, end: bool) -> list[pb.ProcessingResponse]:
    """Return the answers that let body bytes pass unchanged."""
    if mode != _DUPLEX:
        return [pb.ProcessingResponse(**{kind: pb.BodyResponse()})]
    answers = []
    for start in range(0, max(1, len(data)), MAX_CHUNK):
        stop = start + MAX_CHUNK
        part = pb.StreamedBodyResponse(
            body=data[start:stop], end_of_stream=end and stop >= len(data)
        )
        common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=part))
        answers.append(pb.ProcessingResponse(**{kind: pb.BodyResponse(response=common)}))
    return answers
