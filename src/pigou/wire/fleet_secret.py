"""Fleet secret: processes of one fleet authenticate, with an HMAC key (RFC 2104) per use."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import MutableMapping
from hashlib import sha256
from typing import Any

import zmq
from zmq.utils import z85

from pigou.config import ConfigError
from pigou.small_file import read_text

#: Environment variable with the secret; it is removed once it is read.
VARIABLE = "PIGOU_FLEET_SECRET"
#: Environment variable with the number of a file descriptor that the secret can be read from.
DESCRIPTOR = "PIGOU_FLEET_SECRET_FD"
#: Headers of a proof of the secret: the client's nonce, and the server's answer to it.
NONCE = "x-pigou-fleet-nonce"
PROOF = "x-pigou-fleet-proof"
#: Header that names a request's tenant to a worker; valid with the secret alone.
TENANT = "x-pigou-fleet-tenant"
_MIN_CHARS, _MAX_CHARS = 16, 4096
_PERSON = b"pigou-fleet-1:"


class FleetSecret:
    """A secret and its derived keys; its repr hides them."""

    def __init__(self, text: str, where: str = "the fleet secret") -> None:
        """Take a secret of 16 to 4,096 characters. Raises ConfigError."""
        text = text.strip()
        if not _MIN_CHARS <= len(text) <= _MAX_CHARS:
            raise ConfigError(
                f"{where} has {len(text)} characters; it must have {_MIN_CHARS} to {_MAX_CHARS}: "
                "`openssl rand -hex 32` makes one"
            )
        self._secret = text.encode("utf-8", "surrogateescape")

    def __repr__(self) -> str:
        return "FleetSecret(...)"

    @classmethod
    def make(cls) -> FleetSecret:
        """Return a new random secret."""
        return cls(secrets.token_hex(32))

    @classmethod
    def read(cls, path: str) -> FleetSecret:
        """Read the secret from a file; raises ConfigError."""
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"fleet_secret_file {path}: {error}") from error
        return cls(text, f"fleet_secret_file {path}")

    @classmethod
    def given(
        cls, path: str = "", environment: MutableMapping[str, str] | None = None
    ) -> FleetSecret | None:
        """Return the secret from a file or the environment, removed there; None, or ConfigError."""
        environment = os.environ if environment is None else environment
        text, descriptor = environment.pop(VARIABLE, None), environment.pop(DESCRIPTOR, None)
        if descriptor is not None:
            text = _read_descriptor(descriptor)
        if path:
            return cls.read(path)
        return None if text is None else cls(text, VARIABLE)

    def key(self, use: str) -> bytes:
        """Return the key of one use, 32 bytes."""
        return hmac.digest(self._secret, _PERSON + use.encode(), "sha256")

    def text(self) -> bytes:
        """Return the secret itself, to hand it to a process of the fleet."""
        return self._secret

    @property
    def token(self) -> str:
        """Bearer token of requests to workers."""
        return self.key("http").hex()

    def admits(self, authorization: str | None) -> bool:
        """Whether a header carries the token, or the secret itself; compared in constant time."""
        scheme, _, value = (authorization or "").partition(" ")
        shown = _digest(value.strip().encode("utf-8", "surrogateescape"))
        good = hmac.compare_digest(shown, _digest(self.token.encode()))
        good |= hmac.compare_digest(shown, _digest(self._secret))
        return good and scheme.lower() == "bearer"

    def sign(self, use: str, data: bytes) -> bytes:
        """Return the signature of a message of one use: HMAC-SHA256, 32 bytes."""
        return hmac.digest(self.key(use), data, "sha256")

    def verifies(self, use: str, data: bytes, signature: bytes) -> bool:
        """True if a signature is valid for a message and use, in constant time."""
        return hmac.compare_digest(self.sign(use, data), signature)

    def proof(self, nonce: str) -> str:
        """Return the proof of the secret for a peer's `nonce`."""
        return self.sign("http-proof", nonce.encode("utf-8", "surrogateescape")).hex()

    def proves(self, nonce: str, proof: str) -> bool:
        """True if `proof` is valid for `nonce`."""
        shown = proof.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(self.proof(nonce).encode(), shown)


def tenant_mark(tenant: str) -> str:
    """Return a tenant's pseudonym for `TENANT`: equal for equal names."""
    return _digest(tenant.encode("utf-8", "surrogatepass")).hex()[:32]


def _digest(data: bytes) -> bytes:
    return sha256(data).digest()


def _read_descriptor(text: str) -> str:
    try:
        with os.fdopen(int(text), "rb") as source:
            return source.read(_MAX_CHARS + 1).decode("utf-8", "surrogateescape")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{DESCRIPTOR} is {text!r}, which cannot be read: {error}") from error


def secure_server(socket: zmq.Socket[Any], secret: FleetSecret) -> None:
    """Let a socket talk to who knows the secret alone, before it is bound. Raises ConfigError."""
    _check()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, _private(secret, "publisher"))


def secure_client(socket: zmq.Socket[Any], secret: FleetSecret) -> None:
    """Let a socket talk only to publishers with the secret; raises ConfigError."""
    _check()
    own = _private(secret, "subscriber")
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_private(secret, "publisher")))
    socket.setsockopt(zmq.CURVE_SECRETKEY, own)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(own))


def _private(secret: FleetSecret, who: str) -> bytes:
    return bytes(z85.encode(secret.key(f"kv-events {who}")))


def _check() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            "the fleet has a secret, and this libzmq has no CURVE for KV events: install pyzmq's "
            "own wheel, or turn KV events off (--no-kv-events)"
        )
