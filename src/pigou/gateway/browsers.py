"""What pages in a browser may do with a gateway: CORS, and the check of `Host`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pigou.gateway.config import GatewayConfig, is_loopback
from pigou.gateway.guard import error_response
from pigou.wire.errors import APIError, bad_request

_EXPOSED = (
    "x-request-id, x-pigou-decision, x-pigou-worker, x-pigou-prefill-worker, retry-after, "
    "x-pigou-unknown-fields"
)
_METHODS = "GET, POST, OPTIONS"
_HEADERS = "authorization, content-type, x-request-id"
_MAX_AGE_S = "600"
_LONGEST = 1024


def browsers(config: GatewayConfig) -> Middleware:
    """Return the middleware that checks `Host`, and answers preflight requests before any key.

    A page of any site can have its own name resolve to 127.0.0.1 (DNS rebinding). Its requests
    then reach a gateway on loopback, but still carry that name as `Host`.
    """

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
    """Raise `APIError` unless a request is meant for this gateway, by `Host` or an absolute URI.

    Only a gateway on a loopback address checks this, or one with `allowed_hosts`.
    """
    named = request.headers.getall("host", [])
    if len(named) > 1:
        raise bad_request(f"Host comes {len(named)} times; send it once.", "host")
    # The authority of an absolute URI is what counts (RFC 9112, 3.2.2); `Host` must fit as well.
    for host in (*named, *_authority(request.raw_path)):
        _check_name(host, config)


def _authority(target: str) -> tuple[str, ...]:
    """Return the authority of a request's target that is an absolute URI, else nothing.

    Raises:
        APIError: 400, it is none of HTTP, or has user information.
    """
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
    """Raise `APIError` 403 unless this gateway is called so."""
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
    """Whether a name cannot be one that a stranger has in the public DNS."""
    # A name of one label, as a container's, is no stranger's: those have their own domain.
    return is_loopback(name) or name.endswith(".localhost") or not ("." in name or ":" in name)


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


def add_cors(
    config: GatewayConfig,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return what adds CORS headers to every response; for `on_response_prepare`."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        if not config.cors_origins:
            return
        response.headers["vary"] = "Origin"
        if origin := _allowed(request, config):
            response.headers["access-control-allow-origin"] = origin
            response.headers["access-control-expose-headers"] = _EXPOSED

    return add


def _allowed(request: web.BaseRequest, config: GatewayConfig) -> str:
    """Return the origin that is told as allowed; empty where the request's is not."""
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
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": wanted if 0 < len(wanted) <= _LONGEST else _HEADERS,
        "access-control-max-age": _MAX_AGE_S,
    }
    if "access-control-request-private-network" in request.headers:
        headers["access-control-allow-private-network"] = "true"
    return web.Response(status=204, headers=headers)
