"""The bytes of every token, from which text is put together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META = "\u2581"  # SentencePiece's visible space


class VocabularyError(ValueError):
    """A tokenizer whose tokens do not stand for bytes one by one."""


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of the tokens.

    Attributes:
        tokens: bytes by token id; None where the id has no token.
        special: ids of control tokens (begin, end, roles), which text does not show.
    """

    tokens: tuple[bytes | None, ...]
    special: frozenset[int]

    @cached_property
    def texts(self) -> list[str | None]:
        """Text by token id; None where the bytes alone are not valid UTF-8. "" for no token."""
        return [_text(token) for token in self.tokens]

    @cached_property
    def longest(self) -> int:
        """Most bytes that one token stands for."""
        return max((len(token) for token in self.tokens if token), default=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; b"" for an id without one."""
        return (self.tokens[token] or b"") if 0 <= token < len(self.tokens) else b""


def vocabulary(
    names: Mapping[str, int], special: Iterable[int], decoder: Any, byte_fallback: bool
) -> Vocabulary:
    """Return the vocabulary of a `tokenizer.json`.

    Args:
        names: token -> id, added tokens included.
        special: ids of control tokens.
        decoder: its `decoder` part.
        byte_fallback: whether tokens like `<0x0A>` stand for a byte.

    Raises:
        VocabularyError: the decoder is neither byte-level nor SentencePiece's.
    """
    kinds = set(_kinds(decoder))
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif kinds & {"Metaspace", "Replace", "ByteFallback"}:
        to_bytes = _fallback if byte_fallback else _meta
    else:
        raise VocabularyError(
            f"the decoder of tokenizer.json is {sorted(kinds) or None}; "
            "byte-level and SentencePiece tokenizers are supported"
        )
    tokens: list[bytes | None] = [None] * (max(names.values(), default=-1) + 1)
    hidden = frozenset(special)
    for name, index in names.items():
        tokens[index] = name.encode() if index in hidden else to_bytes(name)
    return Vocabulary(tuple(tokens), hidden)


def _kinds(decoder: Any) -> Iterable[str]:
    if isinstance(decoder, dict):
        yield decoder.get("type", "")
        for part in decoder.get("decoders", ()):
            yield from _kinds(part)


def _byte_level(name: str) -> bytes:
    try:
        return bytes(_CHARS[char] for char in name)
    except KeyError:
        return name.encode()  # an added token, written as it is


def _meta(name: str) -> bytes:
    return name.replace(_META, " ").encode()


def _fallback(name: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    return _meta(name)


def _text(token: bytes | None) -> str | None:
    try:
        return (token or b"").decode()
    except UnicodeDecodeError:
        return None


def _byte_chars() -> dict[str, int]:
    """Return GPT-2's map between bytes and printable characters: 33-126, 161-172 and 174-255
    stand for themselves, the others for U+0100 and on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return chars | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_CHARS = _byte_chars()
