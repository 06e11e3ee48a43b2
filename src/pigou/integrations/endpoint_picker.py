"""Picks endpoints for ext_proc streams, by the control plane that the gateway drives."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from pigou.config import ConfigError
from pigou.control.messages import Choice, Route, Shed
from pigou.control.router import Explanation
from pigou.gateway.api.decisions import candidates, summary
from pigou.gateway.api.generation import counted
from pigou.gateway.auth.tenure import OPEN_POLICY, read_tenure_headers
from pigou.gateway.failure import busy
from pigou.gateway.gateway import Gateway
from pigou.gateway.model_routing import GatewayModel
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.overflow import with_fields
from pigou.gateway.proxy.reply_parsing import ABSENT, given
from pigou.gateway.proxy.upstream import Upstream
from pigou.gateway.request import GatewayRun, ParsedRequest
from pigou.gateway.request_parsing import (
    NO_SCOPE,
    NOTHING,
    ROUTING_HEADER,
    overrides_refused,
    read,
    read_overrides,
)
from pigou.integrations.epp_config import EppConfig
from pigou.integrations.ext_proc_stream import (
    EndpointPick,
    ExtProcStream,
    Headers,
    PickRequest,
    ResponsePart,
    ResponseStart,
)
from pigou.integrations.reply_accounting import PickedRequest
from pigou.request import SECOND
from pigou.wire.errors import DECODING_ERRORS, APIError
from pigou.wire.fleet_secret import TENANT
from pigou.wire.names import url_host
from pigou.wire.openai_requests import without_bom
from pigou.wire.request_validation import REQUEST_ID_HEADER
from pigou.wire.request_validation import request_id as wire_id

_log = logging.getLogger("pigou.epp")
Receive: TypeAlias = Callable[[], Awaitable[pb.ProcessingRequest | None]]
Send: TypeAlias = Callable[[pb.ProcessingResponse], Awaitable[None]]
#: Headers of requests: the inference extension's name first, then llm-d's.
OBJECTIVE = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
FAIRNESS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
REWRITE = ("x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite")
TTFT = "x-slo-ttft-ms"
#: Paths that clients of the proxy may ask with the worker's key, or the fleet's secret.
_KEYED = ("/v1/completions", "/v1/chat/completions", "/v1/models")
#: Where a decode worker's sidecar has the prompt computed; absent for local prefill.
PREFILLER = "x-prefiller-host-port"
#: Asks for the decision's prices in a response header of the same name.
PRICES, _MAX_PRICED = "x-pigou-prices", 8
_PRICED = ("chosen", "cached_tokens", "cost", "price_seconds", "toll_seconds", "parts")
#: Output tokens booked for an opaque request, and bytes that make a token of its prompt.
_OPAQUE_TOKENS, _BYTES_PER_TOKEN = 16, 4


class _BodyKind(msgspec.Struct):
    """Fields that tell a completion from a chat."""

    model: Any = None
    messages: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT


class EndpointPicker:
    """Serves ext_proc streams: reads a request, has it routed, and accounts for its reply.

    Bodies of completions and chats are read as the gateway's; an invalid one is answered 400 on
    a path that ends in `/completions`. Other requests are opaque: routed by load.
    """

    def __init__(self, gateway: Gateway, config: EppConfig, may_pick: Callable[[], bool]) -> None:
        self._gateway, self._config, self._may_pick = gateway, config, may_pick
        self._addresses: dict[str, tuple[Upstream, str]] = {}
        self._warned = False

    async def process(self, receive: Receive, send: Send) -> None:
        """Serve one stream until the proxy closes it."""
        stream = ExtProcStream(self._gateway.config.max_body)
        with self._gateway.shutdown.under_way():
            try:
                await self._serve(stream, receive, send)
                while (message := await receive()) is not None:
                    await _send_all(send, stream.take(message)[0])
            except APIError as error:
                if not stream.answered:
                    await _send_all(send, stream.refused(error))
            except ConnectionError:
                pass  # the client or the proxy is gone

    async def _serve(self, stream: ExtProcStream, receive: Receive, send: Send) -> None:
        wanted: object = None
        while not isinstance(wanted, PickRequest):
            message = await receive()
            if message is None or stream.refused_by is not None:
                return
            responses, wanted = stream.take(message)
            await _send_all(send, responses)
        gateway = self._gateway
        gateway.shutdown.check_open()
        gateway.startup.check(gateway.routing.decodes)
        if not self._may_pick():
            raise APIError(503, "This picker does not know its endpoints yet.", retry_after=1)
        parse = partial(self._parse, wanted)
        parsed, model, body = await gateway.off_loop(wanted.body, parse)
        run, driver = GatewayRun.of(parsed), model.plane_driver
        driver.check_deadline(parsed.fields.deadline_ms)
        with (
            counted(run, model),
            driver.meter.metering(run, wanted.headers),
            gateway.shutdown.reports_end(),
        ):
            request = PickedRequest(run, model)
            try:
                if parsed.single and parsed.body:
                    await driver.read(run)
                pick = await self._pick(wanted, request, stream.reply)
                pick = msgspec.structs.replace(pick, body=body)
                await _send_all(send, stream.picked(pick))
                await self._follow(stream, request, receive, send)
            finally:
                request.end()

    # --- the request ----------------------------------------------------------------------------

    def _parse(self, wanted: PickRequest) -> tuple[ParsedRequest, GatewayModel, bytes | None]:
        """Return a request, its model, and its changed body or None; raise `APIError` 4xx."""
        routing, headers, data = self._gateway.routing, wanted.headers, wanted.body
        chat, named, original = _kind(wanted)
        tenant, changes = _first(headers, FAIRNESS), dict[str, str]()
        if chat is not None and (name := _first(headers, REWRITE)):
            data = with_fields(data, {"model": name})
            changes["model"] = name
        model, sent = routing.of_body(data)
        if sent and sent != original:
            changes["model"] = sent
        tenure, scope = NOTHING, NO_SCOPE
        isolated = tenant if self._config.isolate_tenants else ""
        if isolated or any(name.startswith("x-pigou-tenure") for name in headers):
            tenure = OPEN_POLICY.apply(isolated, read_tenure_headers(headers), time.time_ns())
            scope = model.scope(self._gateway.config.release)
        parsed = _opaque(wanted)
        if chat is not None:
            try:
                parsed = read(
                    data, chat=chat, strict=False, tenure=tenure, scope=scope,
                    request_id=headers.get(REQUEST_ID_HEADER.lower()),
                    overrides=read_overrides(headers.get(ROUTING_HEADER.lower())),
                    context=model.context, model=sent, adapter=model.adapter,
                )  # fmt: skip
                routing.check(parsed.fields.model)
            except APIError:
                if named or changes or tenure is not NOTHING:
                    raise
                chat = None
        if chat is not None and tenure is not NOTHING:
            changes["cache_salt"] = parsed.salt
        objective, limit_ms = _first(headers, OBJECTIVE), headers.get(TTFT, "")
        priority, deadline_ms = parsed.priority, parsed.deadline_ms
        if objective:
            priority = -int(self._config.objectives.get(objective, 0))
        if limit_ms.isdecimal() and model.plane_driver.heeds_deadlines:
            deadline_ms = int(limit_ms)
        salt = parsed.fields.cache_salt or "" if tenure is NOTHING else parsed.salt
        parsed = replace(
            parsed, tenant=tenant, priority=priority, deadline_ms=deadline_ms, salt=salt
        )
        return parsed, model, with_fields(wanted.body, changes) if changes else None

    async def _pick(
        self, wanted: PickRequest, request: PickedRequest, reply: dict[str, str]
    ) -> EndpointPick:
        """Have a request routed; raise `APIError` 429 or 503."""
        run, driver, subset = request.run, request.driver, wanted.subset
        upstreams, draining = driver.upstreams, driver.plane.state.draining
        endpoints = await self._endpoints(driver)
        able = driver.serving(run.parsed.adapter) if run.parsed.adapter else endpoints.keys()
        eligible = frozenset(
            id for id, at in endpoints.items() if id in able and (
                subset is None or at in subset or at.rpartition(":")[0] in subset
            )
        )  # fmt: skip
        if not any(upstreams[id].worker.role.decodes for id in eligible - draining):
            raise APIError(503, "No endpoint that may serve this request is ready.", retry_after=1)
        restricted = subset is not None or bool(run.parsed.adapter)
        choice = await self._decide(request, eligible if restricted else frozenset())
        decode, computes = upstreams.get(choice.decode), upstreams.get(choice.prefill or "")
        if decode is None or choice.decode not in endpoints:
            raise APIError(503, f"{choice.decode} went down just now.", retry_after=1)
        request.route(choice, decode)
        reply |= {"x-pigou-decision": run.parsed.id, "x-pigou-worker": choice.decode}
        order = [endpoints[choice.decode]]
        why = driver.plane.decision(run.parsed.id)
        if why is not None:
            request.model.metrics.decided(why, (computes or decode).worker.block_size, run.keys)
            others = [
                endpoints[id] for id in _by_cost(why)
                if id in endpoints and upstreams[id].bearer == decode.bearer
            ]  # fmt: skip
            order += [at for at in others if at not in order][: self._config.fallbacks]
            if wanted.headers.get(PRICES, "") not in ("", "0"):
                reply[PRICES] = prices(why, endpoints)
        prefiller = endpoints.get(choice.prefill or "", "")
        headers = {PREFILLER: prefiller} if prefiller else {}
        if wanted.headers.get(":path", "").partition("?")[0] in _KEYED:
            headers |= decode.bearer
            if mark := decode.mark(run.parsed.tenant):
                headers[TENANT] = mark
        removed = tuple(name for name in (PREFILLER, TENANT) if name not in headers)
        return EndpointPick(",".join(order), headers, removed)

    async def _decide(self, request: PickedRequest, eligible: frozenset[str]) -> Choice:
        run, start_ns = request.run, time.monotonic_ns()
        decide = request.driver.decide(run.request(0, eligible), frozenset())
        decision: Route | Shed
        try:
            if run.parsed.priority <= 0:
                decision = await decide
            else:  # an objective below 0: it does not wait
                deciding = asyncio.ensure_future(decide)
                if not (await asyncio.wait((deciding,), timeout=0))[0]:
                    deciding.cancel()
                    raise APIError(429, "The fleet is busy: this objective is shed.", retry_after=1)
                decision = deciding.result()
        except ConfigError as error:
            raise overrides_refused(error) from error
        if isinstance(decision, Shed):
            refusal = busy(decision)
            raise APIError(429, refusal.message, retry_after=refusal.retry_after)
        queue_wait = request.model.metrics.stages.queue_wait
        queue_wait.observe((time.monotonic_ns() - start_ns) / SECOND)
        return decision.choice

    async def _endpoints(self, driver: PlaneDriver) -> dict[str, str]:
        """Return ip:port of each worker that is up."""
        endpoints = {}
        for id, upstream in list(driver.upstreams.items()):
            known = self._addresses.get(id)
            if known is None or known[0] is not upstream:
                known = self._addresses[id] = upstream, await _address(upstream.worker.url)
            if known[1] and id in driver.upstreams:
                endpoints[id] = known[1]
        return endpoints

    # --- the reply ------------------------------------------------------------------------------

    async def _follow(
        self, stream: ExtProcStream, request: PickedRequest, receive: Receive, send: Send
    ) -> None:
        """Pass the reply on and count its tokens, to its end."""
        while (message := await receive()) is not None:
            responses, event = stream.take(message)
            await _send_all(send, responses)
            if isinstance(event, ResponseStart):
                request.began(event, stream.served, await self._endpoints(request.driver))
            elif isinstance(event, ResponsePart):
                request.feed(event.data)
            if isinstance(event, ResponseStart | ResponsePart) and event.end:
                return request.finish()
        if request.head is None or stream.reply_mode != ProcessingMode.NONE:
            raise ConnectionResetError("the proxy closed the stream before the reply's end")
        if not self._warned:
            _log.warning("replies end here with their head: set response_body_mode of the proxy")
        self._warned = True
        return request.finish()


def prices(why: Explanation, endpoints: Mapping[str, str]) -> str:
    """Return a decision's reason and its cheapest candidates' prices as ASCII JSON."""
    decision = summary(why)
    rows = sorted(candidates(why), key=lambda row: (not row["chosen"], row["cost"] or 0.0))
    document: dict[str, Any] = {name: decision[name] for name in ("id", "policy", "regime")}
    document["reason"] = (
        f"{decision['cached_tokens']} of {decision['prompt_tokens']} tokens cached, "
        f"{decision['regret_seconds']} s above the least price of {len(rows)} candidates"
    )
    document["candidates"] = [
        {"endpoint": endpoints.get(row["decode"]), "prefiller": endpoints.get(row["prefill"] or "")}
        | {name: row[name] for name in _PRICED}
        for row in rows[:_MAX_PRICED]
    ]
    return msgspec.json.encode(document).decode("ascii", "replace")


def _by_cost(why: Explanation) -> list[str]:
    """Return decode workers by their cheapest candidate; infinite costs are left out."""
    ordered = sorted(zip(why.costs.tolist(), why.decode, strict=True))
    return list(dict.fromkeys(id for cost, id in ordered if math.isfinite(cost)))


def _kind(wanted: PickRequest) -> tuple[bool | None, bool, Any]:
    """Return if a request is a chat (None: opaque), if its path says what it is, and its model."""
    path = wanted.headers.get(":path", "").partition("?")[0].rstrip("/")
    named = path.endswith("/completions")
    chat = path.endswith("/chat/completions") if named else None
    if not wanted.body or not wanted.is_whole or "content-encoding" in wanted.headers:
        return None, False, None
    try:
        kind = msgspec.json.decode(without_bom(wanted.body), type=_BodyKind)
    except DECODING_ERRORS:
        return chat, named, None
    if not named:
        chat = True if given(kind.messages) else (False if given(kind.prompt) else None)
    return chat, named, kind.model


def _opaque(wanted: PickRequest) -> ParsedRequest:
    """Return a request that is routed by load alone."""
    return ParsedRequest(
        id=secrets.token_hex(16),
        wire_id=wire_id(wanted.headers.get(REQUEST_ID_HEADER.lower()), None),
        chat=False, stream=False, body={}, splits=False, arrival=time.monotonic_ns(),
        prompt_tokens=max(1, len(wanted.body) // _BYTES_PER_TOKEN), max_tokens=_OPAQUE_TOKENS,
    )  # fmt: skip


def _first(headers: Headers, names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := headers.get(name, "").strip())), "")


async def _address(url: str) -> str:
    """Return ip:port of a worker's URL; empty if its host has no address."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        _log.warning("%s cannot be picked: its host has no address (%s)", url, error)
        return ""
    return f"{url_host(str(infos[0][4][0]))}:{port}"


async def _send_all(send: Send, responses: list[pb.ProcessingResponse]) -> None:
    for response in responses:
        await send(response)
