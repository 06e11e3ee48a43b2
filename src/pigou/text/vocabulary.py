"""The bytes of every token, from which text is put together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

#: A token's text, or bytes, maybe of a partial character.
Piece: TypeAlias = str | bytes
#: From a token's piece, and whether it is the first of the text, to its next piece.
Step: TypeAlias = Callable[[Piece, bool], Piece]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: English contractions and marks that WordPiece's cleanup joins to the word before.
_CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class VocabularyError(ValueError):
    """A tokenizer whose tokens do not stand for bytes one by one."""


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of the tokens."""

    tokens: tuple[bytes | None, ...]  # bytes by token id; None where the id has no token
    special: frozenset[int]  # ids of control tokens (begin, end, roles), hidden in text
    # bytes of tokens that differ at the beginning of a text.
    starts: Mapping[int, bytes] = field(default_factory=dict)
    strip: bytes = b""  # bytes stripped at the start of a text, each once, in this order
    # decodes a list of ids where tokens do not stand for bytes one by one; else None.
    whole: Callable[[list[int]], str] | None = None

    @cached_property
    def texts(self) -> list[str | None]:
        """Text by token id; None where the bytes alone are not valid UTF-8. "" for no token."""
        return [_text(token) for token in self.tokens]

    @cached_property
    def max_token_bytes(self) -> int:
        """Maximum bytes of a token."""
        return max((len(token) for token in self.tokens if token), default=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; b"" for an id without one."""
        return (self.tokens[token] or b"") if 0 <= token < len(self.tokens) else b""


def vocabulary(
    names: Mapping[str, int],
    special: Iterable[int],
    decoder: Any,
    whole: Callable[[list[int]], str] | None = None,
) -> Vocabulary:
    """Return the vocabulary of a `tokenizer.json`; `whole` decodes lists where tokens do not."""
    chain = read_chain(decoder)
    if chain is None and whole is None:
        raise VocabularyError(f"the decoder of tokenizer.json is {decoder!r}, which is unknown")
    tokens: list[bytes | None] = [None] * (max(names.values(), default=-1) + 1)
    starts: dict[int, bytes] = {}
    for name, index in names.items():
        tokens[index] = name.encode() if chain is None else chain.decode(name, first=False)
        if chain is not None and (start := chain.decode(name, first=True)) != tokens[index]:
            starts[index] = start
    if chain is None:
        return Vocabulary(tuple(tokens), frozenset(special), whole=whole)
    return Vocabulary(tuple(tokens), frozenset(special), starts, chain.strip)


def _text(token: bytes | None) -> str | None:
    try:
        return (token or b"").decode()
    except UnicodeDecodeError:
        return None


class _NotByTokenError(Exception):
    """A decoder whose result for a token depends on tokens after it."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Decoders that work token by token."""

    steps: tuple[Step, ...]  # in order
    strip: bytes = b""  # stripped at the start (see `Vocabulary.strip`)

    def decode(self, name: str, first: bool) -> bytes:
        """Return a token's bytes, at the beginning of a text or later."""
        piece: Piece = name
        for step in self.steps:
            piece = step(piece, first)
        return piece.encode() if isinstance(piece, str) else piece


def read_chain(decoder: Any) -> Chain | None:
    """Parse `decoder`; None if unknown, or not token by token."""
    if decoder is None:
        return Chain((lambda piece, first: piece if first else _add(" ", piece),))
    builder = _Builder()
    try:
        builder.read(decoder)
    except (_NotByTokenError, KeyError, TypeError, re.error):
        return None
    return Chain(tuple(builder.steps), builder.strip)


class _Builder:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.strip = b""
        self._fused = False
        self._has_bytes = False

    def read(self, spec: Any) -> None:
        kind = spec["type"]
        if kind == "Sequence":
            for part in spec["decoders"]:
                self.read(part)
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Strip":
            self._add_strip(spec["content"], int(spec["start"]), int(spec["stop"]))
        elif self.strip or kind not in _STEPS:
            raise _NotByTokenError
        else:
            self._require(not self._has_bytes)
            if self._fused:
                self._require(kind == "Replace" and len(spec["pattern"].get("String", "")) == 1)
            self.steps.append(_STEPS[kind](spec))
            self._has_bytes = kind in ("ByteLevel", "ByteFallback")
            self._fused = self._fused or kind == "ByteLevel"

    def _add_strip(self, content: str, start: int, stop: int) -> None:
        if not self._fused:
            self._require(not self._has_bytes)
            self.steps.append(lambda piece, _: _strip(str(piece), content, start, stop))
            return
        self._require(stop == 0 and not self.strip)
        self.strip = content.encode() * start
        self._require(start == 0 or len(content.encode()) == 1)

    @staticmethod
    def _require(possible: bool) -> None:
        if not possible:
            raise _NotByTokenError


def _add(before: str, piece: Piece) -> Piece:
    return before + piece if isinstance(piece, str) else before.encode() + piece


def _strip(text: str, content: str, start: int, stop: int) -> str:
    for _ in range(start):
        text = text.removeprefix(content)
    for _ in range(stop):
        text = text.removesuffix(content)
    return text


def _byte_level(_: Any) -> Step:
    def step(piece: Piece, _first: bool) -> Piece:
        try:
            return bytes(_CHARS[char] for char in str(piece))
        except KeyError:
            return piece  # an added token, written as it is

    return step


def _byte_fallback(_: Any) -> Step:
    def step(piece: Piece, _first: bool) -> Piece:
        match = _BYTE_TOKEN.fullmatch(str(piece))
        return bytes([int(match[1], 16)]) if match else piece

    return step


def _metaspace(spec: Any) -> Step:
    replacement = spec.get("replacement", "\u2581")
    scheme = spec.get("prepend_scheme")
    if scheme is None:
        scheme = "always" if spec.get("add_prefix_space", True) else "never"

    def step(piece: Piece, first: bool) -> Piece:
        drops = first and scheme != "never"
        return str(piece).replace(replacement, "" if drops else " ")

    return step


def _replace(spec: Any) -> Step:
    pattern, content = spec["pattern"], spec["content"]
    if "String" in pattern:
        return lambda piece, _: str(piece).replace(pattern["String"], content)
    expression = re.compile(pattern["Regex"])
    return lambda piece, _: expression.sub(lambda _match: content, str(piece))


def _word_piece(spec: Any) -> Step:
    prefix, cleans = spec.get("prefix", "##"), spec.get("cleanup", True)

    def step(piece: Piece, first: bool) -> Piece:
        text = str(piece)
        if not first:
            text = text.removeprefix(prefix) if text.startswith(prefix) else " " + text
        for dirty, clean in _CLEANUP if cleans else ():
            text = text.replace(dirty, clean)
        return text

    return step


_STEPS: dict[str, Callable[[Any], Step]] = {
    "ByteLevel": _byte_level, "ByteFallback": _byte_fallback, "Metaspace": _metaspace,
    "Replace": _replace, "WordPiece": _word_piece,
}  # fmt: skip


def _byte_chars() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return chars | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_CHARS = _byte_chars()
