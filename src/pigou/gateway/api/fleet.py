"""Fleet pages: workers, plan, and changes to workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from pigou.config import ConfigError
from pigou.gateway.api.costs import cost_meter
from pigou.gateway.api.page import Access, APIPage, APIPages, json_response
from pigou.gateway.auth.keys import current_key
from pigou.gateway.fleet_status import (
    ChangeRefused,
    FleetChanges,
    UnknownWorker,
    WorkerRow,
    registry_families,
)
from pigou.gateway.gateway import Gateway
from pigou.gateway.plan_status import PlanStatus, plan_families
from pigou.request import Role
from pigou.wire.bodies import read_json
from pigou.wire.errors import APIError, bad_request, decoded
from pigou.wire.openai_requests import without_bom

_T = TypeVar("_T")
#: Workers that one request adds at most.
MAX_COUNT = 64
#: Bytes of a body.
_MAX_BYTES = 64 * 1024
#: Seconds that a drain may be given at most.
_MAX_LIMIT_S = 86_400.0
_NOW = {"true": True, "1": True, "false": False, "0": False}

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]


class AddBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /workers`: a role and count, or a server to attach; `model` for local ones."""

    role: Role | None = None
    count: Count | None = None
    attach: str | None = None
    model: str | None = None


class DrainBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Optional body of `POST /workers/{id}/drain` and `/restart`."""

    limit_s: float | None = None


class FlipBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /workers/{id}/flip`."""

    role: Role
    limit_s: float | None = None


def pages(gateway: Gateway) -> APIPages:
    """Return the workers, the plan and fleet changes, for administrators."""
    plan_status = gateway.plan_status or PlanStatus(gateway.plane_driver.meter)
    gateway.metrics.scrape(partial(plan_families, plan_status))
    registry = gateway.registry
    if registry is not None:
        gateway.metrics.scrape(lambda: registry_families(registry()))

    async def workers(_: web.Request) -> web.Response:
        view = gateway.routing.view()
        view["costs"] = any(cost_meter(model.plane_driver) for model in gateway.routing)
        if registry is not None:
            view["registry"] = msgspec.to_builtins(registry())
        return json_response(view)

    async def plan(_: web.Request) -> web.Response:
        """Show the planner's decisions and reasons."""
        return json_response(plan_status.view())

    change = FleetAPI(gateway)
    posts = {
        "/workers": change.add, "/workers/{id}/drain": change.drain,
        "/workers/{id}/flip": change.flip, "/workers/{id}/restart": change.restart,
    }  # fmt: skip
    return APIPages([
        APIPage("/workers", workers, Access.ADMIN),
        APIPage("/plan", plan, Access.ADMIN),
        *(
            APIPage(path, answer, parameters=None, method="POST", late_body=True)
            for path, answer in posts.items()
        ),
        APIPage("/workers/{id}", change.remove, parameters=None, method="DELETE"),
    ])  # fmt: skip


