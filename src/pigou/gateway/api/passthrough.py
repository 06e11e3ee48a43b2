"""Passes unknown routes on to attached servers that have them, by `/openapi.json` or until a 404.

Such requests go through admission and routing like completions.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from pigou.control.messages import FirstToken, Shed
from pigou.gateway.api.costs import request_bill
from pigou.gateway.api.page import JSON, APIPage, APIPages
from pigou.gateway.auth.keys import Key, current_key
from pigou.gateway.auth.tenure import read_tenure_headers
from pigou.gateway.caches import embeddings
from pigou.gateway.caches.layers import CACHE_HEADER, CacheControl
from pigou.gateway.failure import WorkerFailed, busy
from pigou.gateway.gateway import Gateway
from pigou.gateway.model_routing import GatewayModel
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.server_routes import (
    POOLED_PATHS,
    ROOT_PATHS,
    absent_route_here,
    check_path,
    is_absent,
)
from pigou.gateway.proxy.upstream import Upstream
from pigou.gateway.request import Body, BodyFields, GatewayRun, ParsedRequest
from pigou.gateway.request_parsing import check_headers, salt
from pigou.kv.tenure import Tenure
from pigou.request import SECOND, FinishReason
from pigou.tracing.trace_context import passed_on
from pigou.wire.errors import (
    DECODING_ERRORS,
    STORED_COLLECTIONS,
    APIError,
    bad_request,
    decode_error,
    error_body,
    too_large,
)
from pigou.wire.openai_requests import without_bom
from pigou.wire.request_validation import REQUEST_ID_HEADER as REQUEST_ID
from pigou.wire.request_validation import request_id

_REQUEST_HEADERS = ("accept", "content-type", "anthropic-version", "anthropic-beta", "openai-beta")
_REPLY_HEADERS = ("content-type", "cache-control", "content-disposition", "retry-after",
                  "request-id")  # fmt: skip
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_TOTAL_TOKENS = re.compile(rb'"total_tokens"\s*:\s*(\d{1,9})')
_MAX_OWNERS = 10_000
_HEAD_BYTES, _TAIL_BYTES = 16 * 1024, 4096
_BYTES_PER_TOKEN = 4
_TOKENS = 256

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def pages(gateway: Gateway) -> APIPages:
    """Return the catch-all route."""
    answer = Passthrough(gateway).answer
    return APIPages([
        *(
            APIPage(path, answer, parameters=None, method="POST", is_own=False)
            for path in ROOT_PATHS
        ),
        APIPage("/v1/{path:.*}", answer, parameters=None, method="*", is_own=False),
    ])  # fmt: skip


class Passthrough:
    """Forwards requests to attached servers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._models, self._config = gateway, gateway.routing, gateway.config
        self._routes = gateway.server_routes
        self._embeddings = embeddings.EmbeddingCache(gateway.caches)
        self._owners: OrderedDict[str, tuple[str, str]] = OrderedDict()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Forward a request; raises APIError, or HTTPMethodNotAllowed for the gateway's paths."""
        self._gateway.shutdown.check_open()
        check_headers(request.headers)
        key, headers = current_key(), read_tenure_headers(request.headers)
        tenure = key.policy.apply(key.tenant, headers, time.time_ns())
        tenure = self._gateway.caches.in_session(tenure, request.headers)
        path = request.rel_url.raw_path
        check_path(path, request)
        pools = path in POOLED_PATHS
        able = [u for model in self._models for u in model.upstreams if pools or u.engine.stock]
        servers = await self._routes.having(able, request.method, path)
        if not servers:
            raise absent_route_here(request.method, path, self._routes.known())
        servers = self._owned(servers, path, key)
        sent: bytes | None = None
        data: bytes | AsyncIterator[bytes] | None = None
        if request.content_type == "application/json" or request.content_type.endswith("+json"):
            sent = await request.read()
        elif request.can_read_body:
            if (request.content_length or 0) > self._config.max_body:
                raise too_large(self._config.max_body)
            data = _streamed(request, self._config.max_body)
        body: Body = {} if sent is None else _object(sent)
        model = self._model_of(body, servers, request.method)
        servers = _of(model, servers, request)
        name = _text(body, "model")
        if name is not None:
            servers = [up for up in servers if up.engine.serves(name)] or servers
        if sent is not None:
            servers = self._continuing(servers, body, key)
            data = self._salted(sent, body, tenure, model)
        run = _run_of(request, body, data, key, model.adapter(name))
        run.workload = model.plane_driver.meter.class_named(run, request.headers)
        known = None
        if path == embeddings.PATH and sent is not None:
            fields = BodyFields(model=name, cache_salt=_text(_object(sent), "cache_salt"))
            whole = model.scope(self._config.release).whole(tenure, fields, body, chat=False)
            known = self._embeddings.ask(body, whole, CacheControl.read(request.headers))
        if known is not None:
            run.lookup, texts = known
            reply = self._embeddings.reply(run.lookup, texts, name or model.served_name)
            if reply is not None:
                return web.Response(body=reply, content_type=JSON, headers={CACHE_HEADER: "hit"})
        plane_driver = model.plane_driver
        if request.method != "POST":
            server = min(servers, key=lambda up: up.inflight)
            return await self._passed(request, run, server, data, plane_driver)
        bill = partial(request_bill, plane_driver)
        with (
            self._gateway.key_loads.accepted(key, *run.load) as run.quota,
            self._gateway.budgets.spending(key, run, request.headers, bill),
        ):
            answer = await self._admitted(request, run, servers, data, model)
        if known is not None and answer.status == 200:
            self._embeddings.store(*known)
        return answer

    async def _admitted(
        self, request: web.Request, run: GatewayRun, servers: list[Upstream], data: Any,
        model: GatewayModel,
    ) -> web.StreamResponse:  # fmt: skip
        """Forward to the routed server, or to the next one that has the route."""
        plane_driver, metrics = model.plane_driver, model.metrics
        reason = FinishReason.ERROR
        left = {up.worker.id for up in servers if up.worker.role.decodes}
        try:
            while left:
                others = plane_driver.upstreams.keys() - left
                eligible = frozenset(left if others else ())
                start_ns = time.monotonic_ns()
                await run.quota.take(run.parsed.id, plane_driver.queue_timeout_s)
                route = await plane_driver.decide(run.request(eligible=eligible), frozenset())
                metrics.stages.queue_wait.observe((time.monotonic_ns() - start_ns) / SECOND)
                if isinstance(route, Shed):
                    raise busy(route)
                run.quota.sent(run.parsed.id)
                upstream = plane_driver.upstreams.get(route.choice.decode)
                left.discard(route.choice.decode)
                if upstream is None:
                    continue
                try:
                    answer = await self._passed(request, run, upstream, data, plane_driver)
                except _RouteAbsent:
                    if not isinstance(data, bytes):
                        break
                    continue
                reason = FinishReason.STOP
                return answer
            raise absent_route_here(request.method, request.rel_url.raw_path, self._routes.known())
        except asyncio.CancelledError:
            reason = FinishReason.ABORT
            raise
        finally:
            plane_driver.end(run.parsed.id, reason)
            run.quota.ended(run.parsed.id)

    async def _passed(
        self, request: web.Request, run: GatewayRun, upstream: Upstream, data: Any,
        plane_driver: PlaneDriver,
    ) -> web.StreamResponse:  # fmt: skip
        headers = {name: request.headers[name] for name in _REQUEST_HEADERS
                   if name in request.headers}  # fmt: skip
        headers |= {"x-request-id": run.parsed.wire_id, "accept-encoding": "identity"}
        headers |= passed_on(request.headers)
        path = request.rel_url.raw_path
        query = f"?{request.rel_url.raw_query_string}" if request.query_string else ""
        out: web.StreamResponse | None = None
        try:
            async with upstream.passing(request.method, path + query, headers, data) as reply:
                refused = reply.status in (404, 405, 501)
                first = await reply.content.read(_HEAD_BYTES) if refused else b""
                if refused and is_absent(reply.status, first):
                    self._routes.note_absent(upstream, request.method, path)
                    raise _RouteAbsent
                out = web.StreamResponse(status=reply.status, headers=_reply_headers(reply, run))
                out.headers["x-pigou-worker"] = upstream.worker.id
                if run.lookup is not None:
                    out.headers[CACHE_HEADER] = run.lookup.status
                await out.prepare(request)
                await out.write(first)
                await self._copy(reply, out, run, upstream, plane_driver)
        except (aiohttp.ClientError, OSError, WorkerFailed) as error:
            if isinstance(error, ConnectionResetError) and _gone(request):
                raise
            if out is None:
                if isinstance(error.__cause__, APIError):
                    raise error.__cause__ from None  # the client's body is at fault
                raise APIError(502, f"{upstream.worker.id} failed: {error}.") from error
            await _break_off(request, out, str(error))
        await out.write_eof()
        return out

    async def _copy(
        self,
        reply: aiohttp.ClientResponse,
        out: web.StreamResponse,
        run: GatewayRun,
        up: Upstream,
        plane_driver: PlaneDriver,
    ) -> None:
        head = tail = b""
        async for data in reply.content.iter_any():
            if not head:
                plane_driver.observe(FirstToken(run.parsed.id))
            if len(head) < _HEAD_BYTES:
                head += data[:_HEAD_BYTES]
                self._note_owner(head, run, up)
            tail = (tail + data)[-_TAIL_BYTES:]
            if run.lookup is not None:
                run.lookup.record(data)
            async with asyncio.timeout(self._config.client_timeout or None):
                await out.write(data)
        # Where the server does not tell its tokens, those that were asked for count.
        totals = _TOTAL_TOKENS.findall(tail)
        total = int(totals[-1]) if totals else run.load[1]
        run.stats.add(min(run.prompt_tokens, total), max(0, total - run.prompt_tokens))

    # --- which server ----------------------------------------------------------------------

    def _model_of(self, body: Body, servers: list[Upstream], method: str) -> GatewayModel:
        """Return the requested model, or one whose servers have the route."""
        holders = [model for model in self._models if any(map(model.owns, servers))]
        if holders and "model" not in body and (len(holders) == 1 or method != "POST"):
            return holders[0]
        if not self._models.several and not self._models.models[0].name:
            return self._models.models[0]  # the server judges the name
        return self._models.find(_text(body, "model"))

    def _owned(self, servers: list[Upstream], path: str, key: Key) -> list[Upstream]:
        """Return the server that stores the object of a path."""
        parts = [*path.split("/"), "", ""]  # /rerank is one of one part
        if parts[2] in STORED_COLLECTIONS and key.tenant:
            raise APIError(
                403, f"{path} is not passed on where there are keys: servers keep such objects "
                "without saying whose they are. Ask that server itself.", final=True,
            )  # fmt: skip
        if parts[2] != "responses" or not parts[3].startswith("resp_"):
            return servers
        return self._keeper(servers, parts[3], key, "id")

    def _continuing(self, servers: list[Upstream], body: Body, key: Key) -> list[Upstream]:
        raw = body.get("previous_response_id")
        before = None if raw is None else msgspec.json.decode(raw)
        if before is None:
            return servers
        return self._keeper(servers, str(before), key, "previous_response_id")

    def _keeper(
        self, servers: list[Upstream], response: str, key: Key, param: str
    ) -> list[Upstream]:
        worker, tenant = self._owners.get(response, ("", ""))
        holders = [up for up in servers if up.worker.id == worker]
        if not holders or tenant != key.tenant:
            raise APIError(
                404, f"No server here keeps the response {response[:80]!r} of this key: send the "
                "conversation itself.", param,
            )  # fmt: skip
        return holders

    def _note_owner(self, head: bytes, run: GatewayRun, upstream: Upstream) -> None:
        match = _RESPONSE_ID.search(head)
        if match is None:
            return
        self._owners.setdefault(match[1].decode(), (upstream.worker.id, run.parsed.tenant))
        while len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)

    def _salted(self, sent: bytes, body: Body, tenure: Tenure, model: GatewayModel) -> bytes:
        """Return the body with its tenure's cache salt."""
        fields = BodyFields(model=_text(body, "model"), cache_salt=_text(body, "cache_salt"))
        if fields.model in model.aliases:
            fields.model, body["model"] = model.name, msgspec.Raw(msgspec.json.encode(model.name))
            sent = msgspec.json.encode(body)
        whole = model.scope(self._config.release).extend(tenure, fields, body, chat=True)
        if whole == Tenure():
            return sent
        expired = time.time_ns() >= whole.expiry
        body["cache_salt"] = f"expired-{secrets.token_hex(16)}" if expired else salt(whole)
        return msgspec.json.encode(body)


