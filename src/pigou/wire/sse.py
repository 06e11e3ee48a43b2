"""Server-sent events: frames out, and an incremental reader."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
#: Payload of the frame that ends a stream.
DONE_PAYLOAD = b"[DONE]"
_BOM = b"\xef\xbb\xbf"


def frame(payload: bytes) -> bytes:
    """Return the frame of one payload, which must hold no line break (JSON has none)."""
    return b"data: " + payload + b"\n\n"


class Reader:
    """Splits a byte stream, cut anywhere, into the payloads of its events.

    Comments and fields other than `data` are skipped; data lines of one event are joined with a
    line break, as the specification of server-sent events says. An event counts when the blank
    line that ends it has arrived. A byte order mark before the stream is skipped.
    """

    __slots__ = ("_begun", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False

    @property
    def pending(self) -> bool:
        """Whether the bytes so far end inside an event."""
        return bool(self._rest)

    @property
    def ends_done(self) -> bool:
        """Whether the bytes so far end with a last event that lacks its blank line."""
        return self._rest.rstrip().endswith(DONE_PAYLOAD)

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; return the payloads of the events that they complete."""
        if not self._begun:
            data, self._rest = self._rest + data, b""
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._rest = data
                return []
            self._begun = True
            data = data.removeprefix(_BOM)
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            # A trailing "\r" may be half of "\r\n": it waits for what follows.
            held = b"\r" if data.endswith(b"\r") else b""
            whole = data[: len(data) - len(held)]
            data = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = b""
        *events, rest = data.split(b"\n\n")
        self._rest = rest + held
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
            elif (payload := _payload(event)) is not None:
                payloads.append(payload)
        return payloads


def _payload(event: bytes) -> bytes | None:
    lines = [line for line in event.split(b"\n") if line.startswith(b"data:") or line == b"data"]
    if not lines:
        return None
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
