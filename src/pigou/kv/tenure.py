"""Tenure: the conditions under which a cached artifact is valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Generic, TypeVar

from pigou.request import NEVER

_BYTES = 32
#: Version of the encoding: raise it when fields change meaning.
_PERSON = b"pigou-tenure-1"
_CONTENT = b"pigou-artifact-1"
_MARK = "tenure1:"
_SALT = re.compile(r"tenure1:[0-9a-f]{64}(?::([1-9][0-9]{0,18}))?", re.ASCII)
T = TypeVar("T")


class Purpose(StrEnum):
    """The cache that an artifact belongs to."""

    PREFIX = "prefix"
    SEMANTIC = "semantic"
    RETRIEVAL = "retrieval-result"
    TOOL = "tool-result"
    ANSWER = "answer"
    EMBEDDING = "embedding"
    CONTEXT = "compiled-context"


@dataclass(frozen=True, slots=True)
class Tenure:
    """Everything that a cached artifact's validity depends on; its digest seeds block hashes.

    Artifacts are shared only under equal tenures (Tenure Principle, seed `throughput-mechanics`).

    Example:
        alice, bob = Tenure(tenant="alice"), Tenure(tenant="bob")
        assert alice.encode() != bob.encode()  # no block of one is ever a hit of the other
    """

    tenant: str = ""
    cache_salt: str = ""  # the request's own `cache_salt`
    model: str = ""  # name of the model, or version of the embedding
    principal: str = ""  # user, group or service within the tenant
    permissions: frozenset[str] = frozenset()  # the principal's
    release: str = ""  # release manifest (weights, quantization, engine and application versions)
    template: str = ""  # version of the prompt template
    corpus: str = ""  # snapshot of the retrieved documents
    tools: frozenset[str] = frozenset()  # versions of the tools' schemas
    safety: str = ""  # version of the safety policy
    # nanoseconds since 1970.
    expiry: int = NEVER
    purpose: Purpose = Purpose.PREFIX

    def encode(self) -> bytes:
        """Return an injective encoding: each field's name, type and value, length-prefixed."""
        return b"".join(_sized(part) for part in self._parts())

    def digest(self) -> bytes:
        """Return the seed of this tenure's block hashes: BLAKE2b-256 of the encoding."""
        return blake2b(self.encode(), digest_size=_BYTES, person=_PERSON).digest()

    def key(self, content: bytes) -> bytes:
        """Return the cache key of `content`, 32 bytes: BLAKE2b-256 keyed by the digest."""
        return blake2b(content, digest_size=_BYTES, key=self.digest(), person=_CONTENT).digest()

    def salt(self) -> str:
        """Return the `cache_salt` for workers:

        `tenure1:DIGEST[:EXPIRY]`, expiry in ns since 1970.
        """
        salt = _MARK + self.digest().hex()
        return salt if self.expiry == NEVER else f"{salt}:{self.expiry}"

    def expired(self, now: int) -> bool:
        """True if artifacts of this tenure are void at `now` (ns since 1970)."""
        return self.expiry != NEVER and now >= self.expiry

    def lasting(self, ttl: int, now: int) -> Tenure:
        """Return this tenure with an expiry at most `ttl` (at least 1) nanoseconds after `now`.

        The expiry ends an epoch of length `ttl`, so equal tenures share artifacts within an epoch.
        Epochs are offset by the digest, to avoid that all artifacts expire at once.
        """
        timeless = replace(self, expiry=NEVER)
        phase = int.from_bytes(timeless.digest()[:8]) % ttl
        return replace(timeless, expiry=now - (now - phase) % ttl + ttl)

    def _parts(self) -> Iterator[bytes]:
        for tenure_field in fields(self):
            yield tenure_field.name.encode()
            value = getattr(self, tenure_field.name)
            match value:
                case str():
                    yield b"t" + _text(value)
                case int():
                    yield b"n%d" % value
                case frozenset():
                    yield b"s" + b"".join(_sized(item) for item in sorted(map(_text, value)))
                case _:
                    raise TypeError(
                        f"{tenure_field.name} is {value!r}; it must be {tenure_field.type}"
                    )


@dataclass(frozen=True, slots=True)
class Tenured(Generic[T]):
    """A cached artifact (answer, tool result, passage) that only an equal tenure can open."""

    tenure: Tenure
    key: bytes  # cache key (`Tenure.key`)
    _artifact: T = field(repr=False)

    @classmethod
    def wrap(cls, artifact: T, tenure: Tenure, content: bytes) -> Tenured[T]:
        """Wrap the artifact made from `content` under a tenure."""
        return cls(tenure, tenure.key(content), artifact)

    def open(self, tenure: Tenure, now: int) -> T | None:
        """Return the artifact under an equal tenure before its expiry, else None."""
        return None if tenure != self.tenure or self.tenure.expired(now) else self._artifact


def salt_expiry(salt: str) -> int:
    """Return a salt's expiry, `NEVER` for other salts; raise ValueError for a malformed one."""
    if not salt.startswith(_MARK):
        return NEVER
    match = _SALT.fullmatch(salt)
    expiry = int(match[1] or NEVER) if match else 0
    if match is None or expiry > NEVER:
        raise ValueError(
            f"it begins with {_MARK!r}, so it must be {_MARK}DIGEST or {_MARK}DIGEST:EXPIRY: 64 "
            "hexadecimal digits, and nanoseconds since 1970"
        )
    return expiry


def _sized(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


def _text(value: str) -> bytes:
    """Encode text, with the lone surrogates that JSON allows and UTF-8 does not."""
    return value.encode("utf-8", "surrogatepass")
