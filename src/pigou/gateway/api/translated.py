"""Responses and Messages: translated to chats, or passed on where every server has the route."""

from __future__ import annotations

import secrets
import time

import msgspec
from aiohttp import web

from pigou.gateway.api.generation import GenerationAPI
from pigou.gateway.api.models import ask_any
from pigou.gateway.api.page import JSON, APIPage, APIPages, json_response
from pigou.gateway.api.passthrough import Passthrough
from pigou.gateway.auth.keys import current_key
from pigou.gateway.gateway import Gateway
from pigou.gateway.proxy.server_routes import RESPONSES
from pigou.wire.bodies import read_json, send_continue
from pigou.wire.chat_translation import ChatTranslation, object_decoder, renaming
from pigou.wire.errors import APIError
from pigou.wire.json_limits import read_fields
from pigou.wire.messages import PATH as MESSAGES
from pigou.wire.messages import Messages
from pigou.wire.openai_requests import without_bom
from pigou.wire.responses import Responses, ResponseStore, answer_stored


def pages(gateway: Gateway) -> APIPages:
    """Return the pages of both APIs."""
    api = TranslatedAPI(gateway)
    below = f"{RESPONSES}/{{id}}"
    return APIPages(
        [
            *(
                APIPage(path, api.answer, method="POST", parameters=None, late_body=True)
                for path in (RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens")
            ),
            APIPage(below, api.stored, parameters=None, head=False),
            APIPage(below, api.stored, method="DELETE", parameters=None),
            APIPage(f"{below}/cancel", api.stored, method="POST", parameters=None),
            APIPage(f"{below}/{{rest:.*}}", api.passed.answer, method="*", parameters=None),
        ],
        close=api.generation.fleets.close,
    )


class TranslatedAPI:
    """Answers responses and messages."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.generation, self.passed = GenerationAPI(gateway), Passthrough(gateway)
        config = gateway.config
        self._store = ResponseStore(time.monotonic, config.response_store, config.response_ttl)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request by a chat, or pass it on."""
        gateway = self._gateway
        servers = [up for model in gateway.routing for up in model.upstreams]
        if await gateway.server_routes.all_list(servers, request.method, request.path):
            await send_continue(request)
            return await self.passed.answer(request)
        if request.path.endswith("/count_tokens"):
            return await self._count(request)
        tenant, made = current_key().tenant, list[ChatTranslation]()

        def translate(data: bytes) -> ChatTranslation:
            read_fields(without_bom(data))  # within the bounds of JSON
            id = secrets.token_hex(16)
            is_message = request.path == MESSAGES
            made.append(Messages(data, id) if is_message
                        else Responses(data, id, tenant, self._store))  # fmt: skip
            return made[0]

        with renaming(lambda path: made[0].field(path) if made else path):
            return await self.generation.generate(request, translate)

    async def _count(self, request: web.Request) -> web.Response:
        data = await read_json(request, self._gateway.config.max_body)

        def counted() -> Messages:
            read_fields(without_bom(data))
            return Messages(data, "", counts=True)

        message = await self._gateway.off_loop(data, counted)
        with renaming(message.field):
            reply = await ask_any(self._gateway, request, "/tokenize", message.tokenize_body())
        try:
            count = object_decoder.decode(reply)["count"]
        except (msgspec.DecodeError, KeyError):
            raise APIError(502, "A worker's /tokenize told no count.") from None
        return json_response({"input_tokens": count})

    async def stored(self, request: web.Request) -> web.StreamResponse:
        """Answer for a stored response, or pass its id on to a server that may keep it."""
        id, tenant = request.match_info["id"], current_key().tenant
        if self._store.find(tenant, id) is None:
            servers = [up for model in self._gateway.routing for up in model.upstreams]
            listed = [up for up in servers if up.engine.stock]
            if await self._gateway.server_routes.having(listed, request.method, request.path):
                return await self.passed.answer(request)
        body = answer_stored(self._store, tenant, request.method, id)
        return web.Response(body=body, content_type=JSON)
