"""Tenure: the conditions under which a cached artifact was made, and outside which it is void."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import blake2b

_BYTES = 32
_PERSON = b"pigou-tenure"


@dataclass(frozen=True, slots=True)
class Tenure:
    """Everything that a cached block's validity hangs on; its digest seeds the block hashes.

    Two requests share cached blocks only when all fields are equal.

    Attributes:
        tenant: whose request it is.
        cache_salt: the request's own `cache_salt`.
        model: name of the model.
        principal: on whose behalf within the tenant (user, group, service).
        permissions: what the principal may see, in any order.
        release: digest of the release manifest (weights, quantization, engine version).
        template: version of the chat template.
        corpus: version of the retrieved documents.
        tools: version of the tool definitions.
        safety: version of the safety policy.
        expiry: epoch at whose end the artifact is void, in seconds; 0 for none.
        purpose: what the data may be used for.
    """

    tenant: str = ""
    cache_salt: str = ""
    model: str = ""
    principal: str = ""
    permissions: frozenset[str] = frozenset()
    release: str = ""
    template: str = ""
    corpus: str = ""
    tools: str = ""
    safety: str = ""
    expiry: int = 0
    purpose: str = ""

    def encode(self) -> bytes:
        """Encode injectively: each field by name and value, each with its length before it."""
        return b"".join(_sized(part) for part in self._parts())

    def digest(self) -> bytes:
        """Return the seed of this tenure's block hashes: BLAKE2b-256 of the encoding."""
        return blake2b(self.encode(), digest_size=_BYTES, person=_PERSON).digest()

    def _parts(self) -> Iterator[bytes]:
        for field in fields(self):
            yield field.name.encode()
            value = getattr(self, field.name)
            if isinstance(value, frozenset):
                yield b"".join(_sized(item) for item in sorted(map(_text, value)))
            else:
                yield _text(str(value))


def _sized(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


def _text(value: str) -> bytes:
    """Encode also what JSON lets through and UTF-8 does not: lone surrogates."""
    return value.encode("utf-8", "surrogatepass")
