"""End tokens of a model folder: the union of what its files name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pigou.text.model_files import read_object, read_templates

log = logging.getLogger(__name__)

#: Ends every turn of a ChatML template; fine-tunes often leave it out of their configs.
CHATML_END = "<|im_end|>"


def end_tokens(
    *,
    settings: Mapping[str, Any],
    special: Mapping[str, Any],
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    templates: Iterable[str],
    token_id: Callable[[str], int | None],
) -> frozenset[int]:
    """Return the ids that any of a model's files names as an end token.

    vLLM stops at the tokenizer's and at `generation_config.json`'s; transformers at
    `generation_config.json`'s, or at `config.json`'s. A template in ChatML adds `<|im_end|>`.

    Args:
        settings: contents of `tokenizer_config.json`.
        special: contents of `special_tokens_map.json`.
        generation: contents of `generation_config.json`.
        config: contents of `config.json`.
        templates: sources of the chat templates.
        token_id: from a token's text to its id; None for text that is no token.

    Raises:
        ValueError: an `eos_token_id` is neither an id nor a list of ids.
    """
    names = [_content(settings.get("eos_token")), _content(special.get("eos_token"))]
    if any(CHATML_END in template for template in templates):
        names.append(CHATML_END)
    ids = {index for name in names if name and (index := token_id(name)) is not None}
    inner = config.get("text_config")
    sources = {
        "generation_config.json": generation,
        "config.json": config,
        "config.json (text_config)": inner if isinstance(inner, dict) else {},
    }
    for file, source in sources.items():
        ids |= _ids(source.get("eos_token_id"), file)
    return frozenset(ids)


def read_end_tokens(folder: Path, rows: int) -> frozenset[int]:
    """Return the end tokens of a model's folder that have a row in the logits.

    Raises:
        ValueError: a file is not a JSON object, or an `eos_token_id` is no id.
    """
    settings = read_object(folder / "tokenizer_config.json")
    ids = end_tokens(
        settings=settings,
        special=read_object(folder / "special_tokens_map.json"),
        generation=read_object(folder / "generation_config.json"),
        config=read_object(folder / "config.json"),
        templates=read_templates(folder, settings).values(),
        token_id=_Names(folder, settings),
    )
    return within(ids, rows)


def within(ids: frozenset[int], rows: int) -> frozenset[int]:
    """Drop ids that the logits have no row for, with a warning."""
    outside = sorted(token for token in ids if not 0 <= token < rows)
    if outside:
        log.warning(
            "eos_token_id names %s, outside the vocabulary of %d tokens: dropped", outside, rows
        )
    return ids.difference(outside)


class _Names:
    """Looks ids of special tokens up; reads the large tokenizer.json only where it must."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._ids: dict[str, int] = {}
        self._complete = False
        added = settings.get("added_tokens_decoder")
        for key, token in added.items() if isinstance(added, dict) else ():
            if (text := _content(token)) is not None and str(key).isdecimal():
                self._ids[text] = int(key)

    def __call__(self, name: str) -> int | None:
        if name not in self._ids and not self._complete:
            self._complete = True
            self._read()
        return self._ids.get(name)

    def _read(self) -> None:
        spec = read_object(self._folder / "tokenizer.json")
        words = (spec.get("model") or {}).get("vocab")
        if isinstance(words, dict):
            self._ids = {**words, **self._ids}
        elif isinstance(words, list):  # Unigram: pairs of text and score, by id
            self._ids = {pair[0]: index for index, pair in enumerate(words)} | self._ids
        for token in spec.get("added_tokens") or ():
            self._ids.setdefault(token["content"], token["id"])


def _content(token: Any) -> str | None:
    """Return a special token's text: it is written as text, or as an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _ids(said: Any, file: str) -> set[int]:
    if said is None:
        return set()
    values = said if isinstance(said, list) else [said]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in values):
        raise ValueError(
            f"{file}: eos_token_id is {said!r}; it must be a token id or a list of them"
        )
    return set(values)
