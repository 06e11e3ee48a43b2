"""Authenticates a worker's clients by the fleet secret, if there is one."""

from __future__ import annotations

from contextvars import ContextVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pigou.config import ConfigError
from pigou.wire.errors import APIError
from pigou.wire.fleet_secret import NONCE, PROOF, TENANT, FleetSecret
from pigou.wire.names import is_loopback
from pigou.worker.config import WorkerConfig

#: Routes that answer probes without the secret, status only.
_PROBES = ("/health", "/ping", "/health/live", "/health/ready")
#: Max nonce length.
_NONCE_CHARACTERS = 128
#: Tenant of the current request.
_tenant: ContextVar[str] = ContextVar("fleet tenant", default="")


def fleet_guard(secret: FleetSecret | None) -> Middleware:
    """Return middleware that rejects requests without the secret, before reading the body."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Reset per request, since one task serves a whole connection.
        _tenant.set("")
        if secret is None or secret.admits(request.headers.get("authorization")):
            if secret is not None:
                _tenant.set(request.headers.get(TENANT, ""))
            return await handler(request)
        if request.path in _PROBES:
            return web.Response(status=(await handler(request)).status)
        return _refusal(request, secret)

    return middleware


def fleet_tenant() -> str:
    """Return the tenant marked by the fleet's gateway; empty without a fleet secret."""
    return _tenant.get()


def _refusal(request: web.Request, secret: FleetSecret) -> web.Response:
    error = APIError(
        401,
        "This worker belongs to a fleet: send its secret as `Authorization: Bearer SECRET`, or ask "
        "the fleet's gateway.",
        "authorization",
    )
    response = web.Response(status=401, body=error.body(), content_type="application/json")
    response.headers["www-authenticate"] = "Bearer"
    nonce = request.headers.get(NONCE, "")
    if 0 < len(nonce) <= _NONCE_CHARACTERS:
        response.headers[PROOF] = secret.proof(nonce)
    return response


def check_exposure(config: WorkerConfig, secret: FleetSecret | None) -> None:
    """Refuse to listen beyond loopback without a secret, unless allowed; raises ConfigError."""
    if secret is not None or config.allow_open:
        return
    addresses = {"host": config.host}
    if config.kv_events and config.prefix_caching:
        addresses["kv_events_endpoint"] = _host(config.kv_events_endpoint)
        addresses["kv_replay_endpoint"] = _host(config.kv_replay_endpoint)
    for field, host in addresses.items():
        if not _local(host):
            raise ConfigError(
                f"{field} is {getattr(config, field)!r}, which other machines reach, and there is "
                "no fleet secret; give --fleet-secret-file FILE or PIGOU_FLEET_SECRET, or "
                "--allow-open if the network is trusted"
            )


def _host(endpoint: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    return rest.rpartition(":")[0].strip("[]") if scheme == "tcp" else "127.0.0.1"


def _local(host: str) -> bool:
    return host not in ("", "*") and is_loopback(host)
