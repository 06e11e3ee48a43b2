"""API keys: kept as hashes, compared in constant time, each of a tenant."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

from pigou.config import ConfigError

_TENANT = re.compile(r"[A-Za-z0-9_-]{1,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SALT_MOST = 128


@dataclass(frozen=True, slots=True)
class Key:
    """The SHA-256 of a key (32 bytes), and whose it is."""

    tenant: str
    digest: bytes


class Keys:
    """All keys that are accepted."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a file of lines `TENANT:SHA256_HEX`; empty lines and lines with # are skipped.

        Raises:
            ConfigError: the file cannot be read, has a bad line, or no key.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys_file {path}: {error}") from error
        keys = [
            _parse(line.strip(), f"{path}, line {number}")
            for number, line in enumerate(lines, 1)
            if line.strip() and not line.strip().startswith("#")
        ]
        if not keys:
            raise ConfigError(f"api_keys_file {path} has no keys; `pigou key TENANT` makes one")
        return cls(keys)

    def tenant(self, authorization: str | None) -> str | None:
        """Return whose key an `Authorization: Bearer KEY` header holds; None for a wrong one.

        All hashes are compared, each in constant time, so that the time says nothing.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        digest = sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.tenant
        return found if scheme.lower() == "bearer" else None


def make_key(tenant: str) -> tuple[str, str]:
    """Return a new random key, and the line for the keys file.

    Raises:
        ConfigError: the tenant's name has other characters than letters, digits, `_`, `-`.
    """
    _check_tenant(tenant, "tenant")
    secret = f"pigou-{secrets.token_urlsafe(32)}"
    return secret, f"{tenant}:{sha256(secret.encode()).hexdigest()}"


def tenant_salt(tenant: str, salt: str | None) -> str:
    """Return the cache salt of a tenant's request: no two tenants ever share one.

    A tenant's name has no dot, so that `tenant.salt` is read in one way only; what would be
    longer than workers take is hashed.
    """
    if salt is None:
        return tenant
    joined = f"{tenant}.{salt}"
    if len(joined) <= _SALT_MOST:
        return joined
    return f"{tenant}..{blake2b(salt.encode('utf-8', 'surrogatepass'), digest_size=32).hexdigest()}"


def _parse(line: str, where: str) -> Key:
    tenant, _, digest = line.rpartition(":")
    _check_tenant(tenant, where)
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: not TENANT:SHA256_HEX; `pigou key TENANT` makes such a line")
    return Key(tenant, bytes.fromhex(digest))


def _check_tenant(tenant: str, where: str) -> None:
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{where}: the tenant {tenant!r} must have 1 to 32 letters, digits, '_' or '-'"
        )
