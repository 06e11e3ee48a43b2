"""`x-prefiller-host-port`: an endpoint picker names the worker that computes the prompt.

This worker sends leg 1 there, and decodes with the ticket of the answer, as llm-d's sidecar does.
"""

from __future__ import annotations

import logging
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from pigou.wire.bodies import read_page
from pigou.wire.errors import DECODING_ERRORS, bad_request
from pigou.wire.names import url_host
from pigou.wire.prefill_decode_legs import leg_one, ticket
from pigou.wire.request_validation import REQUEST_ID_HEADER
from pigou.worker.config import prefiller_networks

#: Header of the picker, `ip:port` with fallbacks after commas; and of the reply: who computed.
PREFILLER, PREFILLED = "x-prefiller-host-port", "x-pigou-prefilled-by"
log = logging.getLogger(__name__)
#: Seconds to connect, and of a whole leg; bytes of its answer; workers tried.
_CONNECT_S, _LEG_S, _MAX_ANSWER, _MAX_TRIES = 2.0, 600.0, 2**20, 4
#: Headers of the client that leg 1 has, too.
_FORWARDED = ("authorization", "traceparent", "tracestate")


class Prefillers:
    """Sends prompts to the prefill workers that requests name, within given networks."""

    def __init__(self, networks: str) -> None:
        self._networks = prefiller_networks(networks)
        self._session: aiohttp.ClientSession | None = None

    async def close(self, _: web.Application) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def ticket(
        self, request: web.Request, id: str, body: bytes, *, chat: bool
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Return the ticket of leg 1, and headers for the client. Raises APIError.

        There is no ticket without the header, nor where no named worker computed the prompt.
        """
        if not (named := request.headers.get(PREFILLER)):
            return None, {}
        targets = [self._allowed(target.strip()) for target in named.split(",")]
        fields = msgspec.json.decode(body)
        if fields.get("kv_transfer_params") is not None:
            raise bad_request(f"{PREFILLER} is given, too; leave one out.", "kv_transfer_params")
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        headers |= {"content-type": "application/json", REQUEST_ID_HEADER: id}
        leg = msgspec.json.encode(leg_one(fields, chat=chat))
        for target in targets[:_MAX_TRIES]:
            try:
                params = ticket(await self._ask(f"http://{target}{request.path}", leg, headers))
            except (aiohttp.ClientError, OSError, TimeoutError, *DECODING_ERRORS) as error:
                log.warning("%s did not compute the prompt of %s: %r", target, id, error)
                continue
            if params is not None:
                return params, {PREFILLED: target}
        return None, {PREFILLED: "local"}

    async def _ask(self, url: str, leg: bytes, headers: dict[str, str]) -> bytes:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=_LEG_S, sock_connect=_CONNECT_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        post = self._session.post(url, data=leg, headers=headers, allow_redirects=False)
        async with post as response:
            answer = await read_page(response, _MAX_ANSWER)
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"status {response.status}: {answer[:200]!r}")
            return answer

    def _allowed(self, target: str) -> str:
        try:
            parts = urlsplit(f"//{target}")
            address = ip_address(parts.hostname or "")
            if any(address in network for network in self._networks) and parts.port:
                return f"{url_host(str(address))}:{parts.port}"
        except ValueError:
            pass
        raise bad_request(
            f"{PREFILLER} is {target[:80]!r}; it must be ADDRESS:PORT, within a network of this "
            "worker's --prefiller-networks, as 10.0.0.0/8.",
            PREFILLER,
        )
