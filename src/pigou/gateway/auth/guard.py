"""Guard of all routes: access, error responses, and request counts."""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from functools import lru_cache

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pigou.gateway.api.page import JSON, Access, APIPage
from pigou.gateway.auth.keys import Keys, unauthorized, use_key
from pigou.gateway.config import GatewayConfig
from pigou.gateway.metrics import Metrics
from pigou.gateway.startup_shutdown import Shutdown
from pigou.logs import accessed, note_request
from pigou.wire.connections import is_reserved, serves_probes_alone, too_many_connections
from pigou.wire.errors import APIError, bad_request, http_error, too_large
from pigou.wire.messages import PATH as MESSAGES
from pigou.wire.messages import error_body
from pigou.wire.names import is_loopback

_log = logging.getLogger("pigou.gateway")
#: By it the SDKs of OpenAI and Anthropic say that they try a request once more.
_RETRY_COUNT = "x-stainless-retry-count"


#: Metrics of the model that the current task's request is for; None while that is not known.
_model_metrics: ContextVar[Metrics | None] = ContextVar("model_metrics", default=None)
_EXPOSED = (
    "x-request-id, x-pigou-decision, x-pigou-worker, x-pigou-prefill-worker, retry-after, "
    "x-pigou-unknown-fields, x-pigou-prefix-advice, x-pigou-cache, x-ratelimit-limit-requests, "
    "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_CORS_METHODS = "GET, POST, OPTIONS"
_CORS_HEADERS = "authorization, content-type, x-request-id"
_MAX_AGE_S = "600"
_MAX_HEADERS_CHARS = 1024


class PageRules:
    """Access and metric label by path."""

    def __init__(self, pages: Iterable[APIPage]) -> None:
        own = [page for page in pages if page.is_own]
        paths = {page.path for page in own if "{" not in page.path}
        self.open = {page.path for page in own if page.access <= Access.OPEN}
        self.probes = {page.path for page in own if page.access is Access.PROBE}
        self._labels = {path: path for path in paths}
        self._above = {page.path.partition("/{")[0] for page in own if "{" in page.path}

    def label(self, path: str) -> str:
        """Return a path's metric label, from a bounded set."""
        if path in self._labels:
            return path
        above = next((page for page in self._above if path.startswith(f"{page}/")), None)
        return "other" if above is None else f"{above}/{{id}}"


def count_for(metrics: Metrics) -> None:
    """Count the current request for a model."""
    _model_metrics.set(metrics)


def guard(keys: Keys | None, metrics: Metrics, shutdown: Shutdown, rules: PageRules) -> Middleware:
    """Return the middleware that checks keys (None for none), maps errors, and counts."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        with accessed(request.method, request.path) as fields:
            response = await counted(request, handler)
            fields["status"] = response.status
        return response

    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Probes and scrapes are not work: they are counted by route alone.
        works = request.method == "POST"
        metrics.inflight.inc(works)
        _model_metrics.set(None)  # the task may have served another request before
        note_request()
        status = "499"
        try:
            with shutdown.under_way():
                response = await answered(request, handler)
            status = str(response.status)
        finally:
            metrics.inflight.dec(works)
            own = _model_metrics.get() or metrics
            own.requests.labels(rules.label(request.path), status).inc()
            if works and request.headers.get(_RETRY_COUNT, "0") != "0":
                own.retried.inc()
            if status == "499" and works:
                own.cancelled.inc()
        return response

    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path in rules.open
        try:
            if keys is not None and not is_open:
                key = keys.find(request.headers.get("authorization") or _x_api_key(request))
                if key is None:
                    raise unauthorized()
                use_key(key)
            # Above the cap, where no key tells who comes, only probes are let in.
            if (
                serves_probes_alone(request) or (is_reserved(request) and (keys is None or is_open))
            ) and request.path not in rules.probes:
                raise too_many_connections()
            with shutdown.reports_end():
                return await handler(request)
        except (ConnectionError, TimeoutError):
            raise  # the client is gone: there is nobody to tell
        except Exception as error:
            return _refusal(request, error, metrics)

    return middleware


def _x_api_key(request: web.Request) -> str | None:
    key = request.headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"


def _refusal(request: web.Request, error: Exception, metrics: Metrics) -> web.Response:
    match error:
        case APIError():
            if error.status in (429, 503) and request.method == "POST":
                (_model_metrics.get() or metrics).shed.inc()
            return error_response(error, request.path)
        case web.HTTPRequestEntityTooLarge():
            return error_response(too_large(request.client_max_size), request.path)
        case web.HTTPException():
            response = error_response(
                http_error(error.status, request.method, request.path, error.reason)
            )
            if "allow" in error.headers:
                response.headers["allow"] = error.headers["allow"]
            return response
    _log.error("%s %s failed", request.method, request.path, exc_info=error)
    return error_response(APIError(500, "The gateway failed; its log says why."), request.path)


def error_response(error: APIError, path: str = "") -> web.Response:
    """Return the HTTP response of an error, in Anthropic's form below its path."""
    body = error_body(error) if path.startswith(MESSAGES) else error.body()
    return web.Response(body=body, status=error.status, headers=error.headers, content_type=JSON)


def check_browser(config: GatewayConfig) -> Middleware:
    """Return the middleware against DNS rebinding, which also answers preflight requests."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_host(request, config)
        except APIError as error:
            return error_response(error)
        if request.method == "OPTIONS" and "access-control-request-method" in request.headers:
            return _preflight(request, config)
        return await handler(request)

    return middleware


def check_host(request: web.BaseRequest, config: GatewayConfig) -> None:
    """Raise `APIError` unless `Host` or an absolute URI names this gateway.

    Checked on loopback addresses, or with `allowed_hosts`.
    """
    named = request.headers.getall("host", [])
    if len(named) > 1:
        raise bad_request(f"Host comes {len(named)} times; send it once.", "host")
    # The authority of an absolute URI is what counts (RFC 9112, 3.2.2); `Host` must fit as well.
    for host in (*named, *_authority(request.raw_path)):
        _check_name(host, config)


def _authority(target: str) -> tuple[str, ...]:
    """Return the authority of an absolute request URI, else nothing."""
    if target.startswith("/") or "://" not in target:
        return ()
    scheme, _, rest = target.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if scheme.lower() not in ("http", "https") or "@" in authority or not authority:
        raise bad_request(
            f"The request's target is {target[:80]!r}; send its path alone, like /v1/models.",
            "target",
        )
    return (authority,)


def _check_name(host: str, config: GatewayConfig) -> None:
    if not (is_loopback(config.host) or config.allowed_hosts):
        return
    name = host_name(host)
    if is_loopback(config.host) and _is_local(name):
        return
    if name not in (config.host.lower(), *(host.lower() for host in config.allowed_hosts)):
        raise APIError(
            403,
            f"Host is {host[:80]!r}; this gateway is called by local names only, unless it is "
            "started with --allowed-host NAME.",
            "host",
        )


def _is_local(name: str) -> bool:
    # A name of one label, as a container's, is no stranger's: those have their own domain.
    return is_loopback(name) or name.endswith(".localhost") or not ("." in name or ":" in name)


@lru_cache(256)
def host_name(host: str) -> str:
    """Return the name or address in a `Host` header, without port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.rpartition(":")[0] if ":" in host else host.rstrip(".")
    return host


def add_cors(config: GatewayConfig) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return the `on_response_prepare` hook that adds CORS headers."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        if not config.cors_origins:
            return
        response.headers["vary"] = "Origin"
        if origin := _allowed(request, config):
            response.headers["access-control-allow-origin"] = origin
            response.headers["access-control-expose-headers"] = _EXPOSED

    return add


def _allowed(request: web.BaseRequest, config: GatewayConfig) -> str:
    """Return the allowed origin; empty if the request's is not allowed."""
    origin = request.headers.get("origin", "")
    if origin and "*" in config.cors_origins:
        return "*"
    return origin if origin in config.cors_origins else ""


def _preflight(request: web.Request, config: GatewayConfig) -> web.StreamResponse:
    if not _allowed(request, config):
        origin = request.headers.get("origin", "")[:80]
        return error_response(
            APIError(
                403,
                f"Origin is {origin!r}; start the gateway with --cors-origin {origin or 'ORIGIN'} "
                "to let its pages in.",
                "origin",
            )
        )
    wanted = request.headers.get("access-control-request-headers", "")
    headers = {
        "access-control-allow-methods": _CORS_METHODS,
        "access-control-allow-headers": wanted
        if 0 < len(wanted) <= _MAX_HEADERS_CHARS
        else _CORS_HEADERS,
        "access-control-max-age": _MAX_AGE_S,
    }
    if "access-control-request-private-network" in request.headers:
        headers["access-control-allow-private-network"] = "true"
    return web.Response(status=204, headers=headers)
