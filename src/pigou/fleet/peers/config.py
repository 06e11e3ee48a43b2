"""How a gateway reaches the other gateways of its fleet."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from pigou.config import ConfigError
from pigou.config_option import option
from pigou.fleet.nats_address import NatsAddress

_SUBJECT = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_GROUP = "Peers"


class PeersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where gateways tell one another what they send, and by which subjects."""

    peers: Annotated[
        str,
        option(
            "Bus on which gateways of one fleet tell one another what they send to workers: "
            "nats://HOST:PORT[,nats://..], or tls://. All need the same fleet secret.",
            _GROUP,
        ),
    ] = ""
    subject: Annotated[
        str,
        option("First part of the fleet's subjects there.", _GROUP, name="peers_subject"),
    ] = "pigou"

    def __post_init__(self) -> None:
        if self.peers:
            self.address()
        if not _SUBJECT.fullmatch(self.subject):
            raise ConfigError(
                f"subject is {self.subject!r}; it must be letters, digits, - and _, in parts with "
                "dots between"
            )

    def address(self) -> NatsAddress:
        """Return the address of the servers, where there are any.

        Raises:
            ConfigError: it is none of NATS, or cannot be honoured.
        """
        urls = [url.strip() for url in self.peers.split(",") if url.strip()]
        return NatsAddress.parse(urls, "peers")
