"""Prompts as pieces of content, about a token each, for comparisons without a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

#: Words of up to eight characters, and what is between them.
_PIECE = re.compile(r"\s?\w{1,8}|\s?[^\w\s]|\s")


def prompt_pieces(body: dict[str, Any], max_pieces: int = 2**22) -> Sequence[Hashable] | None:
    """Return the pieces of a body's prompt: token ids, or pieces of its text; None for none."""
    ids = body.get("prompt_token_ids") or body.get("prompt")
    if isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids):
        return ids[:max_pieces]
    text = body.get("prompt")
    messages = body.get("messages")
    if isinstance(messages, list):
        text = "".join(
            f"{message.get('role', '')}: {message.get('content', '')}\n"
            for message in messages if isinstance(message, dict)
        )  # fmt: skip
    if not isinstance(text, str) or not text:
        return None
    return _PIECE.findall(text[: 8 * max_pieces])[:max_pieces]
