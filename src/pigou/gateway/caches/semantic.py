"""Answers to similar questions: equal but for the last user's text, whose guards are equal."""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.gateway.caches.layers import CacheLayer, Caches
from pigou.gateway.request import ParsedRequest
from pigou.kv.manifest import Bound

Vector: TypeAlias = NDArray[np.float32]
#: Numbers of a vector of hashed n-grams, and characters of a gram.
_WIDTH, _GRAM = 512, 3
#: Vectors kept in all, and of texts that share everything else.
_MAX_VECTORS, _MAX_GROUP = 8192, 512
_WORDS = re.compile(r"\w+(?:['’]\w+)*|!=|[^\w\s.,;:!?'’\"“”`…]")
_NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
#: Phrases that may be left out before a question, after it, and inside.
_BEFORE = re.compile(
    r"\A\s*(?:(?:hi|hello|hey|so|ok|okay)\b[\s,!.]*)?(?:please\s+)?"
    r"(?:(?:can|could|would|will)\s+you\s+(?:please\s+)?)?(?:tell\s+me\s+)?(?:please\s+)?",
    re.IGNORECASE,
)
_AFTER = (["please"], ["thanks"], ["thank", "you"])
_FILLERS = frozenset(("a", "an", "the", "is", "are", "of"))
_NEGATED = frozenset(("ca", "wo", "sha"))  # can't, won't, shan't


def hashed_ngrams(text: str) -> Vector:
    """Return a unit vector of a text's words and letter trigrams, hashed with signs."""
    words = text.lower().split()
    grams = [f" {word} "[i : i + _GRAM] for word in words for i in range(len(word))]
    vector = np.zeros(_WIDTH, dtype=np.float32)
    for gram, weight in [*((gram, 1.0) for gram in grams), *((f"_{w}", 2.0) for w in words)]:
        code = zlib.crc32(gram.encode("utf-8", "surrogatepass"))
        vector[code % _WIDTH] += weight if code & 0x1000_0000 else -weight
    return unit(vector)


def unit(vector: Vector) -> Vector:
    """Return a vector of length 1; zeros stay."""
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def guard(text: str) -> tuple[str, ...]:
    """Return what two texts must share in this order: words, signs and numbers.

    All words count but fillers, case and plurals, since a name may be written in lower case.
    """
    words, guards = _WORDS.findall(_BEFORE.sub("", text, count=1)), []
    for ending in _AFTER:
        if [word.lower() for word in words[-len(ending) :]] == ending:
            del words[-len(ending) :]
    for word in words:
        lower = word.lower().replace("’", "'")
        stem, _, end = lower.partition("'")
        if end == "t" and stem.endswith("n"):
            guards.append("not")
            stem = "" if stem[:-1] in _NEGATED else stem[:-1]
        elif lower == "cannot":
            stem = "not"
        elif end not in ("", "s", "re", "ll", "m", "ve", "d"):
            stem = lower
        is_filler = stem in _FILLERS and not (word.isupper() and len(word) > 1)
        if stem and not is_filler:
            plural = len(stem) > 3 and stem.endswith("s") and not stem.endswith("ss")
            guards.append(stem[:-1] if plural else stem)
    return (*guards, *_NUMBER.findall(text))


@dataclass(frozen=True, slots=True)
class SemanticLookup:
    """A request's text, and all that must be equal."""

    bound: Bound
    group: bytes  # the canonical request without the text
    text: str
    vector: Vector

    @property
    def content(self) -> bytes:
        """What the answer was made from."""
        return self.group + b"\0" + self.text.encode("utf-8", "surrogatepass")


_Key: TypeAlias = tuple[Bound, bytes, bytes]


def _key(lookup: SemanticLookup) -> _Key:
    guards = "\0".join(guard(lookup.text)).encode("utf-8", "surrogatepass")
    return lookup.bound, lookup.group, blake2b(guards, digest_size=16).digest()


def split_text(parsed: ParsedRequest, content: bytes) -> tuple[bytes, str] | None:
    """Split a canonical request into the last user's text and the rest; None if it has none."""
    if not parsed.single:
        return None
    body: dict[str, Any] = msgspec.json.decode(content[len(parsed.path) :])
    if parsed.chat:
        messages = body.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages else {}
        text = last.get("content") if last.get("role") == "user" else None
        last["content"] = ""
    else:
        text, body["prompt"] = body.get("prompt"), ""
    if not isinstance(text, str) or not text.strip():
        return None
    return parsed.path.encode() + msgspec.json.encode(body, order="deterministic"), text


class SemanticCache:
    """Finds the nearest earlier text of one tenure and one request otherwise equal."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._groups: OrderedDict[_Key, dict[str, Vector]] = OrderedDict()
        self._vectors = 0

    def find(self, lookup: SemanticLookup, max_age_s: float | None) -> tuple[bytes, float] | None:
        """Return an answer and its distance (1 - cosine); None if none is near enough."""
        key = _key(lookup)
        group = self._groups.get(key, {})
        threshold = self._caches.options[CacheLayer.SEMANTIC].threshold
        if group:
            self._groups.move_to_end(key)
        texts = [text for text, vector in group.items() if vector.shape == lookup.vector.shape]
        scores = np.array([group[text] for text in texts]) @ lookup.vector if texts else ()
        for index in np.argsort(scores)[::-1].tolist():
            if scores[index] < threshold:
                break
            near = SemanticLookup(lookup.bound, lookup.group, texts[index], group[texts[index]])
            answer = self._caches.get(CacheLayer.SEMANTIC, lookup.bound, near.content, max_age_s)
            if answer is not None:
                distance = max(0.0, 1.0 - float(scores[index]))
                self._caches.distance += distance
                return answer, distance
            del group[texts[index]]  # evicted, or over
            self._vectors -= 1
        self._caches.layers[CacheLayer.SEMANTIC].counts["lookups"] += 1
        return None

    def store(self, lookup: SemanticLookup, answer: bytes, cost_s: float) -> None:
        """Store an answer by its text's vector, unless its tenure changed meanwhile."""
        size = len(answer) + lookup.vector.nbytes + len(lookup.content)
        layer, bound = CacheLayer.SEMANTIC, lookup.bound
        if not self._caches.put(layer, bound, lookup.content, answer, size, cost_s):
            return
        group = self._groups.setdefault(_key(lookup), {})
        self._vectors += lookup.text not in group
        group[lookup.text] = lookup.vector
        if len(group) > _MAX_GROUP:
            del group[next(iter(group))]
            self._vectors -= 1
        while self._vectors > _MAX_VECTORS:
            self._vectors -= len(self._groups.popitem(last=False)[1])
