"""Tokenizer of a model folder: `tokenizer.json` and its configuration files."""

from __future__ import annotations

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

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read a model folder. Raises TokenizerError."""
        if not (folder / "tokenizer.json").is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json; only that format is read")
        try:
            return _read(folder)
        except (OSError, ValueError) as error:
            raise TokenizerError(str(error)) from None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text; `special` adds begin tokens and the like."""
        if self.control.mark in text:
            return self.control.encode(text, special)
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

    def name(self, token: int) -> str:
        """Return the text of one token, special ones by name; invalid bytes become U+FFFD."""
        return self.vocabulary.bytes_of(token).decode(errors="replace")


def _read(folder: Path) -> Tokenizer:
    text = read_tokenizer(folder)
    backend = Backend.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    settings = read_object(folder / "tokenizer_config.json")
    named = read_object(folder / "special_tokens_map.json")
    generation = read_object(folder / "generation_config.json")
    templates = read_templates(folder, settings)
    words = vocabulary(
        backend.get_vocab(with_added_tokens=True),
        {index for index, token in backend.get_added_tokens_decoder().items() if token.special},
        parse_json(text.encode()).get("decoder"),
        partial(backend.decode, skip_special_tokens=False),
    )
    eos = end_tokens(
        settings=settings,
        special=named,
        generation=generation,
        config=read_object(folder / "config.json"),
        templates=templates.values(),
        token_id=backend.token_to_id,
    )
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
        templates=templates,
        generation=generation,
        control=ControlTokens(backend, eos),
    )
