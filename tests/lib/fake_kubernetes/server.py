"""The fake over HTTP: discovery, objects, watches, and a record of what clients asked."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web
from tests.lib.fake_kubernetes.errors import ApiError
from tests.lib.fake_kubernetes.objects import Change, ObjectStore
from tests.lib.fake_kubernetes.resources import Resource, openapi
from tests.lib.fake_kubernetes.selectors import Matches, Object, selector

#: Parameters of a query that the fake understands; another one is an unknown request.
_PARAMETERS = {
    "labelSelector", "fieldSelector", "limit", "continue", "resourceVersion", "watch",
    "resourceVersionMatch", "allowWatchBookmarks", "timeoutSeconds", "sendInitialEvents", "pretty",
    "fieldManager", "fieldValidation", "dryRun", "propagationPolicy", "gracePeriodSeconds",
}  # fmt: skip
_INITIAL_END = {"annotations": {"k8s.io/initial-events-end": "true"}}
_SSA = "application/apply-patch+yaml"


@dataclass(frozen=True)
class SeenRequest:
    """A request by its kind: names of objects are left out.

    Attributes:
        verb: get, list, watch, create, update, patch, delete, deletecollection, discover.
        resource: `GROUP/PLURAL` or `GROUP/PLURAL/SUBRESOURCE`; a path of discovery.
        media_type: of the body; empty without one.
        parameters: names of the query's parameters, in order.
        agent: first part of the client's `User-Agent`.
    """

    verb: str
    resource: str
    media_type: str
    parameters: tuple[str, ...]
    agent: str


@dataclass(frozen=True)
class _Target:
    resource: Resource
    namespace: str
    name: str
    part: str


class FakeKubernetes:
    """The server, on a loopback port; `async with` starts and stops it.

    The test fails at its end where a client asked for what the fake does not know.

    Attributes:
        store: the objects.
        requests: what clients asked, in order.
        unknown: requests that the fake has no answer for.
        muted: watches get no events, as if they were lost on the way.
        token: that clients must show; empty asks for none.
    """

    def __init__(self, *, bookmark_s: float = 0.2, token: str = "") -> None:
        """Take seconds between bookmarks of a watch."""
        self.store = ObjectStore()
        self.requests: list[SeenRequest] = []
        self.unknown: list[str] = []
        self.muted, self.token = False, token
        self._bookmark_s, self._port = bookmark_s, 0
        self._failures: list[int] = []
        self._lost: set[int] = set()
        self._changed = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None
        self.store.notify = self._notify

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.stop()
        if kind is None:
            assert not self.unknown, f"requests that the fake does not know: {self.unknown}"

    async def start(self) -> None:
        """Listen; after a stop, on the same port and with the same objects."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Cut all connections, and listen no longer."""
        self.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def cut_watches(self) -> None:
        """Cut the connections of all watches."""
        for task in tuple(self._watches):
            task.cancel()

    def fail_next(self, code: int, times: int = 1) -> None:
        """Answer the next requests with an HTTP error."""
        self._failures += [code] * times

    def kubeconfig(self) -> dict[str, Any]:
        """Return a configuration of clients, for a file that `KUBECONFIG` names."""
        user = {"token": self.token} if self.token else {}
        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": user}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        }  # fmt: skip

    def _notify(self) -> None:
        if self.muted:
            self._lost.add(self.store.revision)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                raise ApiError(401, "Unauthorized")
            if self._failures:
                raise ApiError(self._failures.pop(0), "the test asked for this failure")
            discovered = self._discovery(request.path.rstrip("/"))
            if discovered is not None:
                self._record(request, "discover", request.path)
                return _json(discovered)
            return await self._object(request)
        except ApiError as error:
            return _json(error.status(), status=error.code)

    # Discovery
    def _discovery(self, path: str) -> Any:  # noqa: PLR0911
        resources = self.store.resources.values()
        if path == "/version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0-fake", "platform": "fake"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = sorted({r.group for r in resources if r.group})
            return {"kind": "APIGroupList", "apiVersion": "v1",
                    "groups": [self._group(group) for group in groups]}  # fmt: skip
        if path.startswith("/openapi/v3"):
            return openapi(path.removeprefix("/openapi/v3"), resources)
        parts = path.strip("/").split("/")
        if parts[0] == "apis" and len(parts) == 2 and any(r.group == parts[1] for r in resources):
            return {"kind": "APIGroup", "apiVersion": "v1", **self._group(parts[1])}
        served = [r for r in resources if r.path == path]
        if not served:
            return None
        entries = [entry for resource in served for entry in resource.discovery()]
        return {"kind": "APIResourceList", "apiVersion": "v1",
                "groupVersion": served[0].api_version, "resources": entries}  # fmt: skip

    def _group(self, group: str) -> dict[str, Any]:
        versions = sorted({r.version for r in self.store.resources.values() if r.group == group})
        entries = [{"groupVersion": f"{group}/{v}", "version": v} for v in versions]
        return {"name": group, "versions": entries, "preferredVersion": entries[-1]}

    # Objects
    def _target(self, path: str) -> _Target:
        parts = path.strip("/").split("/")
        group, version, rest = "", "", []
        if parts[0] == "api" and len(parts) > 2:
            version, rest = parts[1], parts[2:]
        elif parts[0] == "apis" and len(parts) > 3:
            group, version, rest = parts[1], parts[2], parts[3:]
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        resource = self.store.resources.get((group, version, rest[0])) if rest else None
        if resource is None or len(rest) > 3:
            if any(
                r.group == group and r.version == version for r in self.store.resources.values()
            ):
                self.unknown.append(path)
            raise ApiError(404, "the server could not find the requested resource")
        name, part = [*rest[1:], "", ""][:2]
        if part not in ("", "status", "scale") or (part == "scale" and not resource.scale):
            self.unknown.append(path)
            raise ApiError(404, f"{resource.plural} have no {part} here")
        if part == "status" and not resource.status:
            raise ApiError(404, "the server could not find the requested resource")
        return _Target(resource, namespace, name, part)

    async def _object(self, request: web.Request) -> web.StreamResponse:
        target, query = self._target(request.path), request.query
        verb = _verb(request.method, bool(target.name), query.get("watch") in ("true", "1"))
        label = f"{target.resource.group}/{target.resource.plural}/{target.part}".strip("/")
        self._record(request, verb, label)
        if unknown := set(query) - _PARAMETERS - ({"force"} if verb == "patch" else set()):
            self.unknown.append(f"{verb} {label} {sorted(unknown)}")
            raise ApiError(400, f"the fake does not know {sorted(unknown)}")
        match = selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        if verb == "watch":
            return await self._watch(request, target, match)
        if verb == "list":
            return _json(self._list(request, target, match))
        body = await _body(request)
        result = self._write(request, verb, target, body, match)
        return _json(result, status=201 if verb == "create" else 200)

    def _write(
        self, request: web.Request, verb: str, target: _Target, body: Any, match: Matches
    ) -> Any:
        store, query = self.store, request.query
        resource, namespace, name = target.resource, target.namespace, target.name
        options = {"strict": query.get("fieldValidation") == "Strict",
                   "dry_run": query.get("dryRun") == "All"}  # fmt: skip
        match verb:
            case "get":
                result = store.get(resource, namespace, name)
            case "create":
                return store.create(resource, namespace, body, **options)
            case "update":
                result = store.replace(resource, namespace, name, body, target.part, **options)
            case "patch":
                if request.content_type == _SSA:
                    raise ApiError(415, "server-side apply is not served by this fake")
                media_type = request.content_type
                result = store.patch(
                    resource, namespace, name, body, media_type, target.part, **options
                )
            case "delete":
                merged = {**query, **(body or {})}
                result = store.delete(resource, namespace, name, merged)
                if "deletionTimestamp" not in result["metadata"]:
                    details = {
                        "name": name,
                        "kind": resource.plural,
                        "uid": result["metadata"]["uid"],
                    }
                    return {"kind": "Status", "apiVersion": "v1", "status": "Success",
                            "details": details}  # fmt: skip
            case _:
                for item in store.list(resource, namespace, match):
                    meta = item["metadata"]
                    store.delete(resource, meta.get("namespace", ""), meta["name"], body)
                return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return store.scale_of(resource, result) if target.part == "scale" else result

    def _list(self, request: web.Request, target: _Target, match: Matches) -> Object:
        items = self.store.list(target.resource, target.namespace, match)
        revision, meta = self.store.revision, {}
        if token := request.query.get("continue"):
            revision, *key = json.loads(base64.b64decode(token))
            if revision <= self.store.compacted:
                raise ApiError(410, "The provided continue parameter is too old")
            items = [item for item in items if _key(item) > key]
        limit = int(request.query.get("limit", 0))
        if limit and len(items) > limit:
            meta["remainingItemCount"] = len(items) - limit
            items = items[:limit]
            after = json.dumps([revision, *_key(items[-1])])
            meta["continue"] = base64.b64encode(after.encode()).decode()
        meta["resourceVersion"] = str(revision)
        kind = f"{target.resource.kind}List"
        return {"kind": kind, "apiVersion": target.resource.api_version, "metadata": meta,
                "items": items}  # fmt: skip

    # Watches
    async def _watch(  # noqa: PLR0912
        self, request: web.Request, target: _Target, match: Matches
    ) -> web.StreamResponse:
        query, store = request.query, self.store
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            async with asyncio.timeout(float(query.get("timeoutSeconds", 300))):
                revision = int(query.get("resourceVersion") or 0)
                initial = query.get("sendInitialEvents") in ("true", "1")
                if not revision or initial:
                    revision = store.revision
                    for item in store.list(target.resource, target.namespace, match):
                        await _event(response, "ADDED", item)
                    if initial:
                        await self._bookmark(response, target, revision, _INITIAL_END)
                while True:
                    if revision < store.compacted:
                        error = ApiError(410, f"too old resource version: {revision}")
                        await _event(response, "ERROR", error.status())
                        return response
                    changed = self._changed
                    for change in [c for c in store.history if c.revision > revision]:
                        if change.revision not in self._lost:
                            await _send(response, change, target, match)
                        revision = change.revision
                    if changed.is_set():
                        continue
                    try:
                        async with asyncio.timeout(self._bookmark_s):
                            await changed.wait()
                    except TimeoutError:
                        if bookmarks:
                            await self._bookmark(response, target, revision, {})
        except TimeoutError:
            return response
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            self._watches.discard(task)

    @staticmethod
    async def _bookmark(
        response: web.StreamResponse, target: _Target, revision: int, meta: dict[str, Any]
    ) -> None:
        resource = target.resource
        meta = {"resourceVersion": str(revision), "creationTimestamp": None, **meta}
        item = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta}
        await _event(response, "BOOKMARK", item)

    def _record(self, request: web.Request, verb: str, resource: str) -> None:
        media_type = request.content_type if request.can_read_body else ""
        agent = request.headers.get("User-Agent", "").split("/")[0].split()
        seen = SeenRequest(
            verb, resource, media_type, tuple(sorted(request.query)), (agent or [""])[0]
        )
        self.requests.append(seen)


