"""API keys: kept as hashes, compared in constant time, each of a tenant."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from pigou.config import ConfigError
from pigou.gateway.grant import OPEN, Fixed, Grant, May
from pigou.gateway.limits import Limits

NO_LIMITS = Limits()
_TENANT = re.compile(r"[A-Za-z0-9_-]{1,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Files in which each key says what its requests may do; others have a line for each key.
_STRUCTURED = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Key:
    """The SHA-256 of a key (32 bytes), whose it is, and what it gives.

    An `admin` key sees the whole fleet and all tenants; others see what is their tenant's.
    """

    tenant: str
    digest: bytes
    grant: Grant = OPEN
    admin: bool = False
    limits: Limits = NO_LIMITS


#: What everybody has where there are no keys.
NO_KEY = Key("", b"", admin=True)
#: What ends the line of an administrator's key.
_ADMIN = ":admin"


class _Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tenant: str
    sha256: str
    tenure: Fixed = Fixed()
    may: May = May()
    admin: bool = False
    limits: Limits = NO_LIMITS


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    keys: list[_Entry]


class Keys:
    """All keys that are accepted."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a file.

        A `.yaml` or `.json` file has `keys`, a list of `tenant`, `sha256`, `tenure`, `may`
        (`pigou.gateway.grant`), `admin` and `limits` (`pigou.gateway.limits`). Any other has lines
        `TENANT:SHA256_HEX` or `TENANT:SHA256_HEX:admin`, whose requests may set all of their
        tenure; empty lines and lines with # are skipped.

        Raises:
            ConfigError: the file cannot be read, has a bad entry, or no key, or one twice.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys_file {path}: {error}") from error
        keys = _entries(text, path) if path.suffix in _STRUCTURED else _lines(text, path)
        if not keys:
            raise ConfigError(f"api_keys_file {path} has no keys; `pigou key TENANT` makes one")
        if len({key.digest for key in keys}) < len(keys):
            raise ConfigError(f"api_keys_file {path} has a key twice; keep one of its entries")
        return cls(keys)

    def find(self, authorization: str | None) -> Key | None:
        """Return the key that an `Authorization: Bearer KEY` header holds; None for a wrong one.

        All hashes are compared, each in constant time, so that the time says nothing.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        digest = sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if scheme.lower() == "bearer" else None


def make_key(tenant: str, *, admin: bool = False) -> tuple[str, str]:
    """Return a new random key, and the line for the keys file.

    Args:
        tenant: whose it is.
        admin: it sees the whole fleet.

    Raises:
        ConfigError: the tenant's name has other characters than letters, digits, `_`, `-`.
    """
    _check_tenant(tenant, "tenant")
    secret = f"pigou-{secrets.token_urlsafe(32)}"
    return secret, f"{tenant}:{sha256(secret.encode()).hexdigest()}{_ADMIN * admin}"


def _lines(text: str, path: Path) -> list[Key]:
    return [
        _parse(line.strip(), f"{path}, line {number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    ]


def _parse(line: str, where: str) -> Key:
    admin = line.endswith(_ADMIN)
    tenant, _, digest = line.removesuffix(_ADMIN).rpartition(":")
    _check_tenant(tenant, where)
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(
            f"{where}: not TENANT:SHA256_HEX or TENANT:SHA256_HEX:admin; `pigou key TENANT` "
            "makes such a line"
        )
    return Key(tenant, bytes.fromhex(digest), admin=admin)


def _entries(text: str, path: Path) -> list[Key]:
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    try:
        entries = decode(text, type=_File).keys
    except msgspec.DecodeError as error:
        raise ConfigError(f"api_keys_file {path}: {error}") from error
    return [_key(entry, f"{path}, keys[{number}]") for number, entry in enumerate(entries)]


def _key(entry: _Entry, where: str) -> Key:
    _check_tenant(entry.tenant, where)
    if not _DIGEST.fullmatch(entry.sha256):
        raise ConfigError(
            f"{where}: sha256 is {entry.sha256!r}; it must be the 64 hexadecimal digits after the "
            "colon of what `pigou key TENANT` prints"
        )
    grant = Grant(tenure=entry.tenure, may=entry.may)
    grant.check(where)
    entry.limits.check(where)
    return Key(entry.tenant, bytes.fromhex(entry.sha256), grant, entry.admin, entry.limits)


def _check_tenant(tenant: str, where: str) -> None:
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{where}: the tenant {tenant!r} must have 1 to 32 letters, digits, '_' or '-'"
        )
