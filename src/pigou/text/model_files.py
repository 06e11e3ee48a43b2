"""Files of a model's folder that several parts read: JSON objects and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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

    Files of their own come before `tokenizer_config.json`, whose contents are `settings`.

    Raises:
        ValueError: they are no texts.
    """
    files: dict[str, str] = {}
    path = folder / "chat_template.jinja"
    if path.is_file():
        files["default"] = path.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path.read_text(encoding="utf-8")
    if files:
        return files
    for source in (settings, read_object(folder / "chat_template.json")):
        if templates := _named(source.get("chat_template")):
            return templates
    return {}


def _named(value: Any) -> dict[str, str]:
    """Return templates by name: one text is `default`; several come as a list or as a map."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {item["name"]: item["template"] for item in value}
    value = value or {}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise ValueError("chat_template must be a text, or texts by name")
