"""The bytes of every token, from which text is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pigou.text.decoders import read_chain


class VocabularyError(ValueError):
    """A tokenizer whose tokens do not stand for bytes one by one."""


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of the tokens.

    Attributes:
        tokens: bytes by token id; None where the id has no token.
        special: ids of control tokens (begin, end, roles), which text does not show.
        starts: bytes of tokens that differ at the beginning of a text.
        strip: bytes that the beginning of a text loses, each once, in this order.
        whole: decodes a list of ids where tokens do not stand for bytes one by one; else None.
    """

    tokens: tuple[bytes | None, ...]
    special: frozenset[int]
    starts: Mapping[int, bytes] = field(default_factory=dict)
    strip: bytes = b""
    whole: Callable[[list[int]], str] | None = None

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
    names: Mapping[str, int],
    special: Iterable[int],
    decoder: Any,
    whole: Callable[[list[int]], str] | None = None,
) -> Vocabulary:
    """Return the vocabulary of a `tokenizer.json`.

    Args:
        names: token -> id, added tokens included.
        special: ids of control tokens.
        decoder: its `decoder` part.
        whole: decodes a list of ids, for decoders that do not work token by token.

    Raises:
        VocabularyError: the decoder does not work token by token, and there is no `whole`.
    """
    chain = read_chain(decoder)
    if chain is None and whole is None:
        raise VocabularyError(f"the decoder of tokenizer.json is {decoder!r}, which is unknown")
    tokens: list[bytes | None] = [None] * (max(names.values(), default=-1) + 1)
    starts: dict[int, bytes] = {}
    for name, index in names.items():
        tokens[index] = name.encode() if chain is None else chain.decode(name, first=False)
        if chain is not None and (start := chain.decode(name, first=True)) != tokens[index]:
            starts[index] = start
    return Vocabulary(
        tuple(tokens),
        frozenset(special),
        starts,
        b"" if chain is None else chain.strip,
        whole if chain is None else None,
    )


def _text(token: bytes | None) -> str | None:
    try:
        return (token or b"").decode()
    except UnicodeDecodeError:
        return None
