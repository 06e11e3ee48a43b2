"""The list of models, and pages that any worker of a model can answer."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from pigou.gateway.api.page import JSON, APIPage, APIPages, json_response
from pigou.gateway.auth.keys import current_key
from pigou.gateway.failure import WorkerFailed
from pigou.gateway.gateway import Gateway
from pigou.gateway.model_routing import GatewayModel
from pigou.tracing.trace_context import header_lines, passed_on
from pigou.wire.bodies import REPLIES, read_json
from pigou.wire.connections import note_reply_id
from pigou.wire.errors import APIError
from pigou.wire.json_limits import read_fields
from pigou.wire.openai_requests import without_bom
from pigou.wire.request_validation import REQUEST_ID_HEADER, reply_id


def pages(gateway: Gateway) -> APIPages:
    """Return the pages of models, tokenization and detokenization."""

    async def card(model: GatewayModel, name: str) -> dict[str, Any]:
        """Return a model name's card, with its routes."""
        endpoints = await gateway.server_routes.endpoints(model.serving(name))
        return model.card(name, gateway.created) | {"supported_endpoints": endpoints}

    async def models(_: web.Request) -> web.Response:
        cards = [
            await card(model, name)
            for model in gateway.routing
            for name, upstream in model.names.items()
            if upstream is not None
        ]
        return json_response({"object": "list", "data": cards})

    async def model(request: web.Request) -> web.Response:
        name = request.match_info["model"]
        return json_response(await card(gateway.routing.find(name), name))

    async def forward(request: web.Request) -> web.Response:
        data = await read_json(request, gateway.config.max_body)
        reply = await ask_any(gateway, request, request.path, data)
        return web.Response(body=reply, content_type=JSON)

    return APIPages([
        APIPage("/v1/models", models, parameters=None, head=False),
        APIPage("/v1/models/{model:.+}", model, parameters=None, head=False),
        APIPage("/tokenize", forward, method="POST", parameters=None, late_body=True),
        APIPage("/detokenize", forward, method="POST", parameters=None, late_body=True),
    ])  # fmt: skip


async def ask_any(gateway: Gateway, request: web.Request, path: str, data: bytes) -> bytes:
    """Return the reply of any worker of the model that a body names."""
    gateway.startup.check(gateway.routing.decodes)
    model, name = gateway.routing.of_body(data)
    body = await gateway.off_loop(data, partial(read_fields, without_bom(data)))
    if name and "model" in body:
        body["model"] = msgspec.Raw(msgspec.json.encode(name))
    last: WorkerFailed | None = None
    tenant, lines = current_key().tenant, header_lines(passed_on(request.headers))
    id = reply_id(request.headers.get(REQUEST_ID_HEADER))
    note_reply_id(request, id)
    named = str(msgspec.json.decode(body.get("model", b'""')))
    for upstream in sorted(model.upstreams, key=lambda up: not up.engine.serves(named)):
        try:
            with REPLIES.reserve() as held:
                return await upstream.whole(path, body, id, tenant, lines, held=held)
        except WorkerFailed as failure:
            last = failure
    raise APIError(503, f"No worker answers: {last or 'none is up'}.", retry_after=1)