class FleetAPI:
    """Adds, drains, flips and removes workers for administrators."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def add(self, request: web.Request) -> web.Response:
        """Add local workers of a role, or attach a server."""
        changes = self._changes(request)
        body = await _read(request, AddBody)
        if (body.role is None) == (body.attach is None):
            raise bad_request("Give role (and count), or attach, and only one of them.", "role")
        if body.attach is not None:
            if body.count is not None:
                raise bad_request("count belongs to role: attach takes one server.", "count")
            if body.model is not None:
                raise bad_request("model belongs to role: a server says its own.", "model")
            text = body.attach
            row = _changed(lambda: changes.attach(text))
            return _answer([row])
        assert body.role is not None
        role, count, model = body.role, body.count or 1, self._model(body.model)
        rows, refusal = _changed(lambda: changes.start(role, count, model))
        return _answer(rows, refusal)

    async def drain(self, request: web.Request) -> web.Response:
        """Drain and remove a worker."""
        changes = self._changes(request)
        limit_s = await _read_limit(request)
        return _answer([_changed(lambda: changes.drain(_id(request), limit_s))])

    async def restart(self, request: web.Request) -> web.Response:
        """Drain and restart a local worker."""
        changes = self._changes(request)
        limit_s = await _read_limit(request)
        return _answer([_changed(lambda: changes.restart(_id(request), limit_s))])

    async def flip(self, request: web.Request) -> web.Response:
        """Drain a worker and change its role."""
        changes = self._changes(request)
        body = await _read(request, FlipBody)
        limit_s = _limit(body.limit_s)
        return _answer([_changed(lambda: changes.flip(_id(request), body.role, limit_s))])

    async def remove(self, request: web.Request) -> web.Response:
        """Drain and remove a worker; with `?now=true` at once."""
        changes = self._changes(request)
        for name in request.query:
            if name != "now":
                raise bad_request(f"Unknown parameter {name[:80]}; there is now.", name[:80])
        text = request.query.get("now", "false")
        if text not in _NOW:
            raise bad_request(f"now is {text[:40]!r}; give true or false.", "now")
        id = _id(request)
        work = (lambda: changes.remove(id)) if _NOW[text] else lambda: changes.drain(id, None)
        return _answer([_changed(work)])

    def _model(self, name: str | None) -> str:
        models = self._gateway.routing
        if not models.declared:
            if name is not None:
                raise bad_request("model is for gateways with --model-pool: leave it out.", "model")
            return ""
        return models.find(name).name

    def _changes(self, request: web.Request) -> FleetChanges:
        if not current_key().admin:
            raise APIError(
                403,
                "Workers are changed with an administrator's key alone (`pigou key TENANT --admin` "
                "makes one).",
                "authorization",
            )
        self._check_origin(request)
        self._gateway.shutdown.check_open()
        if self._gateway.changes is None:
            raise APIError(
                409, "The workers of this gateway cannot be changed; start it by `pigou serve`.",
                final=True,
            )  # fmt: skip
        return self._gateway.changes

    def _check_origin(self, request: web.Request) -> None:
        """Reject other sites' pages: browsers send such requests without a preflight."""
        origin = request.headers.get("origin")
        if origin is None or origin in self._gateway.config.cors_origins:
            return
        if urlsplit(origin).netloc != request.host:
            raise APIError(
                403,
                f"Origin is {origin[:80]!r}; pages of other sites change no workers here, unless "
                "the gateway is started with --cors-origin.",
                "origin",
            )


async def _read(request: web.Request, kind: type[_T]) -> _T:
    data = without_bom(await read_json(request, _MAX_BYTES))
    return decoded(msgspec.json.Decoder(kind), data)


async def _read_limit(request: web.Request) -> float | None:
    """Return the limit in an optional body."""
    body = await _read(request, DrainBody) if request.can_read_body else DrainBody()
    return _limit(body.limit_s)


def _limit(limit_s: float | None) -> float | None:
    if limit_s is not None and not (math.isfinite(limit_s) and 0 <= limit_s <= _MAX_LIMIT_S):
        raise bad_request(
            f"limit_s is {limit_s:g}; it must be 0 to {_MAX_LIMIT_S:g} seconds.", "limit_s"
        )
    return limit_s


def _id(request: web.Request) -> str:
    return str(request.match_info["id"])


def _changed(change: Callable[[], _T]) -> _T:
    """Apply a change; map its refusals to API errors."""
    try:
        return change()
    except ConfigError as error:
        raise bad_request(f"{error}.", "attach") from None
    except UnknownWorker as error:
        raise APIError(
            404, f"There is no worker {str(error)[:80]!r}; GET /workers lists them."
        ) from None
    except ChangeRefused as error:
        raise APIError(409, f"{error}.") from None


def _answer(rows: list[WorkerRow], refusal: str = "") -> web.Response:
    """Return the ids and states of the changed workers."""
    workers: list[dict[str, Any]] = [
        {
            "id": row.id, "role": row.role, "pool": row.pool, "state": row.state,
            "epoch": row.epoch, "note": row.note,
        }
        for row in rows
    ]  # fmt: skip
    return json_response({"workers": workers} | ({"refused": refusal} if refusal else {}), 202)
