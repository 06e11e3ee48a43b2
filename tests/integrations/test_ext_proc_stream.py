"""The rules of one ext_proc stream, without a network; endpoint picker protocol v1.0.0."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("envoy", reason="xds-protos is not installed: pip install '.[epp]'")

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.integrations.ext_proc_stream import (
    DESTINATION,
    MAX_CHUNK,
    EndpointPick,
    ExtProcStream,
    PickRequest,
    ResponsePart,
    ResponseStart,
)
from pigou.wire.errors import APIError

DUPLEX, BUFFERED = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED
STREAMED, NONE = ProcessingMode.STREAMED, ProcessingMode.NONE
PARTIAL = ProcessingMode.BUFFERED_PARTIAL
PICK = EndpointPick("10.0.0.1:8000,10.0.0.2:8000")


def head(
    mode: int | None = None, *, reply: int = DUPLEX, end: bool = False,
    subset: object = None, **headers: str,
) -> ProcessingRequest:  # fmt: skip
    values = [
        HeaderValue(key=k.replace("_", "-"), raw_value=v.encode()) for k, v in headers.items()
    ]
    shown = HttpHeaders(headers=HeaderMap(headers=values), end_of_stream=end)
    message = ProcessingRequest(request_headers=shown)
    if mode is not None:
        message.protocol_config.CopyFrom(
            ProtocolConfiguration(
                request_body_mode=mode, response_body_mode=reply,
            )
        )  # fmt: skip
    if subset is not None:
        space = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        space[f"{DESTINATION}-subset"] = subset
    return message


def body(data: bytes, *, end: bool = True) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=end))


def kinds(responses: list[ProcessingResponse]) -> list[str]:
    return [response.WhichOneof("response") for response in responses]


def asked(stream: ExtProcStream, *messages: ProcessingRequest) -> PickRequest:
    """Send messages that get no answer but the last, which asks for a pick."""
    for message in messages[:-1]:
        assert stream.take(message) == ([], None)
    responses, event = stream.take(messages[-1])
    assert responses == []
    assert isinstance(event, PickRequest)
    return event


def streamed(responses: list[ProcessingResponse]) -> list[tuple[bytes, bool]]:
    return [
        (part.body, part.end_of_stream)
        for response in responses
        if response.WhichOneof("response") == "request_body"
        for part in [response.request_body.response.body_mutation.streamed_response]
    ]


@pytest.mark.parametrize("mode", [DUPLEX, None])
def test_in_duplex_the_headers_are_answered_after_the_whole_body_and_before_it(mode: int) -> None:
    stream = ExtProcStream(1000)
    wanted = asked(stream, head(mode, a="1"), body(b"ab", end=False), body(b"cd"))
    assert (wanted.headers, wanted.body) == ({"a": "1"}, b"abcd")
    responses = stream.picked(PICK)
    assert kinds(responses) == ["request_headers", "request_body"]
    assert streamed(responses) == [(b"abcd", True)]


def test_header_and_metadata_name_the_same_endpoints_and_the_route_is_chosen_again() -> None:
    stream = ExtProcStream(1000)
    asked(stream, head(DUPLEX), body(b"x"))
    first = stream.picked(EndpointPick(PICK.endpoints, {"x-b": "2"}, ("x-c",)))[0]
    common = first.request_headers.response
    values = {o.header.key: o.header.raw_value.decode() for o in common.header_mutation.set_headers}
    assert values == {DESTINATION: PICK.endpoints, "x-b": "2"}
    assert first.dynamic_metadata["envoy.lb"][DESTINATION] == PICK.endpoints
    assert common.clear_route_cache
    assert common.header_mutation.remove_headers == ["x-c"]
    overwrites = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert {o.append_action for o in common.header_mutation.set_headers} == {overwrites}


def test_no_chunk_is_larger_than_a_proxy_takes() -> None:
    data = bytes(range(256)) * 1000
    stream = ExtProcStream(len(data))
    asked(stream, head(DUPLEX), body(data))
    parts = streamed(stream.picked(PICK))
    assert b"".join(part for part, _ in parts) == data
    assert max(len(part) for part, _ in parts) <= MAX_CHUNK <= 62_000
    assert [end for _, end in parts] == [False] * (len(parts) - 1) + [True]


def test_an_empty_body_ends_by_an_empty_chunk() -> None:
    stream = ExtProcStream(10)
    asked(stream, head(DUPLEX), body(b""))
    assert streamed(stream.picked(PICK)) == [(b"", True)]


def test_trailers_end_a_body_and_are_answered_after_it() -> None:
    stream = ExtProcStream(10)
    trailers = ProcessingRequest(request_trailers=HttpTrailers())
    assert asked(stream, head(DUPLEX), body(b"ab", end=False), trailers).body == b"ab"
    responses = stream.picked(PICK)
    assert kinds(responses) == ["request_headers", "request_body", "request_trailers"]
    assert streamed(responses) == [(b"ab", False)]


def test_a_request_without_a_body_is_picked_at_once() -> None:
    for mode in (DUPLEX, BUFFERED, STREAMED, NONE):
        stream = ExtProcStream(10)
        assert asked(stream, head(mode, end=True)).is_whole
        assert kinds(stream.picked(PICK)) == ["request_headers"]


@pytest.mark.parametrize(
    ("mode", "end", "whole"), [(BUFFERED, True, True), (PARTIAL, False, False)]
)
def test_buffered_headers_pass_and_the_body_has_the_pick(mode: int, end: bool, whole: bool) -> None:
    stream = ExtProcStream(10)
    responses, event = stream.take(head(mode))
    assert (kinds(responses), event) == (["request_headers"], None)
    assert not responses[0].request_headers.response.HasField("header_mutation")
    assert asked(stream, body(b"ab", end=end)).is_whole is whole
    [answer] = stream.picked(PICK)
    common = answer.request_body.response
    assert common.header_mutation.set_headers[-1].header.key == DESTINATION
    assert common.clear_route_cache
    assert not common.HasField("body_mutation"), "the proxy keeps the body that it has"
    assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == PICK.endpoints


@pytest.mark.parametrize("mode", [STREAMED, NONE])
def test_a_body_that_waits_for_the_headers_is_not_read(mode: int) -> None:
    stream = ExtProcStream(1)
    assert not asked(stream, head(mode)).is_whole
    assert kinds(stream.picked(PICK)) == ["request_headers"]
    if mode == STREAMED:
        responses, event = stream.take(body(b"beyond the limit"))
        assert (kinds(responses), event) == (["request_body"], None)
        assert not responses[0].request_body.response.HasField("body_mutation")


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
def test_a_changed_body_replaces_all_of_it_with_its_length(mode: int) -> None:
    stream = ExtProcStream(100)
    stream.take(head(mode))
    if mode != BUFFERED:
        stream.take(body(b"ab", end=False))
    stream.take(body(b"c"))
    responses = stream.picked(EndpointPick("1.2.3.4:5", body=b"other"))
    sent = b""
    for response in responses:
        common = (response.request_headers if response.HasField("request_headers")
                  else response.request_body).response  # fmt: skip
        change = common.body_mutation
        sent += change.body + change.streamed_response.body
        values = {o.header.key: o.header.raw_value for o in common.header_mutation.set_headers}
        assert values.get("content-length", b"5") == b"5"
    assert sent == b"other"


def test_a_body_beyond_the_limit_is_answered_413_and_nothing_follows() -> None:
    stream = ExtProcStream(3)
    stream.take(head(DUPLEX))
    assert stream.take(body(b"abc", end=False)) == ([], None)
    responses, event = stream.take(body(b"d"))
    assert event is None
    assert responses[0].immediate_response.status.code == 413
    assert stream.take(body(b"e")) == ([], None)


def test_a_refusal_has_status_remedy_and_headers() -> None:
    stream = ExtProcStream(3)
    asked(stream, head(DUPLEX), body(b"x"))
    [answer] = stream.refused(APIError(429, "Busy.", retry_after=7))
    now = answer.immediate_response
    values = {o.header.key.lower(): o.header.raw_value for o in now.headers.set_headers}
    assert now.status.code == 429
    assert values["retry-after"] == b"7"
    assert b"Busy." in now.body


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (["10.0.0.1:80", "10.0.0.2:80"], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80,10.0.0.2:80", {"10.0.0.1:80", "10.0.0.2:80"}),
        ("  10.0.0.2:80 ,  ,  10.0.0.3:80  ", {"10.0.0.2:80", "10.0.0.3:80"}),
        (["10.0.0.2:80, 10.0.0.3:80"], {"10.0.0.2:80", "10.0.0.3:80"}),
        ([], set()),
        ("", set()),
    ],
)
def test_a_subset_is_a_list_or_a_text_and_an_empty_one_allows_nothing(
    hint: object, subset: set[str]
) -> None:  # cases of the extension's own picker (pkg/lwepp/handlers)
    assert asked(ExtProcStream(9), head(DUPLEX, end=True, subset=hint)).subset == subset


def test_without_a_hint_or_with_another_key_all_may_be_picked() -> None:
    message = head(DUPLEX, end=True)
    assert asked(ExtProcStream(9), message).subset is None
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"]["some-other-key"] = "val"
    assert asked(ExtProcStream(9), message).subset is None


def test_repeated_headers_are_read_together_and_by_lower_case() -> None:
    message = head(DUPLEX, end=True)
    for value in ("1.1.1.1", "2.2.2.2"):
        message.request_headers.headers.headers.append(
            HeaderValue(key="X-Forwarded-For", value=value)
        )
    assert asked(ExtProcStream(9), message).headers == {"x-forwarded-for": "1.1.1.1,2.2.2.2"}


def answered(reply: int = DUPLEX) -> ExtProcStream:
    stream = ExtProcStream(9)
    asked(stream, head(DUPLEX, reply=reply), body(b"x"))
    stream.picked(PICK)
    return stream


def test_the_reply_passes_with_further_headers_and_the_endpoint_that_served_it() -> None:
    stream = answered()
    stream.reply["x-pigou-worker"] = "w0"
    values = [HeaderValue(key=":status", raw_value=b"200")]
    message = ProcessingRequest(response_headers=HttpHeaders(headers=HeaderMap(headers=values)))
    message.metadata_context.filter_metadata["envoy.lb"][f"{DESTINATION}-served"] = "10.0.0.2:8000"
    [answer], event = stream.take(message)
    assert isinstance(event, ResponseStart)
    assert (event.status, event.end, stream.served) == (200, False, "10.0.0.2:8000")
    [option] = answer.response_headers.response.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == ("x-pigou-worker", b"w0")


@pytest.mark.parametrize("mode", [DUPLEX, STREAMED, BUFFERED])
def test_each_chunk_of_the_reply_passes_unchanged(mode: int) -> None:
    stream, data = answered(mode), b"r" * (MAX_CHUNK + 1)
    part = HttpBody(body=data, end_of_stream=True)
    responses, event = stream.take(ProcessingRequest(response_body=part))
    assert event == ResponsePart(data, True)
    changes = [response.response_body.response.body_mutation for response in responses]
    if mode == DUPLEX:
        assert b"".join(change.streamed_response.body for change in changes) == data
        assert [change.streamed_response.end_of_stream for change in changes] == [False, True]
    else:
        assert [change.WhichOneof("mutation") for change in changes] == [None]


def test_trailers_of_the_reply_are_answered_and_end_it() -> None:
    message = ProcessingRequest(response_trailers=HttpTrailers())
    [answer], event = answered().take(message)
    assert answer.HasField("response_trailers")
    assert event == ResponsePart(b"", True)


@settings(deadline=None, max_examples=200)
@given(
    data=st.binary(max_size=300_000),
    cuts=st.lists(st.floats(0, 1), max_size=8),
    trailers=st.booleans(),
)
def test_any_chunking_asks_the_same_and_returns_the_same_bytes(
    data: bytes, cuts: list[float], trailers: bool
) -> None:
    bounds = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(bounds)]
    messages = [head(DUPLEX, a="1")]
    messages += [
        body(part, end=not trailers and i == len(parts) - 1) for i, part in enumerate(parts)
    ]
    if trailers:
        messages.append(ProcessingRequest(request_trailers=HttpTrailers()))
    stream = ExtProcStream(len(data))
    assert asked(stream, *messages) == PickRequest({"a": "1"}, data)
    responses = stream.picked(PICK)
    sent = streamed(responses)
    assert b"".join(part for part, _ in sent) == data
    assert all(len(part) <= MAX_CHUNK for part, _ in sent)
    assert kinds(responses)[0] == "request_headers"
    assert sum(end for _, end in sent) == (not trailers)
