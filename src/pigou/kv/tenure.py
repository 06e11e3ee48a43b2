"""Tenure: the conditions under which a cached artifact was made, and outside which it is void."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Generic, TypeVar

from pigou.request import NEVER

_BYTES = 32
#: Rises when the encoding changes its meaning: digests of two versions are unrelated.
_PERSON = b"pigou-tenure-1"
_CONTENT = b"pigou-artifact-1"
_MARK = "tenure1:"
_SALT = re.compile(r"tenure1:[0-9a-f]{64}(?::([1-9][0-9]{0,18}))?", re.ASCII)
T = TypeVar("T")


class Purpose(StrEnum):
    """Which cache an artifact is for; caches never share one."""

    PREFIX = "prefix"
    SEMANTIC = "semantic"
    RETRIEVAL = "retrieval-result"
    TOOL = "tool-result"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Tenure:
    """Everything that a cached artifact's validity depends on; its digest seeds the block hashes.

    Two requests share what is cached only when all fields are equal, character by character. The
    fields are those of the Tenure Principle (seed `throughput-mechanics`); the token ids, or
    whatever else the artifact was made of, join them in the cache key.

    Example:
        alice, bob = Tenure(tenant="alice"), Tenure(tenant="bob")
        assert alice.encode() != bob.encode()  # no block of one is ever a hit of the other
    """

    tenant: str = ""
    cache_salt: str = ""  # the request's own `cache_salt`
    model: str = ""  # name of the model, or version of the embedding
    principal: str = ""  # on whose behalf within the tenant (user, group, service)
    permissions: frozenset[str] = frozenset()  # what the principal may see, in any order
    release: str = ""  # release manifest (weights, quantization, engine and application versions)
    template: str = ""  # version of the prompt template
    corpus: str = ""  # snapshot of the retrieved documents
    tools: frozenset[str] = frozenset()  # versions of the tools' schemas, in any order
    safety: str = ""  # version of the safety policy
    # when the artifact becomes void, in nanoseconds since 1970; `NEVER` for never.
    expiry: int = NEVER
    purpose: Purpose = Purpose.PREFIX

    def encode(self) -> bytes:
        """Encode injectively: each field's name, kind and value with its length before it."""
        return b"".join(_sized(part) for part in self._parts())

    def digest(self) -> bytes:
        """Return the seed of this tenure's block hashes: BLAKE2b-256 of the encoding."""
        return blake2b(self.encode(), digest_size=_BYTES, person=_PERSON).digest()

    def key(self, content: bytes) -> bytes:
        """Return the cache key of what was made of `content` under this tenure, 32 bytes.

        It is BLAKE2b-256 of the content, keyed by the digest. KV blocks have keys of their own
        (`pigou.kv.hashing.chain`).
        """
        return blake2b(content, digest_size=_BYTES, key=self.digest(), person=_CONTENT).digest()

    def salt(self) -> str:
        """Return the `cache_salt` under which workers keep this tenure's blocks apart.

        It is `tenure1:DIGEST`, or `tenure1:DIGEST:EXPIRY` with the nanoseconds since 1970, which
        Pigou's workers read. To others it is a text like any; the digest has the expiry in it.
        """
        salt = _MARK + self.digest().hex()
        return salt if self.expiry == NEVER else f"{salt}:{self.expiry}"

    def expired(self, now: int) -> bool:
        """Whether what was made under this tenure is void at `now` (ns since 1970)."""
        return self.expiry != NEVER and now >= self.expiry

    def lasting(self, ttl: int, now: int) -> Tenure:
        """Return this tenure with an expiry at most `ttl` nanoseconds (at least 1) after `now`.

        Time is divided in epochs of `ttl`, and the expiry is the end of the present one: tenures
        that are equal but for the expiry are equal within an epoch. Where epochs begin depends on
        the other fields, or everything with this `ttl` would become void at one moment.
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
    """A cached artifact with its tenure: only `open` returns it.

    For caches above the engine (answers, tool results, retrieved passages). A match of tokens,
    or of meaning, finds an entry; whether it may be used is the tenure's to say.
    """

    tenure: Tenure  # under which it was made
    key: bytes  # of the artifact in its cache (`Tenure.key`)
    _artifact: T = field(repr=False)

    @classmethod
    def wrap(cls, artifact: T, tenure: Tenure, content: bytes) -> Tenured[T]:
        """Wrap what was made of `content` under a tenure."""
        return cls(tenure, tenure.key(content), artifact)

    def open(self, tenure: Tenure, now: int) -> T | None:
        """Return the artifact under an equal tenure before its expiry, else None."""
        return None if tenure != self.tenure or self.tenure.expired(now) else self._artifact


def salt_expiry(salt: str) -> int:
    """Return when the tenure of a salt expires, `NEVER` for other salts; refuse a broken one."""
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
    """Encode also what JSON lets through and UTF-8 does not: lone surrogates."""
    return value.encode("utf-8", "surrogatepass")
