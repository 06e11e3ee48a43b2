"""Control tokens that users type stay text: only a chat's template emits special tokens.

A mark is put inside each; a copy of the tokenizer splits the text there, and its id is removed.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Collection
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pigou.text.chat_template import ChatError

#: Maximum passes over a text for tokens revealed by normalization.
_ROUNDS = 8


class ControlTokens:
    """The special tokens of a tokenizer, and how client's text is kept from becoming them."""

    def __init__(self, backend: Backend, end_tokens: Collection[int] = ()) -> None:
        added = backend.get_added_tokens_decoder()
        own = {i: token for i, token in added.items() if token.special or i in end_tokens}
        texts = sorted({t.content for t in own.values() if len(t.content) > 1}, key=len)
        self.mark = f"MARK{secrets.token_hex(12)}MARK"  # survives JSON, and is unguessable
        self._backend = backend
        self._ids = frozenset(own)
        self._pattern = re.compile("|".join(map(re.escape, reversed(texts)))) if texts else None
        self._normalized = any(token.normalized for token in own.values())
        self._lock = threading.Lock()
        self._copy: tuple[Backend, int] | None = None

    def warm_up(self) -> None:
        """Copy the tokenizer before a text needs it: a second of the interpreter's lock."""
        if self._pattern is not None:
            self._marked()

    def guard(self, value: Any) -> Any:
        """Return a JSON value with a mark inside each text of a special token. Raises ChatError."""
        try:
            return self._value(value)
        except RecursionError:
            raise ChatError("the messages are nested too deep") from None

    def _value(self, value: Any) -> Any:
        match value:
            case str():
                return self._guarded(value)
            case list():
                return self._parts([self._value(item) for item in value])
            case dict():
                return {self._value(name): self._value(item) for name, item in value.items()}
        return value

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text with marks, without those of the marks."""
        copy, mark = self._marked()
        [encoding] = copy.encode_batch_fast([text], add_special_tokens=special)
        return [i for i in encoding.ids if i != mark]

    def _guarded(self, text: str) -> str:
        if self._pattern is None:
            return text
        while self._pattern.search(text):
            text = self._pattern.sub(lambda m: f"{m[0][0]}{self.mark}{m[0][1:]}", text)
        return self._guarded_by_ids(text) if self._normalized else text

    def _guarded_by_ids(self, text: str) -> str:
        """Mark text that normalization (case, width of characters) turns into a special token."""
        for _ in range(_ROUNDS):
            copy, mark = self._marked()
            encoding = copy.encode(text, add_special_tokens=False)
            starts = [
                start
                for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
                if i in self._ids and i != mark and end - start > 1
            ]
            if not starts:
                return text
            for start in reversed(starts):
                text = f"{text[: start + 1]}{self.mark}{text[start + 1 :]}"
        raise ChatError("the messages have special tokens that cannot be told from text")

    def _parts(self, items: list[Any]) -> list[Any]:
        """Mark the ends of a message's parts where templates that join them would make tokens."""
        texts = [_text(item) for item in items]
        if self._pattern is None or len(items) < 2 or None in texts:
            return items
        for text in ("".join(t or "" for t in texts), "".join((t or "").strip() for t in texts)):
            if self._pattern.search(text):
                return [_with_text(item, (_text(item) or "") + self.mark) for item in items]
        return items

    def _marked(self) -> tuple[Backend, int]:
        with self._lock:
            if self._copy is None:
                copy = Backend.from_str(self._backend.to_str())
                copy.add_special_tokens([AddedToken(self.mark, special=True, normalized=False)])
                id = copy.token_to_id(self.mark)
                assert id is not None
                self._copy = copy, id
            return self._copy


def _text(item: Any) -> str | None:
    value = item.get("text") if isinstance(item, dict) else item
    return value if isinstance(value, str) else None


def _with_text(item: Any, text: str) -> Any:
    return {**item, "text": text} if isinstance(item, dict) else text
