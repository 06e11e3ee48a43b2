"""From a growing sequence of tokens to text that only ever grows, whole characters at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pigou.text.vocabulary import Vocabulary


class Detokenizer:
    """Text of the tokens so far, without the incomplete character at its end.

    The text is a function of the token sequence alone: however the tokens are cut into calls,
    the concatenated texts are the same. A stream that continues elsewhere feeds its tokens so
    far, drops the text, and goes on.
    """

    __slots__ = ("_hidden", "_pending", "_texts", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, skip_special: bool = True) -> None:
        """Begin at no text.

        Args:
            vocabulary: bytes of the tokens.
            skip_special: leave control tokens out of the text.
        """
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts
        self._hidden = vocabulary.special if skip_special else frozenset[int]()
        self._pending = b""

    def feed(self, tokens: Iterable[int]) -> str:
        """Take further tokens; return the text that they complete."""
        return "".join([self.next(token) for token in tokens])

    def next(self, token: int) -> str:
        """Take one further token; return the text that it completes, "" within a character."""
        if token in self._hidden:
            return ""
        if not self._pending:
            text = self._texts[token] if 0 <= token < len(self._texts) else ""
            if text is not None:
                return text
        data = self._pending + self._vocabulary.bytes_of(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """End the text: return U+FFFD for a character that stayed incomplete, else ""."""
        pending, self._pending = self._pending, b""
        return pending.decode(errors="replace")
