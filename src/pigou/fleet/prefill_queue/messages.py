"""What gateways and prefill workers say to each other over the broker, and where."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from pigou.config import ConfigError, option
from pigou.fleet.nats_connection import NatsAddress, TlsFiles, public_address
from pigou.registry import read_struct, require
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import QueueNames

_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Use of the fleet secret whose key signs messages; the signature of who knows no secret.
_USE, _UNSIGNED = "prefill-queue", bytes(32)
#: Last parts of a gateway's subjects: questions, offers, signs of life.
CLAIM, OFFER, ALIVE = "claim", "offer", "alive"


class QueueAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A queue of a NATS server: `nats://[USER:PASSWORD@]HOST:PORT/NAME[?storage=memory]`."""

    nats: NatsAddress
    name: str  # queue name, as in the URL
    # storage of the prompts; those in memory are lost when the server ends.
    storage: Literal["file", "memory"] = "file"
    lease_s: float = 10.0  # seconds until a silent worker's prompt is redelivered
    # seconds after which the broker forgets a prompt: its gateway is gone by then.
    max_age_s: float = 600.0

    def __post_init__(self) -> None:
        for name, value in (("lease_s", self.lease_s), ("max_age_s", self.max_age_s)):
            if not 0.1 <= value <= 86_400:
                raise ConfigError(f"prefill queue: {name} is {value}; it must be 0.1 to 86400")

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL. Raises ConfigError."""
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
        return read_struct("prefill queue", cls, fields)

    @property
    def names(self) -> QueueNames:
        """Names of the queue on the server."""
        return QueueNames(self.name)


class QueuedPrefill(msgspec.Struct, frozen=True):
    """A prompt on its way to whichever worker pulls it."""

    request: str
    incarnation: int
    gateway: str  # subject its gateway answers on
    path: str  # HTTP path of the worker's route
    wire_id: str  # id of the request in headers and logs
    mark: str  # mark of the tenant; empty for none
    tokens: int
    body: bytes
    traceparent: str = ""  # the waiting span; empty if not traced


class ClaimQuestion(msgspec.Struct, frozen=True):
    """A worker, known by its incarnation, asks whether it is to compute a prompt."""

    request: str
    incarnation: int
    worker: str
    delivery: int  # the broker's delivery count


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
    """Sign of life of a pulling worker, or of a `request` it computes."""

    worker: str
    request: str = ""


class MessageSigner:
    """Signs prefill messages with the fleet secret; they are not encrypted, so use TLS."""

    def __init__(self, secret: FleetSecret | None = None, *, takes_unsigned: bool = False) -> None:
        self._secret, self._takes_unsigned = secret, takes_unsigned

    def sign(self, message: msgspec.Struct) -> bytes:
        """Return a message with its proof before it, zeros where there is no secret."""
        data = msgspec.msgpack.encode(message)
        proof = _UNSIGNED if self._secret is None else self._secret.sign(_USE, data)
        return proof + data

    def verify(self, data: bytes, kind: type[_Kind]) -> _Kind:
        """Return the message of a kind. Raises msgspec.MsgspecError."""
        signature, data = data[: len(_UNSIGNED)], data[len(_UNSIGNED) :]
        is_open = self._takes_unsigned and signature == _UNSIGNED
        if not (self._secret is None or is_open or self._secret.verifies(_USE, data, signature)):
            raise msgspec.DecodeError("a message of another fleet")
        return msgspec.msgpack.decode(data, type=kind)


class PullingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a worker pulls prompts from; without `prefill_queue` gateways send them."""

    prefill_queue: Annotated[
        str,
        option(
            "Queue that this prefill worker pulls prompts from: nats://HOST:PORT/NAME.",
            "KV transfer",
        ),
    ] = ""

    def address(self, role: str) -> QueueAddress:
        """Return the queue's address, for a worker of a role. Raises ConfigError."""
        if role != "prefill":
            raise ConfigError(f"prefill_queue is given, and role is {role}; give it to prefill")
        return queue_address(self.prefill_queue)


def queue_address(url: str) -> QueueAddress:
    """Return the queue of an option's URL. Raises ConfigError."""
    require("nats", "--prefill-queue")
    return QueueAddress.parse(url)
