"""The tokenizer of a model folder: `tokenizer.json`, and what its neighbours say of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pigou.text.vocabulary import Vocabulary, vocabulary


class TokenizerError(ValueError):
    """A model folder whose tokenizer cannot be used; says why."""


@dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes text.

    Attributes:
        backend: the `tokenizers` object; may be used from several threads.
        vocabulary: bytes of every token.
        eos: ids of the tokens that end a sequence.
        names: special tokens by role (`bos_token`, `eos_token`, ...), for chat templates.
        templates: chat templates by name; `default` is the usual one.
        generation: contents of `generation_config.json`.
    """

    backend: Backend
    vocabulary: Vocabulary
    eos: frozenset[int]
    names: dict[str, str]
    templates: dict[str, str]
    generation: dict[str, Any]

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read a model folder.

        Raises:
            TokenizerError: `tokenizer.json` is missing or of an unknown kind, or no token ends
                a sequence.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json; only that format is read")
        text = path.read_text(encoding="utf-8")
        spec = json.loads(text)
        backend = Backend.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        settings = _json(folder / "tokenizer_config.json")
        special = {
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        }
        model = spec.get("model") or {}
        words = vocabulary(
            backend.get_vocab(with_added_tokens=True),
            special,
            spec.get("decoder"),
            bool(model.get("byte_fallback")),
        )
        generation = _json(folder / "generation_config.json")
        return Tokenizer(
            backend=backend,
            vocabulary=words,
            eos=_eos(backend, settings, generation, _json(folder / "config.json")),
            names=_names(settings, _json(folder / "special_tokens_map.json")),
            templates=_templates(folder, settings),
            generation=generation,
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text; other threads run meanwhile.

        Args:
            text: must be encodable as UTF-8.
            special: add what the tokenizer puts around a text (a begin token, mostly).
        """
        # A batch, because `encode` holds the interpreter's lock; the fast one keeps no offsets,
        # and takes a third of the time on long texts.
        [found] = self.backend.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Return the text of token ids; invalid bytes become U+FFFD, unknown ids nothing."""
        hidden = self.vocabulary.special if skip_special else frozenset[int]()
        bytes_of = self.vocabulary.bytes_of
        return b"".join(bytes_of(i) for i in ids if i not in hidden).decode(errors="replace")

    def name(self, token: int) -> str:
        """Return the text of one token, special ones by name; invalid bytes become U+FFFD."""
        return self.vocabulary.bytes_of(token).decode(errors="replace")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return value


def _content(token: Any) -> str | None:
    """Return a special token's text: it is written as text, or as an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _names(*sources: dict[str, Any]) -> dict[str, str]:
    return {
        key: text
        for source in reversed(sources)
        for key, value in source.items()
        if key.endswith("_token") and (text := _content(value)) is not None
    }


def _eos(
    backend: Backend, settings: dict[str, Any], generation: dict[str, Any], config: dict[str, Any]
) -> frozenset[int]:
    ids: set[int] = set()
    name = _content(settings.get("eos_token"))
    if name is not None and (index := backend.token_to_id(name)) is not None:
        ids.add(index)
    said = generation.get("eos_token_id", config.get("eos_token_id"))
    ids.update([said] if isinstance(said, int) else said or [])
    if not ids:
        raise TokenizerError("no end token: tokenizer_config, generation_config and config lack it")
    return frozenset(ids)


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    said = settings.get("chat_template") or _json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(said, str):
        found["default"] = said
    elif isinstance(said, list):
        found |= {item["name"]: item["template"] for item in said}
    path = folder / "chat_template.jinja"
    if path.is_file():
        found["default"] = path.read_text(encoding="utf-8")
    return found
