"""Files of a model's folder that several parts read: JSON objects and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pigou.models import bundled_path


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; an empty one where the file is missing.

    Raises:
        ValueError: it is not JSON, or no object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name, from wherever transformers looks for them.

    `settings` are the contents of `tokenizer_config.json`; files of their own come before them.

    Raises:
        ValueError: they are no texts.
    """
    files: dict[str, str] = {}
    path = folder / "chat_template.jinja"
    if path.is_file():
        files["default"] = path.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path.read_text(encoding="utf-8")
    if "default" in files:
        return files
    for source in (settings, read_object(folder / "chat_template.json")):
        if templates := _named(source.get("chat_template")):
            return {**templates, **files}
    return files


def _named(value: Any) -> dict[str, str]:
    """Return templates by name: one text is `default`; several come as a list or as a map."""
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


_FILES = ["tokenizer*.json", "special_tokens_map.json", "generation_config.json", "config.json",
          "chat_template.json", "*.jinja"]  # fmt: skip
BUNDLED = "bundled"


def find_tokenizer(name: str, *, download: bool = False) -> Path | None:
    """Return the folder that has a model's `tokenizer.json`; None when it cannot be had.

    Args:
        name: folder, hub id ("owner/name"), or "bundled".
        download: ask the hub when its cache does not have it.
    """
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