class _RouteAbsent(Exception):
    """The server has no such route."""


def _of(model: GatewayModel, servers: list[Upstream], request: web.Request) -> list[Upstream]:
    own = [up for up in servers if model.owns(up)]
    if not own:
        raise absent_route_here(request.method, request.rel_url.raw_path, [])
    return own


def _run_of(request: web.Request, body: Body, data: Any, key: Key, adapter: str) -> GatewayRun:
    size = len(data) if isinstance(data, bytes) else (request.content_length or 0)
    wanted = None
    for name in ("max_output_tokens", "max_completion_tokens", "max_tokens"):
        raw = body.get(name)
        value = None if raw is None else msgspec.json.decode(raw)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
            wanted = value
    parsed = ParsedRequest(
        id=secrets.token_hex(16),
        wire_id=request_id(request.headers.get(REQUEST_ID), None),
        chat=False,
        stream=True,
        body={},
        prompt_tokens=max(1, size // _BYTES_PER_TOKEN),
        max_tokens=wanted or _TOKENS,
        splits=False,
        portable=False,
        tenant=key.tenant,
        arrival=time.monotonic_ns(),
        adapter=adapter,
    )
    return GatewayRun.of(parsed, payer=key.payer)


def _object(data: bytes) -> Body:
    data = without_bom(data)
    try:
        data.decode()  # values that stay raw are not checked
        return dict(_fields.decode(data)) if data else {}
    except DECODING_ERRORS as error:
        raise decode_error(error, data) from None


def _text(body: Mapping[str, Any], name: str) -> str | None:
    raw = body.get(name)
    value = None if raw is None else msgspec.json.decode(raw)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"{name} must be a text.", name)
    return value


async def _streamed(request: web.Request, max_bytes: int) -> AsyncIterator[bytes]:
    size = 0
    async for data in request.content.iter_any():
        size += len(data)
        if size > max_bytes:
            raise too_large(max_bytes)
        yield data


def _reply_headers(reply: aiohttp.ClientResponse, run: GatewayRun) -> dict[str, str]:
    headers = {name: reply.headers[name] for name in _REPLY_HEADERS if name in reply.headers}
    return headers | {"x-request-id": run.parsed.wire_id} | dict(run.budget_headers)


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _break_off(request: web.Request, out: web.StreamResponse, why: str) -> None:
    """End a failed server's answer by an error event, or by cutting it."""
    if out.content_type == "text/event-stream":
        error = error_body(f"The server failed: {why[:500]}.", "BadGatewayError", None, 502)
        await out.write(b"event: error\ndata: " + error + b"\n\n")
    elif request.transport is not None:
        request.transport.abort()
