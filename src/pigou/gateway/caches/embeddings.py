"""Embeddings: a text's vector is computed once for a model and its other parameters."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from pigou.gateway.caches.layers import AnswerLookup, CacheControl, CacheLayer, Caches
from pigou.kv.tenure import Tenure

PATH = "/v1/embeddings"
#: Fields that do not change a vector.
_IRRELEVANT = ("input", "user", "cache_salt", "request_id", "priority")


class EmbeddingCache:
    """Answers requests all of whose texts are known; others are forwarded whole."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches

    def ask(
        self, body: dict[str, Any], tenure: Tenure, control: CacheControl
    ) -> tuple[AnswerLookup, list[str]] | None:
        """Return a request's place and texts; None if it has token ids or more than texts."""
        if CacheLayer.EMBEDDING not in self._caches.layers or "input" not in body:
            return None
        texts = msgspec.json.decode(body["input"])
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or any(type(text) is not str for text in texts):
            return None
        fields = {name: msgspec.json.decode(raw) for name, raw in body.items()
                  if name not in _IRRELEVANT}  # fmt: skip
        content = msgspec.json.encode(fields, order="deterministic")
        bound = self._caches.bind(CacheLayer.EMBEDDING, tenure)
        return AnswerLookup(bound, content, control, time.monotonic()), texts

    def reply(self, lookup: AnswerLookup, texts: list[str], model: str) -> bytes | None:
        """Return the whole reply from memory; None if a text is missing."""
        if not lookup.control.reads:
            return None
        layer, age = CacheLayer.EMBEDDING, lookup.control.max_age_s
        rows = [self._caches.get(layer, lookup.bound, _content(lookup, text), age)
                for text in texts]  # fmt: skip
        if None in rows:
            return None
        lookup.status = "hit"
        data = [{"object": "embedding", "index": index, "embedding": vector}
                for index, (vector, _) in enumerate(rows)]  # fmt: skip
        tokens = round(sum(tokens for _, tokens in rows))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0,
                 "prompt_tokens_details": {"cached_tokens": tokens}}  # fmt: skip
        reply = {"object": "list", "data": data, "model": model, "usage": usage}
        return msgspec.json.encode(reply)

    def store(self, lookup: AnswerLookup, texts: list[str]) -> None:
        """Store each text's vector of the reply that was recorded."""
        if not lookup.control.stores or lookup.room < 0:
            return
        try:
            reply = msgspec.json.decode(b"".join(lookup.frames), type=_Reply)
        except msgspec.DecodeError:
            return
        if sorted(row.index for row in reply.data) != list(range(len(texts))):
            return
        cost_s = (time.monotonic() - lookup.began) / len(texts)
        share = reply.usage.prompt_tokens / max(1, sum(map(len, texts)))
        for row in reply.data:
            text, size = texts[row.index], len(memoryview(row.embedding))
            entry = msgspec.Raw(bytes(row.embedding)), share * len(text)
            content = _content(lookup, text)
            self._caches.put(CacheLayer.EMBEDDING, lookup.bound, content, entry, size, cost_s)


class _EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int = 0


class _EmbeddingRow(msgspec.Struct):
    index: int
    embedding: msgspec.Raw


class _Reply(msgspec.Struct):
    data: list[_EmbeddingRow]
    usage: _EmbeddingUsage = msgspec.field(default_factory=_EmbeddingUsage)


def _content(lookup: AnswerLookup, text: str) -> bytes:
    return lookup.content + b"\0" + text.encode("utf-8", "surrogatepass")
