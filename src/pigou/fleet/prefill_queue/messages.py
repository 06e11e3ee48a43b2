"""What gateways and prefill workers say to each other over the broker, and where."""

from __future__ import annotations

import re
from typing import Literal, Self, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from pigou.config import ConfigError, wrong
from pigou.fleet.nats_address import NatsAddress, public_address
from pigou.fleet.tls_files import TlsFiles
from pigou.wire.fleet_secret import FleetSecret

_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class QueueAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A queue of a NATS server: `nats://[USER:PASSWORD@]HOST:PORT/NAME[?storage=memory]`.

    Attributes:
        nats: address of the server.
        name: of the queue: its stream is `PREFILL_NAME`, its subjects begin with `NAME.`.
        storage: of the prompts; those in memory are gone when the server ends.
        lease_s: seconds after which a prompt is delivered again whose worker is silent.
        max_age_s: seconds after which the broker forgets a prompt, whose gateway is gone then.
    """

    nats: NatsAddress
    name: str
    storage: Literal["file", "memory"] = "file"
    lease_s: float = 10.0
    max_age_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse times that are none."""
        for name, value in (("lease_s", self.lease_s), ("max_age_s", self.max_age_s)):
            if not 0.1 <= value <= 86_400:
                raise ConfigError(f"prefill queue: {name} is {value}; it must be 0.1 to 86400")

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL.

        Raises:
            ConfigError: it is none of NATS, names no queue, or has an unknown parameter.
        """
        parts = urlsplit(url)
        name = parts.path.strip("/")
        if parts.scheme not in ("nats", "tls") or not parts.netloc or not _NAME.fullmatch(name):
            raise ConfigError(
                f"prefill queue is {public_address(url)!r}; write nats://HOST:PORT/NAME, NAME of "
                "letters, digits, '_' and '-'"
            )
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        files = {key: query.pop(key) for key in TlsFiles.__struct_fields__ if key in query}
        server = f"{parts.scheme}://{parts.netloc}?{urlencode(files)}"
        fields = {**query, "name": name, "nats": NatsAddress.parse([server], "prefill queue")}
        try:
            return msgspec.convert(fields, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"prefill queue: {wrong(error, cls, fields)}") from error

    @property
    def stream(self) -> str:
        """Name of the stream."""
        return f"PREFILL_{self.name}"

    def subject(self, version: str, *prompt: str) -> str:
        """Return the subject of a prompt by its tokens; `>` for those of all prompts."""
        return ".".join((self.name, "prefill", token(version or "any"), *map(token, prompt)))

    def subjects_of(self, gateway: str) -> str:
        """Return the pattern of the subjects of a gateway's prompts, of all versions."""
        return f"{self.name}.prefill.*.{token(gateway)}.>"

    def consumer(self, version: str) -> str:
        """Return the name of the consumer that workers of a version share."""
        return f"workers_{token(version or 'any')}"


def token(text: str) -> str:
    """Return a text as one token of a subject: what is no letter or digit is in hexadecimal."""
    if text == ">":
        return text
    return re.sub(r"[^A-Za-z0-9-]", lambda match: f"_{ord(match[0]):x}_", text)


def queue_of_model(url: str, model: str) -> str:
    """Return the URL of the queue of one of several models; of the only one it is the same."""
    if not model:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}-{token(model)}"))


class QueuedPrefill(msgspec.Struct, frozen=True):
    """A prompt on its way to whichever worker pulls it.

    Attributes:
        request, incarnation: of the prompt.
        gateway: subject on which its gateway answers.
        path: of the worker's route.
        wire_id: id of the request in headers and logs.
        mark: of its tenant; empty for none.
        tokens: of the prompt.
        body: of the leg that computes it, JSON.
        traceparent: of the span that waits for it; empty where it is not traced.
    """

    request: str
    incarnation: int
    gateway: str
    path: str
    wire_id: str
    mark: str
    tokens: int
    body: bytes
    traceparent: str = ""


class ClaimQuestion(msgspec.Struct, frozen=True):
    """A worker, known by the address of its server, asks whether it is to compute a prompt.

    `delivery` is the broker's count: who asks twice has not had the answer.
    """

    request: str
    incarnation: int
    worker: str
    delivery: int


class ClaimAnswer(msgspec.Struct, frozen=True):
    """Whether to begin, to give the prompt back for a while, or to forget it."""

    verdict: Literal["begin", "later", "gone"]
    delay_s: float = 0.0


class PrefillOffer(msgspec.Struct, frozen=True):
    """A prompt is computed, or was refused: the reply of the worker's server."""

    request: str
    incarnation: int
    worker: str
    status: int
    reply: bytes


class OfferAnswer(msgspec.Struct, frozen=True):
    """Whether an offer counts: the first does, and a worker frees the blocks of others."""

    counts: bool


class WorkerAlive(msgspec.Struct, frozen=True):
    """A worker still computes a prompt of a gateway; all that it has begun without `request`."""

    worker: str
    request: str = ""


#: Use of the fleet secret whose key signs messages, and bytes of a signature.
_USE, _SIGNATURE_BYTES = "prefill-queue", 32


class MessageSigner:
    """Proves that messages come from the fleet: strangers at the broker make no worker compute.

    They are not encrypted: give the server TLS and users where others can read its network.
    """

    def __init__(self, secret: FleetSecret | None = None) -> None:
        """Sign with a key of the fleet's secret; without one, nothing is proved."""
        self._secret = secret

    def sign(self, message: msgspec.Struct) -> bytes:
        """Return a message with its proof before it."""
        data = msgspec.msgpack.encode(message)
        return data if self._secret is None else self._secret.sign(_USE, data) + data

    def verify(self, data: bytes, kind: type[_Kind]) -> _Kind:
        """Return the message of a kind.

        Raises:
            msgspec.MsgspecError: it is of another kind, or not of this fleet.
        """
        if self._secret is not None:
            signature, data = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
            if not self._secret.verifies(_USE, data, signature):
                raise msgspec.DecodeError("a message of another fleet")
        return msgspec.msgpack.decode(data, type=kind)


#: Last parts of a gateway's subjects: questions, offers, signs of life.
CLAIM, OFFER, ALIVE = "claim", "offer", "alive"