def _json(body: Any, status: int = 200) -> web.Response:
    """Return a reply; its media type names no character set, as with real servers."""
    headers = {"Content-Type": "application/json"}
    return web.Response(body=json.dumps(body).encode(), status=status, headers=headers)


def _verb(method: str, named: bool, watched: bool) -> str:
    match method, named:
        case "GET", False:
            return "watch" if watched else "list"
        case "GET", True:
            return "watch" if watched else "get"
        case "POST", False:
            return "create"
        case "PUT", True:
            return "update"
        case "PATCH", True:
            return "patch"
        case "DELETE", _:
            return "delete" if named else "deletecollection"
    raise ApiError(405, f"{method} is not served here")


async def _body(request: web.Request) -> Any:
    text = await request.read()
    try:
        return json.loads(text) if text and request.content_type != _SSA else None
    except ValueError as error:
        raise ApiError(415, f"the fake reads JSON alone: {error}") from error


async def _send(
    response: web.StreamResponse, change: Change, target: _Target, match: Matches
) -> None:
    """Send a change as a watch with selectors sees it: objects enter and leave what it selects."""
    resource, item = target.resource, change.new or change.old
    assert item is not None
    meta = item["metadata"]
    other = target.namespace not in ("", meta.get("namespace", ""))
    if change.resource != (resource.group, resource.plural) or other:
        return
    if target.name and meta["name"] != target.name:
        return
    before = change.old is not None and match(change.old)
    after = change.new is not None and match(change.new)
    if before or after:
        kind = "MODIFIED" if before and after else "ADDED" if after else "DELETED"
        await _event(response, kind, item)


async def _event(response: web.StreamResponse, kind: str, item: Object) -> None:
    with contextlib.suppress(ConnectionResetError):
        await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")


def _key(item: Object) -> list[str]:
    return [item["metadata"].get("namespace", ""), item["metadata"]["name"]]
