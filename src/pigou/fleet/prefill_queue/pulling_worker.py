"""A worker process that pulls: its own server computes what it claims."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pigou.background import Background
from pigou.fleet.prefill_queue.broker import PrefillBroker
from pigou.fleet.prefill_queue.messages import MessageSigner, QueueAddress, QueuedPrefill
from pigou.fleet.prefill_queue.puller import PrefillPuller
from pigou.tracing.trace_context import TRACEPARENT
from pigou.wire.addresses import WILD, url_host
from pigou.wire.byte_budget import read_page
from pigou.wire.fleet_secret import TENANT, FleetSecret
from pigou.wire.names import PullPool, deployment_version
from pigou.worker.registrar import Registrar

#: Seconds that the end of pulling may take.
_END_S = 1.0


class PullingWorker:
    """Pulls prompts while its worker serves; a worker's `Registrar`, which may wrap another."""

    def __init__(
        self, address: QueueAddress, secret: FleetSecret | None, other: Registrar | None = None
    ) -> None:
        """Prepare.

        Args:
            secret: of the fleet, which the worker's own server asks for.
            other: what makes the worker known besides; None for nothing.
        """
        self._address, self._secret, self._other = address, secret, other
        self._url = ""
        self._session: aiohttp.ClientSession | None = None
        self._puller: PrefillPuller | None = None
        self._task: asyncio.Task[None] | None = None

    async def ready(self, about: dict[str, Any], stop: Callable[[], None]) -> None:
        """Begin to pull."""
        if self._other is not None:
            await self._other.ready(about, stop)
        own = urlsplit(str(about["url"]))
        host = own.hostname or ""
        self._url = f"http://{url_host('127.0.0.1' if host in WILD else host)}:{own.port}"
        pool = PullPool.of(
            self._address.name, str(about["model"]), deployment_version(about), self._secret
        )
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        puller = self._puller = PrefillPuller(
            PrefillBroker(self._address), str(about["incarnation"]), self._compute, pool,
            signer=MessageSigner(self._secret),
        )  # fmt: skip
        self._task = Background().start("prefill queue", puller.run)

    async def draining(self) -> None:
        """Pull nothing more, and compute what was pulled."""
        if self._puller is not None:
            self._puller.stop()
        if self._other is not None:
            await self._other.draining()

    async def leave(self) -> None:
        """Disconnect."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=_END_S)
        if self._session is not None:
            await self._session.close()
        if self._other is not None:
            await self._other.leave()

    async def _compute(self, prompt: QueuedPrefill) -> tuple[int, bytes]:
        """Have the worker's own server compute a prompt; return status and body of its reply."""
        assert self._session is not None
        headers = {"content-type": "application/json", "x-request-id": prompt.wire_id}
        if prompt.traceparent:
            headers[TRACEPARENT] = prompt.traceparent
        if self._secret is not None:
            headers["authorization"] = f"Bearer {self._secret.token}"
            if prompt.mark:
                headers[TENANT] = prompt.mark
        url = self._url + prompt.path
        try:
            async with self._session.post(url, data=prompt.body, headers=headers) as r:
                return r.status, await read_page(r)
        except (aiohttp.ClientError, OSError):
            return 503, b""
