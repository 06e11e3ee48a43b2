"""Registry entry of one worker, and its author's signature."""

from __future__ import annotations

import hmac
import re
from typing import Annotated, NamedTuple

import msgspec

from pigou.config import is_http_url
from pigou.request import Role
from pigou.wire.fleet_secret import FleetSecret

#: Use of the fleet secret whose key signs entries.
_USE = "registry-entry"
#: Bytes of a record; a longer one is ignored.
MAX_RECORD = 64 * 1024
#: Names of workers, which are the keys of records.
WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
#: Why a record of another name is ignored.
NO_WORKER = "its name is no worker's"
_INCARNATION = re.compile(r"[0-9A-Za-z-]{8,64}")

Text = Annotated[str, msgspec.Meta(max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
LeaseSeconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class Identity(NamedTuple):
    """A worker's identity; addresses may be reused."""

    worker: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker} ({self.incarnation[:8]})"


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker runs; empty where unknown."""

    host: Text = ""  # name of the machine
    rack: Text = ""
    zone: Text = ""
    gpus: Count = 0
    labels: dict[Text, Text] = {}  # further ones, by name


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the caches of two workers must have in common for blocks to move between them."""

    tp: Count = 1  # GPUs that the model's heads are split over
    kv_layout: Text = ""  # fingerprint of the blocks; empty where others may not read them


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as it is registered."""

    worker: str  # name in the fleet
    incarnation: str  # UUID of its process; changes with a restart
    epoch: Count = 0  # rises with each change of role or state
    role: Role = Role.BOTH
    model: Text = ""
    version: Text = ""  # workers exchange KV only within one version
    shape: KVShape = KVShape()
    url: Text  # base address of its HTTP server
    kv_events: Text = ""  # ZMQ addresses; empty if none
    kv_replay: Text = ""
    transfer: Text = ""  # KV transfer: shm, tcp, none; empty if unknown
    kv_address: Text = ""  # host for KV pulls; empty uses that of `url`
    topology: Topology = Topology()
    ttl_s: LeaseSeconds = 15.0  # lease duration in seconds
    draining: bool = False

    def __post_init__(self) -> None:
        if not WORKER_NAME.fullmatch(self.worker):
            raise ValueError(
                f"worker is {self.worker[:140]!r}; it has 1 to 128 letters, digits, '_', '.', '-'"
            )
        if not _INCARNATION.fullmatch(self.incarnation):
            raise ValueError(f"incarnation is {self.incarnation[:80]!r}; it must be a UUID")
        if not is_http_url(self.url):
            raise ValueError(f"url is {self.url[:80]!r}; it must be like http://HOST:PORT")

    @property
    def identity(self) -> Identity:
        """Worker and incarnation."""
        return Identity(self.worker, self.incarnation)


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """An entry as it was written, and its HMAC-SHA256 in hexadecimal digits; empty without one."""

    entry: msgspec.Raw
    mac: str = ""


class EntryRefused(ValueError):
    """A record is no entry, or is not signed by this fleet."""


def write_entry(entry: WorkerEntry, secret: FleetSecret | None) -> bytes:
    """Return the record of an entry, signed where the fleet has a secret."""
    body = msgspec.json.encode(entry)
    mac = "" if secret is None else secret.sign(_USE, body).hex()
    return msgspec.json.encode(_Envelope(entry=msgspec.Raw(body), mac=mac))


def read_entry(record: bytes, secret: FleetSecret | None) -> WorkerEntry:
    """Return the entry of a record. Raises EntryRefused."""
    if len(record) > MAX_RECORD:
        raise EntryRefused(f"the record has {len(record)} bytes")
    try:
        envelope = msgspec.json.decode(record, type=_Envelope)
        body = bytes(envelope.entry)
        mac = envelope.mac.encode("utf-8", "surrogatepass")
        if secret is not None and not hmac.compare_digest(
            secret.sign(_USE, body).hex().encode(), mac
        ):
            raise EntryRefused("the record is not signed with the fleet secret")
        return msgspec.json.decode(body, type=WorkerEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EntryRefused(f"the record is no entry: {error}") from error
