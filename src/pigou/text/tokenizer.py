"""Tokenizer of a model folder: `tokenizer.json` and its configuration files."""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pigou.small_file import parse_json
from pigou.text.control_tokens import ControlTokens
from pigou.text.detokenizer import Detokenizer
from pigou.text.model_files import (
    content_of,
    end_tokens,
    read_object,
    read_templates,
    read_tokenizer,
)
from pigou.text.vocabulary import Vocabulary, vocabulary


class TokenizerError(ValueError):
    """A model folder whose tokenizer cannot be used; says why."""


@dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes text."""

    backend: Backend  # the `tokenizers` object; may be used from several threads
    vocabulary: Vocabulary  # bytes of every token
    # ids of the tokens that end a sequence: all that a file of the folder names, also those that
    # the model's logits have no row for.
    eos: frozenset[int]
    # special tokens by role (`bos_token`, `eos_token`, ...), for chat templates.
    names: dict[str, str]
    templates: dict[str, str]  # chat templates by name; `default` is the usual one
    generation: dict[str, Any]  # contents of `generation_config.json`
    # keeps what clients type in chats from becoming special tokens.
    control: ControlTokens
    segments: SegmentCache | None = None  # None for tokenizers whose segments are not independent

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read a model folder. Raises TokenizerError."""
        if not (folder / "tokenizer.json").is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json; only that format is read")
        try:
            return _read(folder)
        except (OSError, ValueError) as error:
            raise TokenizerError(str(error)) from None

    def encode(self, text: str, special: bool = True, scope: str | None = None) -> list[int]:
        """Return the token ids of a text; `special` adds begin tokens and the like.

        Messages that were encoded before in the same `scope` are looked up; None looks up nothing.
        """
        if self.control.mark in text:
            return self.control.encode(text, special)
        if scope is not None and self.segments is not None and not special:
            return self.segments.encode(text, scope)
        # A batch, because `encode` holds the interpreter's lock; the fast one keeps no offsets,
        # and takes a third of the time on long texts.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Return the text of token ids; invalid bytes become U+FFFD, unknown ids nothing."""
        whole = self.vocabulary.whole
        if whole is not None:
            hidden = self.vocabulary.special if skip_special else frozenset[int]()
            return whole([i for i in ids if i not in hidden])
        detokenizer = Detokenizer(self.vocabulary, skip_special)
        return detokenizer.feed(ids) + detokenizer.flush()

    def ids(self, names: Iterable[str]) -> frozenset[int]:
        """Return the ids of those texts that are a token each."""
        return frozenset(i for i in map(self.backend.token_to_id, names) if i is not None)

    def name(self, token: int) -> str:
        """Return the text of one token, special ones by name; invalid bytes become U+FFFD."""
        return self.vocabulary.bytes_of(token).decode(errors="replace")


class SegmentCache:
    """Token ids of the texts between added tokens, such as the messages of a chat.

    A tokenizer cuts added tokens out first, and encodes each text between them alone. So a chat
    that grows is encoded message by message, exactly. Scopes share nothing, not even by timing.
    """

    def __init__(self, backend: Backend, max_characters: int = 2**24) -> None:
        added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
        self._ids = added
        self._backend = backend
        self._split = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._left = max_characters
        self._lock = threading.Lock()

    @classmethod
    def of(cls, backend: Backend, settings: dict[str, Any]) -> SegmentCache | None:
        """Return the cache of a `tokenizer.json`; None where a segment depends on its neighbours.

        That is where added tokens take in white space, are normalized, or the first word differs.
        """
        added = backend.get_added_tokens_decoder().values()
        odd = any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in added)
        pre = settings.get("pre_tokenizer") or {}
        first = any(
            part.get("prepend_scheme") == "first" for part in (pre, *pre.get("pretokenizers", ()))
        )
        return None if odd or first or not added else cls(backend)

    def encode(self, text: str, scope: str) -> list[int]:
        """Return a text's ids."""
        pieces: list[str | int] = []
        start = 0
        for match in self._split.finditer(text):
            pieces += (text[start : match.start()], self._ids[match[0]])
            start = match.end()
        pieces.append(text[start:])
        texts = {piece for piece in pieces if isinstance(piece, str) and piece}
        with self._lock:
            known = {piece: self._known.get((scope, piece)) for piece in texts}
        new = [piece for piece, ids in known.items() if ids is None]
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False) if new else ()
        fresh = {p: array("I", e.ids) for p, e in zip(new, encodings, strict=True)}
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids.extend(fresh[piece] if piece in fresh else known[piece] or ())
        with self._lock:
            for piece in texts:
                self._keep((scope, piece), fresh.get(piece))
        return ids

    def _keep(self, key: tuple[str, str], ids: array[int] | None) -> None:
        """Move an entry to the end, or add it and drop the oldest ones beyond the limit."""
        if ids is None or key in self._known:
            if key in self._known:
                self._known.move_to_end(key)
            return
        self._known[key] = ids
        self._left -= len(key[1])
        while self._left < 0:
            (_, old), _ = self._known.popitem(last=False)
            self._left += len(old)


def _read(folder: Path) -> Tokenizer:
    text = read_tokenizer(folder)
    backend, pipeline = Backend.from_str(text), parse_json(text.encode())
    backend.no_truncation()
    backend.no_padding()
    settings = read_object(folder / "tokenizer_config.json")
    named = read_object(folder / "special_tokens_map.json")
    words = vocabulary(
        backend.get_vocab(with_added_tokens=True),
        {index for index, token in backend.get_added_tokens_decoder().items() if token.special},
        pipeline.get("decoder"),
        partial(backend.decode, skip_special_tokens=False),
    )
    eos = end_tokens(folder, backend.token_to_id)
    if not eos:
        raise ValueError("no end token: tokenizer_config, generation_config and config lack it")
    return Tokenizer(
        backend=backend,
        vocabulary=words,
        eos=eos,
        names={
            key: content
            for source in (named, settings)
            for key, value in source.items()
            if key.endswith("_token") and (content := content_of(value)) is not None
        },
        templates=read_templates(folder, settings),
        generation=read_object(folder / "generation_config.json"),
        control=ControlTokens(backend, eos),
        segments=SegmentCache.of(backend, pipeline),
    )
