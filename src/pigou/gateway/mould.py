"""The mould: what the tokens of one stream have in common, so that most need no parsing."""

from __future__ import annotations

from pigou.gateway.chunks import IDS, PROMPT_IDS

_NO_IDS = b'"token_ids":null'
_QUOTE, _BACKSLASH, _ZERO = b'"', 0x5C, 0x30
#: Token ids with more digits are left to the parser.
_MOST_DIGITS = 9


class Mould:
    """Recognizes events that are another one, but for its text and its one token id.

    Such an event is valid JSON, and means the same, if that other one is and does: the text is
    a string's whole content without quotes, escapes or control characters, the id a number. In
    JSON a quote within a string is escaped, so that what looks like a key is one.
    """

    __slots__ = ("_end", "_head", "_size", "_tail", "_text_end")

    def __init__(self, head: bytes, text_end: bytes, tail: bytes) -> None:
        """Keep what comes before the text, from its end to the ids, and after them."""
        self._head = head
        self._size = len(head)
        self._text_end = text_end
        self._tail = tail
        self._end = _NO_IDS + tail

    @classmethod
    def of(cls, event: bytes) -> Mould | None:
        """Return the mould of an event; None where it has none.

        Args:
            event: a parsed and valid chunk, framed, with one choice, one token id and no end.
        """
        if _BACKSLASH in event or PROMPT_IDS in event:
            return None
        # Each key once, so that it is the choice's: spelt otherwise it would have a backslash.
        keys = [event.count(key + _QUOTE) for key in (b'"token_ids', b'"text', b'"content')]
        if keys[0] != 1 or keys[1] + keys[2] != 1:
            return None
        before, _, rest = event.rpartition(IDS)
        _, _, tail = rest.partition(b"]")
        head, key, rest = before.partition(b'"text":"' if keys[1] else b'"content":"')
        _, _, text_end = rest.partition(_QUOTE)
        mould = cls(head + key, text_end, tail)
        return None if mould.token(event) is None else mould

    def token(self, event: bytes) -> tuple[int, bytes, bytes] | None:
        """Return id, text, and the event with null in place of its ids; None for all else."""
        before, _, rest = event.rpartition(IDS)
        digits, _, tail = rest.partition(b"]")
        if tail != self._tail or before[: self._size] != self._head:
            return None
        text, _, text_end = before[self._size :].partition(_QUOTE)
        if text_end != self._text_end or _BACKSLASH in text:
            return None
        if not digits.isdigit() or len(digits) > _MOST_DIGITS or digits[0] == _ZERO:
            return None
        try:
            if not text.decode().isprintable():
                return None
        except UnicodeDecodeError:
            return None
        return int(digits), text, before + self._end
