"""Caches for agents (tool results, retrieval), the manifest that voids them, and sessions."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from aiohttp import web

from pigou.gateway.api.page import APIPage, APIPages, check_admin, json_response
from pigou.gateway.auth.keys import current_key
from pigou.gateway.auth.tenure import read_tenure_headers
from pigou.gateway.caches.context import Context, compile_context
from pigou.gateway.caches.layers import (
    MAX_SESSION_TTL_S,
    CacheLayer,
    check_session,
)
from pigou.gateway.gateway import Gateway
from pigou.kv.manifest import Bound
from pigou.kv.tenure import Tenure
from pigou.request import NEVER, SECOND
from pigou.wire.bodies import read_json
from pigou.wire.errors import APIError, bad_request, decoded
from pigou.wire.openai_requests import without_bom

_MAX_BODY = 2**20
_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=3.2e8)]


class LookupBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is looked up: a tool's result, or what a corpus has on a query."""

    tool: _Text | None = None
    arguments: dict[str, Any] = {}
    query: str | None = None


class StoreBody(LookupBody, forbid_unknown_fields=True, kw_only=True):
    """An artifact to store, with the ticket of the lookup that missed it."""

    value: Any
    ticket: str
    ttl_s: _Seconds | None = None
    cost_s: _Seconds = 0.1  # seconds to make it again


