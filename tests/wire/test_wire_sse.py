"""Server-sent events survive any cut of the byte stream."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.wire.sse import DONE, DONE_PAYLOAD, Reader, frame

payloads = st.lists(st.text(max_size=20).map(lambda t: t.encode().replace(b"\n", b"").replace(
    b"\r", b"")), max_size=6)  # fmt: skip
cuts = st.lists(st.integers(0, 200), max_size=8)


def read(data: bytes, at: list[int]) -> list[bytes]:
    reader = Reader()
    edges = [0, *sorted(min(cut, len(data)) for cut in at), len(data)]
    found = []
    for begin, end in pairwise(edges):
        found += reader.feed(data[begin:end])
    assert not reader.pending
    return found


@given(payloads, cuts)
@settings(max_examples=examples(300))
def test_what_was_framed_is_read_for_any_cut(payloads: list[bytes], at: list[int]) -> None:
    data = b"".join(map(frame, payloads)) + DONE
    assert read(data, at) == [*payloads, DONE_PAYLOAD]


@given(cuts)
@settings(max_examples=examples(200))
def test_other_servers_line_ends_comments_and_fields_are_understood(at: list[int]) -> None:
    data = b": ping\r\n\r\nevent: x\r\ndata: a\r\ndata:b\r\n\r\nid: 1\r\rdata\r\rdata: c\n\n"
    assert read(data, at) == [b"a\nb", b"", b"c"]


def test_an_event_counts_once_it_is_whole() -> None:
    reader = Reader()
    assert reader.feed(b"data: {}\n") == []
    assert reader.pending
    assert reader.feed(b"\n") == [b"{}"]
