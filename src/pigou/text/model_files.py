"""Files of a model's folder that several parts read: tokenizer, JSON objects, chat templates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pigou.models import bundled_path
from pigou.small_file import MAX_TOKENIZER, parse_json, read_bytes, read_json, read_text

log = logging.getLogger(__name__)

#: Properties of an added token, with defaults.
_PROPERTIES = {"special": False, "lstrip": False, "rstrip": False, "single_word": False,
               "normalized": False}  # fmt: skip
_FILES = ["tokenizer*.json", "special_tokens_map.json", "generation_config.json", "config.json",
          "chat_template.json", "*.jinja"]  # fmt: skip
BUNDLED = "bundled"
#: Ends every turn of a ChatML template; fine-tunes often leave it out of their configs.
CHATML_END = "<|im_end|>"


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON file's object, {} if missing; raises ValueError."""
    if not path.is_file():
        return {}
    try:
        value = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def read_tokenizer(folder: Path) -> str:
    """Return `tokenizer.json` with its neighbours' added tokens; raises OSError, ValueError."""
    data = read_bytes(folder / "tokenizer.json", MAX_TOKENIZER)
    text, parsed = data.decode(), parse_json(data)
    if not isinstance(parsed, dict):
        raise ValueError(f"{folder / 'tokenizer.json'} holds no JSON object")
    settings = read_object(folder / "tokenizer_config.json")
    named = read_object(folder / "special_tokens_map.json")
    backend = None
    known = {token["content"]: token for token in parsed.get("added_tokens", [])}
    for number, token in [*_numbered_tokens(settings), *_special_tokens(settings, named)]:
        content = token["content"]
        before = known.get(content)
        if before is not None and (number is None or token == {k: before[k] for k in token}):
            continue
        backend = backend or Tokenizer.from_str(text)
        known[content] = {**_PROPERTIES, **token}
        index = backend.token_to_id(content)
        if number is None and index is None:
            continue
        if number not in (None, backend.get_vocab_size() if index is None else index):
            log.warning("%s: tokenizer_config.json gives %r the id %s, which tokenizer.json does "
                        "not: it is left out", folder, content, number)  # fmt: skip
            continue
        added = AddedToken(**known[content])
        (backend.add_special_tokens if added.special else backend.add_tokens)([added])
    return text if backend is None else str(backend.to_str())


def _numbered_tokens(settings: Mapping[str, Any]) -> list[tuple[int | None, dict[str, Any]]]:
    table = settings.get("added_tokens_decoder") or {}
    try:
        tokens = {
            int(number): {k: token[k] for k in _PROPERTIES if k in token}
            | {"content": token["content"]}
            for number, token in table.items()
        }
        return sorted(tokens.items())
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("added_tokens_decoder must hold tokens by id") from None


def _special_tokens(*sources: Mapping[str, Any]) -> list[tuple[int | None, dict[str, Any]]]:
    """Return tokens that have a role: one under `..._token`, more under `..._special_tokens`."""
    values: list[Any] = []
    for source in sources:
        for key, value in source.items():
            if key.endswith("_token"):
                values.append(value)
            elif key in ("additional_special_tokens", "extra_special_tokens"):
                values += value.values() if isinstance(value, dict) else value or []
    texts = [value.get("content") if isinstance(value, dict) else value for value in values]
    special = {"special": True, "normalized": False}
    return [
        (None, {"content": text, **special}) for text in texts if text and isinstance(text, str)
    ]


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name, as transformers finds them; own files win. ValueError."""
    files: dict[str, str] = {}
    path = folder / "chat_template.jinja"
    if path.is_file():
        files["default"] = read_text(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = read_text(path)
    if "default" in files:
        return files
    for source in (settings, read_object(folder / "chat_template.json")):
        if templates := _named(source.get("chat_template")):
            return {**templates, **files}
    return files


def _named(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        try:
            value = {item["name"]: item["template"] for item in value}
        except (KeyError, TypeError):
            raise ValueError("chat_template lists templates without name or template") from None
    value = value or {}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise ValueError("chat_template must be a text, or texts by name")


def find_tokenizer(name: str, *, download: bool = False) -> Path | None:
    """Return the folder of `tokenizer.json` by folder, hub id or "bundled"; None if missing."""
    if name == BUNDLED:
        return bundled_path()
    if not name:
        return None
    folder = Path(name)
    if folder.is_dir():
        return folder if (folder / "tokenizer.json").is_file() else None
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=not download))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError):
        return None
    return folder if (folder / "tokenizer.json").is_file() else None


def end_tokens(folder: Path, token_id: Callable[[str], int | None]) -> frozenset[int]:
    """Return all end token ids named by a model's files, as vLLM and transformers do; ValueError.

    A template in ChatML adds `<|im_end|>`. `token_id` maps text to an id or None.
    """
    settings = read_object(folder / "tokenizer_config.json")
    special = read_object(folder / "special_tokens_map.json")
    names = [content_of(settings.get("eos_token")), content_of(special.get("eos_token"))]
    if any(CHATML_END in template for template in read_templates(folder, settings).values()):
        names.append(CHATML_END)
    ids = {index for name in names if name and (index := token_id(name)) is not None}
    config = read_object(folder / "config.json")
    inner = config.get("text_config")
    sources = {
        "generation_config.json": read_object(folder / "generation_config.json"),
        "config.json": config,
        "config.json (text_config)": inner if isinstance(inner, dict) else {},
    }
    for file, source in sources.items():
        ids |= _ids(source.get("eos_token_id"), file)
    return frozenset(ids)


def read_end_tokens(folder: Path, rows: int) -> frozenset[int]:
    """Return a folder's end tokens within the logits; raises ValueError."""
    return within(end_tokens(folder, _ids_by_text(folder)), rows)


def within(ids: frozenset[int], rows: int) -> frozenset[int]:
    """Drop ids beyond the logits, with a warning."""
    outside = sorted(token for token in ids if not 0 <= token < rows)
    if outside:
        log.warning(
            "eos_token_id names %s, outside the vocabulary of %d tokens: dropped", outside, rows
        )
    return ids.difference(outside)


def _ids_by_text(folder: Path) -> Callable[[str], int | None]:
    """Return a look-up of token ids; the large tokenizer.json is read only where it must be."""
    added = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    ids = {
        content_of(token): int(key)
        for key, token in (added if isinstance(added, dict) else {}).items()
        if str(key).isdecimal()
    }

    @cache
    def others() -> dict[str, int]:
        spec = read_object(folder / "tokenizer.json")
        words = (spec.get("model") or {}).get("vocab") or {}
        if isinstance(words, list):  # Unigram: pairs of text and score, by id
            words = {pair[0]: index for index, pair in enumerate(words)}
        return {token["content"]: token["id"] for token in spec.get("added_tokens") or ()} | words

    return lambda text: ids[text] if text in ids else others().get(text)


def content_of(token: Any) -> str | None:
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
