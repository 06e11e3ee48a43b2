"""State machine of one ext_proc stream: messages of the proxy in, responses out, no I/O.

Seam: `envoy.service.ext_proc.v3`, endpoint picker protocol v1.0.0 of the Gateway API Inference
Extension. A stream is one HTTP request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from pigou.wire.errors import APIError, too_large

#: Versions that this follows.
SEAM = "ext_proc v3, endpoint picker protocol v1.0.0"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
#: Envoy itself tells it where `response_attributes` of its filter ask for it.
_FILTER, _ADDRESS = "envoy.filters.http.ext_proc", "upstream.address"
SUBSET = "x-gateway-destination-endpoint-subset"
_LB, _SUBSET_SPACE = "envoy.lb", "envoy.lb.subset_hint"
#: Bytes of a streamed chunk: proxies refuse more than 64 KiB in one.
MAX_CHUNK = 62_000
#: Modes of request bodies that the proxy sends without an answer to the headers, and whole ones.
_DUPLEX, _STREAMED = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.STREAMED
_WHOLE = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
Headers: TypeAlias = Mapping[str, str]


class PickRequest(msgspec.Struct, frozen=True):
    """A whole request, to be answered by `ExtProcStream.picked` or `refused`."""

    headers: Headers  # by lower-case name, repeated ones joined by commas
    body: bytes
    is_whole: bool = True  # False if the proxy may have cut the body
    subset: frozenset[str] | None = None  # endpoints to pick from, ip:port or ip; None for all


class EndpointPick(msgspec.Struct, frozen=True):
    """Where a request goes."""

    endpoints: str  # ip:port, fallbacks after commas
    headers: Headers = {}  # further request headers
    removed: tuple[str, ...] = ()  # request headers that the worker must not see
    body: bytes | None = None  # replaces the request's body; None keeps it


class ResponseStart(msgspec.Struct, frozen=True):
    """Head of the response."""

    headers: Headers
    end: bool  # no body follows

    @property
    def status(self) -> int:
        """HTTP status; 0 if the proxy did not say."""
        text = self.headers.get(":status", "")
        return int(text) if text.isdecimal() else 0


class ResponsePart(msgspec.Struct, frozen=True):
    """Bytes of the response."""

    data: bytes
    end: bool


Event: TypeAlias = PickRequest | ResponseStart | ResponsePart


class ExtProcStream:
    """Answers the messages of one stream.

    FULL_DUPLEX_STREAMED: the headers' answer waits for the whole request, and precedes its body.
    BUFFERED: headers are let pass, and the body's answer has the pick. STREAMED and NONE: picked by
    the headers alone, unless the proxy sends the body without waiting.

    Example:
        responses, event = stream.take(message)
        if isinstance(event, PickRequest):
            responses += stream.picked(EndpointPick("10.0.0.1:8000"))
    """

    def __init__(self, max_body: int) -> None:
        self.served = ""  # endpoint that served the request, once the proxy says it
        self.refused_by: APIError | None = None  # the error it was answered with
        self.reply: dict[str, str] = {}  # further response headers for the client
        self.reply_mode = _DUPLEX
        self._request_mode = _DUPLEX
        self._holds = True  # the headers' answer waits for the body
        self._max_body, self._size = max_body, 0
        self._headers: Headers = {}
        self._subset: frozenset[str] | None = None
        self._chunks: list[bytes] = []
        self._requested = False
        self.answered = False  # the pick was sent
        self._by = ""  # the message that the pick answers

    def take(self, message: ProcessingRequest) -> tuple[list[ProcessingResponse], Event | None]:
        """Take the proxy's next message; return what to send, and what happened."""
        kind = message.WhichOneof("request")
        if self.refused_by is not None or kind is None:
            return [], None
        if kind == "request_headers":
            return self._request_headers(message)
        if kind == "request_body":
            return self._request_body(message)
        if kind == "request_trailers":
            if self.answered or self._requested:
                return [ProcessingResponse(request_trailers=TrailersResponse())], None
            return [], self._ask(kind)
        return self._response(kind, message)

    def picked(self, pick: EndpointPick) -> list[ProcessingResponse]:
        """Return the answer to a `PickRequest`."""
        self.answered = True
        first = CommonResponse(clear_route_cache=True, header_mutation=self._mutation(pick))
        data = Struct()
        data.get_or_create_struct(_LB)[DESTINATION] = pick.endpoints
        if self._by == "request_headers":
            head = HeadersResponse(response=first)
            return [ProcessingResponse(request_headers=head, dynamic_metadata=data)]
        if self._request_mode in _WHOLE:
            if pick.body is not None:
                first.body_mutation.body = pick.body
            answer = BodyResponse(response=first)
            return [ProcessingResponse(request_body=answer, dynamic_metadata=data)]
        head = HeadersResponse(response=first)
        responses = [ProcessingResponse(request_headers=head, dynamic_metadata=data)]
        is_last = self._by == "request_body"
        if self._request_mode == _STREAMED:
            responses += self._chunk_answers(pick.body)
        else:
            body = b"".join(self._chunks) if pick.body is None else pick.body
            if body or is_last:
                responses += _passed("request_body", _DUPLEX, body, is_last)
        if not is_last:
            responses.append(ProcessingResponse(request_trailers=TrailersResponse()))
        self._chunks.clear()
        return responses

    def refused(self, error: APIError) -> list[ProcessingResponse]:
        """Return the error as the client's response; the stream is over."""
        self.refused_by = error
        self._chunks.clear()
        headers = {"content-type": "application/json", **error.headers, **self.reply}
        return [
            ProcessingResponse(
                immediate_response=ImmediateResponse(
                    status=HttpStatus(code=error.status),
                    headers=HeaderMutation(set_headers=_options(headers)),
                    body=error.body(),
                    details="pigou_epp",
                )
            )
        ]

    # --- request --------------------------------------------------------------------------------

    def _request_headers(
        self, message: ProcessingRequest
    ) -> tuple[list[ProcessingResponse], Event | None]:
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._request_mode, self.reply_mode = (
                config.request_body_mode, config.response_body_mode,
            )  # fmt: skip
            early = config.send_body_without_waiting_for_header_response
            self._holds = self._request_mode == _DUPLEX or (
                self._request_mode == _STREAMED and early
            )
        self._headers = read_headers(message.request_headers.headers)
        self._subset = _subset(message)
        if message.request_headers.end_of_stream:
            return [], self._ask("request_headers")
        if self._holds:
            return [], None
        if self._request_mode in _WHOLE:
            return [ProcessingResponse(request_headers=HeadersResponse())], None
        return [], self._ask("request_headers", is_whole=False)

    def _request_body(
        self, message: ProcessingRequest
    ) -> tuple[list[ProcessingResponse], Event | None]:
        part = message.request_body
        end = part.end_of_stream or part.end_of_stream_without_message
        if self._requested:
            return _passed("request_body", self._request_mode, part.body, end), None
        self._size += len(part.body)
        if self._size > self._max_body:
            return self.refused(too_large(self._max_body)), None
        self._chunks.append(part.body)
        if self._request_mode in _WHOLE:
            return [], self._ask("request_body", is_whole=end)
        return [], self._ask("request_body") if end else None

    def _ask(self, by: str, *, is_whole: bool = True) -> PickRequest:
        self._requested, self._by = True, by
        return PickRequest(self._headers, b"".join(self._chunks), is_whole, self._subset)

    def _chunk_answers(self, body: bytes | None) -> Iterator[ProcessingResponse]:
        """Answer the chunks of a STREAMED body, the first with what replaces all."""
        for number, _ in enumerate(self._chunks):
            answer = BodyResponse()
            if body is not None and number == 0:
                answer.response.body_mutation.body = body
            elif body is not None:
                answer.response.body_mutation.clear_body = True
            yield ProcessingResponse(request_body=answer)

    def _mutation(self, pick: EndpointPick) -> HeaderMutation:
        headers = {**pick.headers, DESTINATION: pick.endpoints}
        if pick.body is not None:
            headers["content-length"] = str(len(pick.body))
        return HeaderMutation(set_headers=_options(headers), remove_headers=pick.removed)

    # --- response -------------------------------------------------------------------------------

    def _response(
        self, kind: str, message: ProcessingRequest
    ) -> tuple[list[ProcessingResponse], Event | None]:
        if not self.served:
            served = _metadata(message, _LB, SERVED)
            address = message.attributes[_FILTER].fields[_ADDRESS].string_value
            self.served = served.strip() if isinstance(served, str) else address
        if kind == "response_headers":
            head = message.response_headers
            answer = HeadersResponse()
            if self.reply:
                answer.response.header_mutation.set_headers.extend(_options(self.reply))
            event = ResponseStart(read_headers(head.headers), head.end_of_stream)
            return [ProcessingResponse(response_headers=answer)], event
        if kind == "response_body":
            part = message.response_body
            end = part.end_of_stream or part.end_of_stream_without_message
            answers = _passed(kind, self.reply_mode, part.body, end)
            return answers, ResponsePart(part.body, end)
        return [ProcessingResponse(response_trailers=TrailersResponse())], ResponsePart(b"", True)


