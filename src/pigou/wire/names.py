"""Names and addresses of workers, and of prefill queues on NATS."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from pigou.wire.fleet_secret import FleetSecret

#: Hosts of a server that listens on all addresses.
WILD = ("", "0.0.0.0", "::")
_WILDCARD = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\])(?=:)")
#: Use of the fleet secret for names of prefill pools.
_POOL_USE = "prefill-queue pool"
_POOL_CHARS = 24
#: Maximum characters of a text from another process.
MAX_TEXT = 512


def advertised(listens: str, given: str = "") -> str:
    """Return the host that others reach: as given, else the listening or this machine's address."""
    if given or listens not in WILD:
        return given or listens
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def url_host(host: str) -> str:
    """Return a host as it is written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def reachable(endpoint: str, host: str) -> str:
    """Put the worker's host in place of a wildcard address (`tcp://*:5557`)."""
    return _WILDCARD.sub(f"tcp://{url_host(host)}", endpoint)


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def deployment_version(about: Mapping[str, Any]) -> str:
    """Return a deployment's version, by default the weights' digest; two versions share no KV."""
    return text(about.get("deployment_version")) or text(about.get("release"))


def text(value: Any) -> str:
    """Return a text within bounds; empty for everything else."""
    return value if isinstance(value, str) and len(value) <= MAX_TEXT else ""


def worker_name(incarnation: str, url: str, host: str) -> str:
    """Return a worker's name among gateways: its incarnation, else its URL, with a real host."""
    if incarnation:
        return incarnation
    return f"{host}/{url}" if is_loopback(urlsplit(url).hostname or "") else url


def token(name: str) -> str:
    """Return a name as one token of a NATS subject; other characters in hexadecimal."""
    return re.sub(r"[^A-Za-z0-9-]", lambda match: f"_{ord(match[0]):x}_", name)


class QueueNames(NamedTuple):
    """Names of one prefill queue on a NATS server."""

    queue: str

    @property
    def stream(self) -> str:
        """NATS stream of the prompts."""
        return f"PREFILL_{self.queue}"

    @property
    def prompts(self) -> str:
        """Pattern of the subjects of all prompts."""
        return f"{self.queue}.prefill.>"

    def prompts_of(self, gateway: str) -> str:
        """Return the pattern of the subjects of a gateway's prompts."""
        return f"{self.queue}.prefill.*.{token(gateway)}.>"

    def gateway(self, gateway: str) -> str:
        """Return the subject prefix of a gateway's answers."""
        return f"{self.queue}.gateway.{token(gateway)}"


class PullPool(NamedTuple):
    """Pool of pulling workers: one model, version and fleet secret."""

    queue: str
    key: str

    @classmethod
    def of(cls, queue: str, model: str, version: str, secret: FleetSecret | None) -> Self:
        """Return the pool of workers of a model and version that prove a secret, if any."""
        proof = b"" if secret is None else secret.key(_POOL_USE)
        parts = b"\0".join((proof, model.encode(), version.encode()))
        return cls(queue, sha256(parts).hexdigest()[:_POOL_CHARS])

    @property
    def consumer(self) -> str:
        """Durable consumer shared by the workers."""
        return f"workers_{self.key}"

    @property
    def prompts(self) -> str:
        """Pattern of the subjects of the pool's prompts."""
        return f"{self.queue}.prefill.{self.key}.>"

    def prompt(self, gateway: str, request: str, incarnation: int) -> str:
        """Return the subject of one prompt."""
        return f"{self.queue}.prefill.{self.key}.{token(gateway)}.{token(request)}.{incarnation}"

    def puller(self, incarnation: str) -> str:
        """Return the subject of a pulling worker."""
        return f"{self.queue}.puller.{self.key}.{token(incarnation)}"
