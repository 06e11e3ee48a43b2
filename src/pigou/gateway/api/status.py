"""Health, usage and version."""

from __future__ import annotations

from collections import Counter
from typing import Any

from aiohttp import web

from pigou import __version__
from pigou.gateway.api.page import Access, APIPage, APIPages, json_response
from pigou.gateway.auth.keys import current_key
from pigou.gateway.gateway import Gateway

_NO_WORKER = "no decode worker is up"


def pages(gateway: Gateway) -> APIPages:
    """Return the pages for probes, `/usage` and `/version`."""

    async def health(_: web.Request) -> web.Response:
        """Answer 200 if requests can be served, 503 during startup and drain."""
        background, models = gateway.plane_driver.background, gateway.routing
        decodes, startup = models.decodes, gateway.startup
        body: dict[str, Any] = {"status": "ok", "background": background.health()}
        if models.several:
            body["models"] = {model.name: "ok" if model.decodes else _NO_WORKER for model in models}
        if gateway.registry is not None:
            body["registry"] = gateway.registry().health()
        if (peers_health := gateway.plane_driver.peers_health) is not None:
            body["peers"] = peers_health()
        if gateway.shutdown.begun:
            body["status"] = "closing"
        elif startup.active and not decodes:
            body |= {"status": "starting", "stages": startup.stages}
        elif not decodes:
            body["status"] = _NO_WORKER
        elif background.failing or not all(model.decodes for model in models):
            body["status"] = "degraded"  # `models` says which one has no worker
        if decodes and not gateway.shutdown.begun:
            return json_response(body)
        response = json_response(body, 503)
        response.headers["retry-after"] = "1"
        return response

    async def live(_: web.Request) -> web.Response:
        """Answer 200 while the process serves, also during startup and drain."""
        return json_response({"status": "ok"})

    async def usage(_: web.Request) -> web.Response:
        """Show a key's tenant, its tokens so far and its budgets."""
        key, used = current_key(), Counter[str]()
        for model in gateway.routing:
            used.update(model.metrics.usage(key.tenant))
        budgets = gateway.budgets.document(key)
        return json_response({"tenant": key.tenant, "admin": key.admin, **used, **budgets})

    async def version(_: web.Request) -> web.Response:
        return json_response({"version": __version__})

    probes = {"/health": health, "/health/ready": health, "/health/live": live, "/ping": health}
    return APIPages([
        *(APIPage(path, answer, Access.PROBE, None) for path, answer in probes.items()),
        APIPage("/usage", usage),
        APIPage("/version", version, Access.OPEN, None),
    ])  # fmt: skip
