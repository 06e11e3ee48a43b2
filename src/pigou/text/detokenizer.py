"""From a growing sequence of tokens to text that only ever grows, whole characters at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pigou.text.vocabulary import Vocabulary

#: Maximum tokens of one incomplete character.
_MAX_PENDING_TOKENS = 16
#: Tokens before a text that decide how it begins, and how `tokenizers` says that it lost its place.
_CONTEXT_TOKENS, _INVALID_PREFIX = 64, "Invalid prefix encountered"


class Detokenizer:
    """Text of the tokens so far, without the incomplete character at its end.

    The text depends on the tokens alone, not on how calls cut them: to resume, feed the old tokens.

    Example:
        words = Vocabulary((b"caf", b"\\xc3", b"\\xa9"), frozenset())
        stream = Detokenizer(words)
        assert stream.feed([0, 1]) == "caf"  # half a character is kept back
        assert stream.feed([2]) == "é"
    """

    __slots__ = ("_hidden", "_pending", "_start", "_strip", "_texts", "_vocabulary", "_window")

    def __init__(
        self,
        vocabulary: Vocabulary,
        skip_special: bool = True,
        *,
        shown: frozenset[int] = frozenset(),
        begins: bool = True,
    ) -> None:
        """Hide control tokens but `shown`; pass `begins=False` to continue a prompt's text."""
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts
        self._hidden = vocabulary.special - shown if skip_special else frozenset[int]()
        self._pending = b""
        self._start = begins
        self._strip = vocabulary.strip if begins else b""
        self._window = None if vocabulary.whole is None else _Window(vocabulary.whole)

    def feed(self, tokens: Iterable[int]) -> str:
        """Feed tokens; return the completed text."""
        return "".join([self.next(token) for token in tokens])

    def next(self, token: int) -> str:
        """Return the text that a token completes, "" within a character."""
        if token in self._hidden:
            return ""
        if self._window is not None:
            return self._window.next(token)
        if self._start or self._strip:
            return self._text_of(self._first_bytes(token))
        if not self._pending:
            text = self._texts[token] if 0 <= token < len(self._texts) else ""
            if text is not None:
                return text
        return self._text_of(self._vocabulary.bytes_of(token))

    def flush(self) -> str:
        """End the text: return U+FFFD for a character that stayed incomplete, else ""."""
        if self._window is not None:
            return self._window.flush()
        pending, self._pending = self._pending, b""
        return pending.decode(errors="replace")

    def _first_bytes(self, token: int) -> bytes:
        """Return a token's bytes at the beginning of the text, without what is stripped there."""
        data = self._vocabulary.bytes_of(token)
        if self._start:
            self._start = not 0 <= token < len(self._texts)
            data = self._vocabulary.starts.get(token, data)
        while data and self._strip:
            if data[:1] != self._strip[:1]:
                self._strip = b""
                break
            data, self._strip = data[1:], self._strip[1:]
        return data

    def _text_of(self, data: bytes) -> str:
        text, used = codecs.utf_8_decode(self._pending + data, "replace", False)
        self._pending = (self._pending + data)[used:]
        return text


class EngineDetokenizer:
    """Text of a reply as vLLM's engine shows it, by the same `DecodeStream` of tokenizers.

    Text that ends in an incomplete character is held back, and never shown if that is the end.
    """

    def __init__(self, backend: Tokenizer, prompt: Sequence[int], skip_special: bool) -> None:
        self._backend, self._skip_special = backend, skip_special
        context = list(prompt[-_CONTEXT_TOKENS:])
        begun = backend.decode(context, skip_special_tokens=skip_special)
        # False where the prompt's end does not tell how its whole would be continued.
        self.exact = not begun.endswith("\ufffd") and (bool(begun) or len(context) == len(prompt))
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special)

    def next(self, token: int) -> str:
        """Return the text that a token completes."""
        try:
            return self._stream.step(self._backend, token) or ""
        except (OverflowError, TypeError):  # no token id
            return ""
        except Exception as error:
            if not str(error).startswith(_INVALID_PREFIX):
                raise
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        return self._stream.step(self._backend, token) or ""


class _Window:
    """The last tokens of a text that only a decoder of whole lists can read; shown text stays."""

    __slots__ = ("_context", "_decode", "_shown", "_tokens")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0
        self._shown = 0

    def next(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("\ufffd") and len(self._tokens) < _MAX_PENDING_TOKENS:
            return ""
        new = text[self._shown :]
        if new:
            # These tokens stay, for what the decoder puts between them and the next one.
            self._tokens = self._tokens[self._context :]
            self._context = len(self._tokens)
            self._shown = len(self._decode(self._tokens))
        return new

    def flush(self) -> str:
        text = self._decode(self._tokens)[self._shown :]
        self._tokens, self._context, self._shown = [], 0, 0
        return text
