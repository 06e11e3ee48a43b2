"""Reads and writes of an API server: few calls, of the kinds of objects that fleets consist of."""

from __future__ import annotations

import os
import ssl
import tempfile
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from pigou import __version__
from pigou.config import ConfigError
from pigou.fleet.kubernetes.definitions import API_VERSION
from pigou.fleet.kubernetes.fleet_spec import KubernetesObject as Manifest
from pigou.small_file import read_text
from pigou.wire.bodies import MAX_LIST_BYTES, read_page
from pigou.wire.names import url_host

#: Kind -> API version and plural.
_KINDS = {
    "PigouFleet": (API_VERSION, "pigoufleets"),
    "PigouPool": (API_VERSION, "pigoupools"),
    "Deployment": ("apps/v1", "deployments"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "PodCliqueSet": ("grove.io/v1alpha1", "podcliquesets"),
    "Service": ("v1", "services"),
    "Node": ("v1", "nodes"),
    "Pod": ("v1", "pods"),
    "InferencePool": ("inference.networking.k8s.io/v1", "inferencepools"),
}
#: Seconds of a call; objects on a page of a list; seconds of one watch.
_CALL_S, _PAGE, _WATCH_S = 20.0, 500, 240
#: Bytes of an event of a watch (etcd holds objects of up to 1.5 MiB), and of an account's token.
_LINE, _TOKEN = 4 << 20, 1 << 20
_MERGE = "application/merge-patch+json"
#: An unknown field is an error of the write.
_STRICT = {"fieldValidation": "Strict"}
#: Where a pod finds its service account.
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubernetesError(Exception):
    """An API server refused a call with HTTP status `code`, or did not answer (0)."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"Kubernetes answered {code}: {message}" if code else message)
        self.code = code


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """How an API server is reached; `*_data` are PEM in base 64, as kubeconfig files have them."""

    server: str
    token: str = ""
    ca_path: str = ""
    ca_data: str = ""
    certificate_path: str = ""
    certificate_data: str = ""
    private_key_path: str = ""
    private_key_data: str = ""
    insecure: bool = False

    @classmethod
    def of(cls, info: Any) -> Self:
        """Return the connection of kopf's `ConnectionInfo`."""
        names = [name for name in cls.__struct_fields__ if name != "insecure"]
        values = {name: str(getattr(info, name, None) or "") for name in names}
        return cls(**values, insecure=bool(info.insecure))

    def tls(self) -> ssl.SSLContext | bool:
        """Return the TLS context; raises ConfigError for an unreadable certificate."""
        if self.insecure:
            return False
        authority = b64decode(self.ca_data).decode() if self.ca_data else None
        try:
            context = ssl.create_default_context(cafile=self.ca_path or None, cadata=authority)
            if self.certificate_data and self.private_key_data:
                with tempfile.NamedTemporaryFile() as file:
                    pem = (self.certificate_data, self.private_key_data)
                    file.write(b"\n".join(b64decode(part) for part in pem))
                    file.flush()
                    context.load_cert_chain(file.name)
            elif self.certificate_path:
                context.load_cert_chain(self.certificate_path, self.private_key_path or None)
        except (OSError, ValueError) as error:
            raise ConfigError(f"certificates of {self.server} cannot be read: {error}") from error
        return context


def account_api(server: str = "", call_s: float = _CALL_S) -> KubernetesApi:
    """Return the client of a pod's service account, else of `kubectl proxy`.

    An empty `server` means the cluster of this process; raises ConfigError outside one.
    """
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    if not server and not (host and port):
        raise ConfigError(
            "registry: this process runs in no pod, so that the API server is unknown; give it as "
            "k8s://NAMESPACE?api=URL (`kubectl proxy` serves one on http://127.0.0.1:8001)"
        )
    server = server or f"https://{url_host(host or '')}:{port}"

    def connect() -> Connection:
        authority, token = ACCOUNT / "ca.crt", ""
        with suppress(OSError, UnicodeDecodeError):
            token = read_text(ACCOUNT / "token", _TOKEN).strip()
        ca_path = str(authority) if authority.exists() else ""
        return Connection(server=server, token=token, ca_path=ca_path)

    return KubernetesApi(connect, call_s)


class KubernetesApi:
    """Client of an API server, within `async with`; calls raise `KubernetesError`.

    It calls `connect` again when a token has expired: service account tokens last an hour.
    """

    def __init__(self, connect: Callable[[], Connection], call_s: float = _CALL_S) -> None:
        self._connect, self._call_s = connect, call_s
        self._server = ""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; a further call makes others."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connection = self._connect()
            headers = {"user-agent": f"pigou/{__version__}"}
            if connection.token:
                headers["authorization"] = f"Bearer {connection.token}"
            self._server = connection.server.rstrip("/")
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=connection.tls()),
                timeout=aiohttp.ClientTimeout(total=self._call_s),
                headers=headers,
            )
        return self._session

    async def get(self, kind: str, namespace: str, name: str) -> Manifest:
        """Return an object. Raises KubernetesError, with code 404 where there is none."""
        item: Manifest = await self._call("GET", f"{_path(kind, namespace)}/{name}")
        return item

    async def list(self, kind: str, namespace: str = "", selector: str = "") -> list[Manifest]:
        """Return a namespace's objects (empty: of all) by label selector."""
        items: list[Manifest] = []
        query = {"limit": str(_PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._call("GET", _path(kind, namespace), query=query)
            named = {"apiVersion": _KINDS[kind][0], "kind": kind}
            listed = page.get("items") or ()
            items += [{**item, **named} if isinstance(item, dict) else item for item in listed]
            if not (more := (page.get("metadata") or {}).get("continue")):
                return items
            query["continue"] = more

    async def watch(self, kind: str, namespace: str, selector: str) -> AsyncGenerator[Any, None]:
        """Yield None once it watches objects, then their events, for some minutes."""
        path, query = _path(kind, namespace), {"labelSelector": selector}
        first = await self._call("GET", path, query={**query, "limit": "1"})
        query |= {
            "watch": "true", "timeoutSeconds": str(_WATCH_S), "allowWatchBookmarks": "true",
            "resourceVersion": first["metadata"]["resourceVersion"],
        }  # fmt: skip
        yield None
        timeout = aiohttp.ClientTimeout(sock_connect=self._call_s, sock_read=_WATCH_S + _CALL_S)
        try:
            async with self._open().get(
                self._server + path, params=query, timeout=timeout, read_bufsize=_LINE
            ) as response:
                if response.status >= 400:
                    text = await read_page(response)
                    raise KubernetesError(response.status, text.decode(errors="replace")[:500])
                async for line in response.content:
                    yield msgspec.json.decode(line)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise KubernetesError(0, f"the watch of {path} ended: {error!r}") from error

    async def create(self, manifest: Manifest) -> None:
        """Make an object, none of whose fields the server drops. Raises KubernetesError."""
        path = _path(manifest["kind"], manifest["metadata"]["namespace"])
        await self._call("POST", path, manifest, query=_STRICT)

    async def replace(self, manifest: Manifest) -> None:
        """Write a whole object; code 409 if it was changed since it was read."""
        await self._call("PUT", _path_of(manifest), manifest, query=_STRICT)

    async def patch(self, manifest: Manifest, part: str = "") -> None:
        """Change an object, or its `status` or `scale`, by a merge patch; code 409 as `replace`."""
        body = manifest if not part else {k: v for k, v in manifest.items() if k != "metadata"}
        path = f"{_path_of(manifest)}/{part}".rstrip("/")
        await self._call("PATCH", path, body, media_type=_MERGE)

    async def scale(self, item: Manifest, replicas: int) -> None:
        """Set the replicas of an object by its scale subresource; code 409 as `replace`."""
        meta = item["metadata"]
        keep = {name: meta[name] for name in ("name", "namespace", "resourceVersion")}
        body = {"metadata": keep, "spec": {"replicas": replicas}}
        await self._call("PATCH", f"{_path_of(item)}/scale", body, media_type=_MERGE)

    async def delete(self, manifest: Manifest) -> None:
        """Delete an object and its dependents, if it exists."""
        preconditions = {"uid": manifest["metadata"]["uid"]}
        body = {"propagationPolicy": "Background", "preconditions": preconditions}
        try:
            await self._call("DELETE", _path_of(manifest), body)
        except KubernetesError as error:
            if error.code != 404:
                raise

    async def serves(self, kind: str) -> bool:
        """Return whether the server has objects of a kind."""
        version, plural = _KINDS[kind]
        try:
            listed = await self._call("GET", f"/apis/{version}")
        except KubernetesError as error:
            if error.code == 404:
                return False
            raise
        return any(resource["name"] == plural for resource in listed["resources"])

    async def _call(
        self, method: str, path: str, body: Manifest | None = None, *,
        media_type: str = "application/json", query: dict[str, str] | None = None,
    ) -> Any:  # fmt: skip
        try:
            return await self._ask(method, path, body, media_type, query)
        except KubernetesError as error:
            if error.code != 401:
                raise
        await self.close()
        return await self._ask(method, path, body, media_type, query)

    async def _ask(
        self, method: str, path: str, body: Manifest | None, media_type: str,
        query: dict[str, str] | None,
    ) -> Any:  # fmt: skip
        session = self._open()
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": media_type}
        url = self._server + path
        try:
            async with session.request(
                method, url, data=data, headers=headers, params=query
            ) as response:
                text = await read_page(response, MAX_LIST_BYTES)
                if response.status >= 400:
                    raise KubernetesError(response.status, text.decode(errors="replace")[:500])
                return msgspec.json.decode(text)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            reason = f"{url} does not answer: {error or type(error).__name__}"
            raise KubernetesError(0, reason) from error


def _path_of(manifest: Manifest) -> str:
    meta = manifest["metadata"]
    return f"{_path(manifest['kind'], meta['namespace'])}/{meta['name']}"


def _path(kind: str, namespace: str) -> str:
    version, plural = _KINDS[kind]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"