def read_headers(headers: HeaderMap) -> dict[str, str]:
    """Return headers by lower-case name, repeated ones joined by commas."""
    read: dict[str, str] = {}
    for header in headers.headers:
        name = header.key.lower()
        value = header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        read[name] = f"{read[name]},{value}" if name in read else value
    return read


def _options(headers: Headers) -> list[HeaderValueOption]:
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
        )
        for name, value in headers.items()
    ]


def _metadata(message: ProcessingRequest, space: str, name: str) -> object:
    """Return an entry of the proxy's metadata: text, a list of texts, or None if absent."""
    spaces = message.metadata_context.filter_metadata
    if space not in spaces or name not in spaces[space].fields:
        return None
    value = spaces[space].fields[name]
    if value.WhichOneof("kind") == "list_value":
        return [item.string_value for item in value.list_value.values]
    return value.string_value


def _subset(message: ProcessingRequest) -> frozenset[str] | None:
    """Return the endpoints that the proxy restricts a pick to; None for no restriction."""
    value = _metadata(message, _SUBSET_SPACE, SUBSET)
    if value is None:
        return None
    texts = value if isinstance(value, list) else [str(value)]
    items = (item.strip() for text in texts for item in text.split(","))
    return frozenset(item for item in items if item)


def _passed(kind: str, mode: int, data: bytes, end: bool) -> list[ProcessingResponse]:
    """Return the answers that let body bytes pass unchanged."""
    if mode != _DUPLEX:
        return [ProcessingResponse(**{kind: BodyResponse()})]
    answers = []
    for start in range(0, max(1, len(data)), MAX_CHUNK):
        part = StreamedBodyResponse(
            body=data[start : start + MAX_CHUNK],
            end_of_stream=end and start + MAX_CHUNK >= len(data),
        )
        common = CommonResponse(body_mutation=BodyMutation(streamed_response=part))
        answers.append(ProcessingResponse(**{kind: BodyResponse(response=common)}))
    return answers