class Rating(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A user's judgement of an answer, by the reply's id."""

    id: _Text
    rating: Literal["up", "down"]


class ChangeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A new version of a corpus, or of whatever a tenure names; it voids what was made before."""

    field: Literal["corpus", "principal", "permissions", "tools", "template", "safety"]
    value: _Text
    version: Annotated[str, msgspec.Meta(max_length=256)] = ""
    changed_at: float | None = None  # Unix time at which the source changed; None for now
    tenant: Annotated[str, msgspec.Meta(max_length=32)] | None = None  # administrators only


def pages(gateway: Gateway) -> APIPages:
    """Return the pages of caches, the manifest and sessions."""
    api = CachesAPI(gateway)
    posts = {
        "/v1/caches/{layer}/lookup": api.look_up, "/v1/caches/{layer}/store": api.store,
        "/v1/feedback": api.rate, "/v1/manifest": api.change, "/v1/contexts": api.compile,
    }  # fmt: skip
    return APIPages([
        *(APIPage(path, answer, method="POST", late_body=True) for path, answer in posts.items()),
        APIPage("/v1/manifest", api.manifest),
        APIPage("/v1/sessions/{id}", api.end_session, method="DELETE"),
    ])  # fmt: skip


class CachesAPI:
    """Answers for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._caches = gateway, gateway.caches
        self._ratings = gateway.metrics.counter(
            "pigou_answer_ratings", "Answers that users rated.", "rating"
        )

    async def look_up(self, request: web.Request) -> web.Response:
        """Return an artifact, or the ticket to store it with."""
        layer = self._layer(request)
        body = decoded(msgspec.json.Decoder(LookupBody), await _body(request))
        bound = self._bound(request, layer)
        value = self._caches.get(layer, bound, _content(layer, body, bound.declared))
        if value is not None:
            return json_response({"hit": True, "value": msgspec.Raw(value)})
        return json_response({"hit": False, "ticket": _ticket(bound)})

    async def store(self, request: web.Request) -> web.Response:
        """Store an artifact, unless its tenure changed since the lookup."""
        layer = self._layer(request)
        body = decoded(msgspec.json.Decoder(StoreBody), await _body(request))
        bound = self._bound(request, layer)
        content = _content(layer, body, bound.declared)
        if body.ticket != _ticket(bound):
            raise APIError(
                409, "ticket is of another tenure, or its corpus or a permission changed since "
                "the lookup: look up again, and make the result again.", "ticket", final=True,
            )  # fmt: skip
        value = msgspec.json.encode(body.value)
        size = len(value) + len(content)
        stored = self._caches.put(layer, bound, content, value, size, body.cost_s, body.ttl_s)
        return json_response({"stored": stored})

    async def compile(self, request: web.Request) -> web.Response:
        """Compile a context; return messages, tools, tokens of each part, and what was dropped."""
        context = decoded(msgspec.json.Decoder(Context), await _body(request))
        if CacheLayer.CONTEXT not in self._caches.layers:
            return json_response(compile_context(context))
        bound = self._bound(request, CacheLayer.CONTEXT)
        return json_response(msgspec.Raw(self._caches.compiled(bound, context)))

    async def rate(self, request: web.Request) -> web.Response:
        """Count a user's rating; a disliked answer that is cached goes."""
        body = decoded(msgspec.json.Decoder(Rating), await _body(request))
        self._ratings.labels(body.rating).inc()
        tenant, gone = current_key().tenant, 0
        for layer in (CacheLayer.ANSWER, CacheLayer.SEMANTIC):
            cache = self._caches.layers.get(layer)
            answer = self._caches.served.get((tenant, body.id))
            if cache is None or answer is None or body.rating == "up":
                continue
            for key, held in cache.held(tenant):
                if held.tenured.open(held.bound.tenure, 0) == answer:
                    cache.remove(key, time.time_ns())
                    gone += 1
        return json_response({"rating": body.rating, "removed": gone})

    async def manifest(self, _: web.Request) -> web.Response:
        """Return the tenant's versions."""
        key = current_key()
        entries = [
            {name: getattr(entry, name) for name in ("field", "value", "version", "serial")}
            | ({"tenant": entry.tenant} if key.admin else {})
            for entry in self._caches.manifest.entries.values()
            if key.admin or entry.tenant == key.tenant
        ]
        return json_response({"data": entries})

    async def change(self, request: web.Request) -> web.Response:
        """Record a new version; void all that was made under the one before, on all gateways."""
        body, key = decoded(msgspec.json.Decoder(ChangeBody), await _body(request)), current_key()
        if body.tenant is not None and body.tenant != key.tenant:
            check_admin(key)
        now = time.time_ns()
        at_s = now / SECOND if body.changed_at is None else body.changed_at
        if not 0 < at_s <= now / SECOND + 60:
            raise bad_request(
                f"changed_at is {body.changed_at}; it must be a past Unix time.", "changed_at"
            )
        tenant = key.tenant if body.tenant is None else body.tenant
        return self._changed(
            tenant, body.field, body.value, body.version, int(at_s * SECOND), NEVER
        )

    async def end_session(self, request: web.Request) -> web.Response:
        """End a session: no gateway serves what it left again."""
        session, now = request.match_info["id"], time.time_ns()
        check_session(session)
        until = now + 2 * MAX_SESSION_TTL_S * SECOND
        return self._changed(current_key().tenant, "session", session, "", now, until)

    def _changed(
        self, tenant: str, field: str, value: str, version: str, at: int, until: int
    ) -> web.Response:
        voided = self._caches.change(tenant, field, value, version, at, until)
        if voided is None:
            raise APIError(
                429, f"The manifest has {self._caches.manifest.max_entries} entries, the most that "
                "gateways keep; those of sessions go with their TTL.", field, retry_after=60,
            )  # fmt: skip
        return json_response({"field": field, "value": value, "voided": voided})

    def _layer(self, request: web.Request) -> CacheLayer:
        name = request.match_info["layer"]
        if name not in (CacheLayer.TOOL, CacheLayer.RETRIEVAL):
            raise APIError(
                404, f"There is no cache {name[:40]!r} for clients: there are tool and retrieval."
            )
        if name not in self._caches.layers:
            raise APIError(
                409, f"This gateway has no {name} cache: start it with --cache {name}=SIZE.",
                final=True,
            )  # fmt: skip
        return CacheLayer(name)

    def _bound(self, request: web.Request, layer: CacheLayer) -> Bound:
        key, headers = current_key(), read_tenure_headers(request.headers)
        tenure = key.policy.apply(key.tenant, headers, time.time_ns())
        return self._caches.bind(layer, self._caches.in_session(tenure, request.headers))


async def _body(request: web.Request) -> bytes:
    return without_bom(await read_json(request, _MAX_BODY))


def _content(layer: CacheLayer, body: LookupBody, tenure: Tenure) -> bytes:
    """Return what an artifact is made from; raises APIError 400."""
    if layer is CacheLayer.TOOL:
        if body.tool is None or body.query is not None:
            raise bad_request("A tool's result has tool and arguments, and no query.", "tool")
        parts: list[Any] = [body.tool, body.arguments]
    else:
        if body.query is None or body.tool is not None:
            raise bad_request("Retrieval has a query and arguments, and no tool.", "query")
        if not tenure.corpus:
            raise bad_request(
                "Retrieval needs its corpus: send X-Pigou-Tenure-Corpus.", "X-Pigou-Tenure-Corpus"
            )
        parts = [body.query, body.arguments]
    return msgspec.json.encode(parts, order="deterministic")


def _ticket(bound: Bound) -> str:
    return bound.tenure.digest().hex()
