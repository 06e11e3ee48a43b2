"""Server-sent events: frames out, and an incremental reader."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
#: Payload of the final event.
DONE_PAYLOAD = b"[DONE]"
#: Bytes of one event. The first may hold the ids of a prompt of a million tokens.
MAX_EVENT = 16 * 1024 * 1024
#: Pieces buffered before a join.
_MAX_PARTS = 16_384
BOM = b"\xef\xbb\xbf"


class EventTooLong(ValueError):
    """A stream whose event does not end."""


def frame(payload: bytes) -> bytes:
    """Return the frame of one payload, which must hold no line break (JSON has none)."""
    return b"data: " + payload + b"\n\n"


class Reader:
    """Splits a byte stream, cut anywhere, into the payloads of server-sent events."""

    __slots__ = ("_begun", "_held", "_parts", "size", "skipped")

    def __init__(self) -> None:
        self._begun = False
        self._held = b""
        # Pieces of an event that is not whole: joined once, so that time stays linear.
        self._parts: list[bytes] = []
        self.size = 0  # bytes of the incomplete event
        self.skipped = 0  # events without data

    @property
    def pending(self) -> bool:
        """Whether the bytes so far end inside an event."""
        return bool(self._parts) or bool(self._held)

    @property
    def ends_done(self) -> bool:
        """Whether the bytes so far end with a last event that lacks its blank line."""
        return b"".join(self._parts[-64:]).rstrip().endswith(DONE_PAYLOAD)

    def feed(self, data: bytes) -> list[bytes]:
        """Feed bytes; return completed payloads. Raises EventTooLong."""
        if self._held:
            data, self._held = self._held + data, b""
        if not self._begun:
            if len(data) < len(BOM) and BOM.startswith(data):
                self._held = data
                return []
            self._begun = True
            data = data.removeprefix(BOM)
        if b"\r" in data:
            # A trailing "\r" may be half of "\r\n": it waits for what follows.
            if data.endswith(b"\r"):
                data, self._held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._parts:
            if b"\n\n" not in self._parts[-1][-1:] + data:
                return self._keep(data)
            data = b"".join(self._parts) + data
            self._parts, self.size = [], 0
        *events, rest = _split(data)
        if rest:
            self._keep(rest)
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
            elif (payload := _payload(event)) is not None:
                payloads.append(payload)
        self.skipped += len(events) - len(payloads)
        return payloads

    def _keep(self, data: bytes) -> list[bytes]:
        if data:
            self._parts.append(data)
            self.size += len(data)
        if len(self._parts) > _MAX_PARTS:
            self._parts = [b"".join(self._parts)]
        if self.size > MAX_EVENT:
            raise EventTooLong(f"an event has more than {MAX_EVENT} bytes")
        return []


def _split(data: bytes) -> list[bytes]:
    """Split at blank lines; a single event, which may be long, is only looked through once."""
    if data.find(b"\n") == len(data) - 2 and data.endswith(b"\n\n"):
        return [data[:-2], b""]
    return data.split(b"\n\n")


def _payload(event: bytes) -> bytes | None:
    lines = [line for line in event.split(b"\n") if line.startswith(b"data:") or line == b"data"]
    if not lines:
        return None
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
