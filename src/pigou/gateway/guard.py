"""The guard: who may come in, and how refusals and failures are told."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pigou.gateway.assets import ASSETS
from pigou.gateway.call import CHAT, COMPLETIONS
from pigou.gateway.closing import Closing
from pigou.gateway.failure import Rejected
from pigou.gateway.keys import NO_KEY, Key, Keys
from pigou.gateway.metrics import Metrics
from pigou.logs import accessed
from pigou.wire.connections import is_reserved, too_many_connections
from pigou.wire.errors import SUSPECT, APIError, http_error, too_large
from pigou.wire.request_id import HEADER, echo

_log = logging.getLogger("pigou.gateway")


#: With which key the request of the current task came.
_key: ContextVar[Key] = ContextVar("key", default=NO_KEY)
#: Routes that need no key: for probes, and the page, which holds no data itself. `/metrics` looks
#: at the key by itself.
_OPEN = ("/health", "/health/ready", "/health/live", "/ping", "/version", "/metrics",
         *ASSETS)  # fmt: skip
_PROBES = ("/health", "/health/ready", "/health/live", "/ping", "/metrics")
_KEYED = ("/v1/models", "/tokenize", "/detokenize", "/workers", "/history", "/usage", "/decisions")
_ROUTES = (COMPLETIONS, CHAT, *_KEYED, *_OPEN)


def current_key() -> Key:
    """Return the key that the request came with; `NO_KEY` where there are no keys."""
    return _key.get()


def guard(keys: Keys | None, metrics: Metrics, closing: Closing) -> Middleware:
    """Return the middleware that checks keys, turns errors into bodies, and counts.

    Args:
        keys: accepted API keys; None lets everybody in.
        metrics: counters.
        closing: knows who is under way.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        with accessed(request.method, request.path) as fields:
            response = await counted(request, handler)
            fields["status"] = response.status
        return response

    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = request.path if request.path in _ROUTES else "other"
        # Probes and scrapes are not work: they are counted by route alone.
        works = request.method == "POST"
        metrics.inflight.inc(works)
        status = "499"
        try:
            with closing.under_way():
                response = await _answer(request, handler, keys, metrics, closing)
            status = str(response.status)
        finally:
            metrics.inflight.dec(works)
            metrics.requests.labels(route, status).inc()
            if status == "499" and works:
                metrics.cancelled.inc()
        if not response.prepared:
            response.headers.update(echo(request.headers.get(HEADER)))
        return response

    return middleware


async def _answer(
    request: web.Request,
    handler: Handler,
    keys: Keys | None,
    metrics: Metrics,
    closing: Closing,
) -> web.StreamResponse:
    try:
        if keys is not None and request.path not in _OPEN:
            key = keys.find(request.headers.get("authorization") or _x_api_key(request))
            if key is None:
                raise unauthorized()
            _key.set(key)
        if is_reserved(request) and (keys is None or request.path in _OPEN):
            _check_reserved(request.path)
        with closing.told():
            return await handler(request)
    except (ConnectionError, TimeoutError):
        raise  # the client is gone: there is nobody to tell
    except Exception as error:
        return _refusal(request, error, metrics)


def _x_api_key(request: web.Request) -> str | None:
    """Return the key that clients of Anthropic's API send, as the header of all others."""
    key = request.headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"


def _refusal(request: web.Request, error: Exception, metrics: Metrics) -> web.Response:
    """Return the response that tells the client of an error."""
    match error:
        case Rejected():
            return _json(error.status, error.body)
        case APIError():
            if error.status in (429, 503) and request.method == "POST":
                metrics.shed.inc()
            return error_response(error)
        case web.HTTPRequestEntityTooLarge():
            return error_response(too_large(request.client_max_size))
        case web.HTTPException():
            response = error_response(
                http_error(error.status, request.method, request.path, error.reason)
            )
            if "allow" in error.headers:
                response.headers["allow"] = error.headers["allow"]
            return response
    _log.error("%s %s failed", request.method, request.path, exc_info=error)
    return error_response(APIError(500, "The gateway failed; its log says why."))


def _check_reserved(path: str) -> None:
    """Let only probes in over a connection above the cap, where no key tells who comes."""
    if path not in _PROBES:
        raise too_many_connections()


def unauthorized() -> APIError:
    """Return the error of a request without a key that is known."""
    return APIError(
        401,
        "The request has no API key that this gateway knows: send one as the header "
        "`Authorization: Bearer KEY`.",
        "authorization",
    )


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def error_response(error: APIError) -> web.Response:
    """Return the response that tells a client of an error."""
    response = _json(error.status, error.body())
    if error.retry_after is not None:
        response.headers["retry-after"] = str(error.retry_after)
    if error.type == SUSPECT:
        response.headers["x-should-retry"] = "false"  # clients of OpenAI retry 5xx otherwise
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response
