"""Prompts that prefill workers pull: what the gateway asks of a prefill queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from pigou.request import Request


class PrefillLeg(NamedTuple):
    """What a worker is sent to compute a prompt."""

    path: str
    wire_id: str  # id of the request in headers and logs
    mark: str  # of its tenant; empty for none
    body: Mapping[str, Any]  # JSON of the request
    worker: str  # the control plane's choice; workers of the same pool may pull the prompt
    traceparent: str = ""  # of the span that waits for it; empty where it is not traced


class PulledPrefill(NamedTuple):
    """The first reply of a worker: status, and the body."""

    status: int
    reply: bytes


#: Why a prompt is computed where it is decoded: no worker pulls it, or there is no broker.
NO_PULLER, NO_BROKER = "no_puller", "no_broker"


class LocalPrefill(NamedTuple):
    """A prompt is computed where it is decoded, for a reason."""

    reason: str


class PrefillDropped(Exception):
    """A queued prompt is not computed, and is not to be tried again.

    Attributes:
        expired: whether no worker claimed it in time; else those that did failed.
    """

    def __init__(self, message: str, *, expired: bool) -> None:
        super().__init__(message)
        self.expired = expired


class GatewayPrefillQueue(Protocol):
    """A queue that prefill workers pull from."""

    @property
    def length(self) -> int:
        """Prompts of all gateways that wait, or are claimed."""
        ...

    async def run(self) -> None:
        """Keep connected, until cancelled."""
        ...

    async def prefill(
        self, request: Request, leg: PrefillLeg, on_claim: Callable[[str, int], None]
    ) -> PulledPrefill | LocalPrefill:
        """Have a prompt computed by the worker that claims it, unless it stays local.

        Args:
            on_claim: called with the worker's id, and the tokens that it has cached.

        Raises:
            PrefillDropped: no worker computed it.
        """
        ...
