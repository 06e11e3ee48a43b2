"""Reads and writes of an API server: few calls, of the kinds of objects that fleets consist of."""

from __future__ import annotations

import ssl
import tempfile
from base64 import b64decode
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from pigou import __version__
from pigou.config import ConfigError
from pigou.fleet.kubernetes.definitions import API_VERSION
from pigou.fleet.kubernetes.fleet_spec import KubernetesObject as Manifest
from pigou.wire.bodies import MAX_LIST_BYTES, read_page

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
}
_CALL_S, _PAGE = 20.0, 500
_MERGE = "application/merge-patch+json"
#: An unknown field is an error of the write.
_STRICT = {"fieldValidation": "Strict"}


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
    key_path: str = ""
    key_data: str = ""
    insecure: bool = False

    @classmethod
    def of(cls, info: Any) -> Self:
        """Return the connection of kopf's `ConnectionInfo`."""
        names = (
            ("server", "server"), ("token", "token"), ("ca_path", "ca_path"),
            ("ca_data", "ca_data"), ("certificate_path", "certificate_path"),
            ("certificate_data", "certificate_data"), ("key_path", "private_key_path"),
            ("key_data", "private_key_data"),
        )  # fmt: skip
        values = {name: str(getattr(info, theirs, None) or "") for name, theirs in names}
        return cls(**values, insecure=bool(info.insecure))

    def tls(self) -> ssl.SSLContext | bool:
        """Return what secures the connection. Raises ConfigError: a certificate cannot be read."""
        if self.insecure:
            return False
        authority = b64decode(self.ca_data).decode() if self.ca_data else None
        try:
            context = ssl.create_default_context(cafile=self.ca_path or None, cadata=authority)
            if self.certificate_data and self.key_data:
                with tempfile.NamedTemporaryFile() as file:
                    pem = (self.certificate_data, self.key_data)
                    file.write(b"\n".join(b64decode(part) for part in pem))
                    file.flush()
                    context.load_cert_chain(file.name)
            elif self.certificate_path:
                context.load_cert_chain(self.certificate_path, self.key_path or None)
        except (OSError, ValueError) as error:
            raise ConfigError(f"certificates of {self.server} cannot be read: {error}") from error
        return context


class KubernetesApi:
    """An API server's client; `async with` opens and closes it."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        """Take what says where the server is; it is asked again when a token has expired."""
        self._connect = connect
        self._server = ""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the session."""
        self._open()
        return self

    def _open(self) -> None:
        connection = self._connect()
        headers = {"user-agent": f"pigou/{__version__}"}
        if connection.token:
            headers["authorization"] = f"Bearer {connection.token}"
        self._server = connection.server.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=connection.tls()),
            timeout=aiohttp.ClientTimeout(total=_CALL_S),
            headers=headers,
        )

    async def _renew(self) -> None:
        """Open another session, with the token as it is now: service accounts' last an hour."""
        assert self._session is not None
        await self._session.close()
        self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the session."""
        assert self._session is not None
        await self._session.close()

    async def get(self, kind: str, namespace: str, name: str) -> Manifest:
        """Return an object. Raises KubernetesError, with code 404 where there is none."""
        item: Manifest = await self._call("GET", f"{_path(kind, namespace)}/{name}")
        return item

    async def list(self, kind: str, namespace: str = "", selector: str = "") -> list[Manifest]:
        """Return the objects of a namespace (empty: of all) that a label selector matches."""
        items: list[Manifest] = []
        query = {"limit": str(_PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._call("GET", _path(kind, namespace), query=query)
            named = {"apiVersion": _KINDS[kind][0], "kind": kind}
            items += [{**item, **named} for item in page["items"]]
            if not (more := (page.get("metadata") or {}).get("continue")):
                return items
            query["continue"] = more

    async def create(self, manifest: Manifest) -> None:
        """Make an object, none of whose fields the server drops. Raises KubernetesError."""
        path = _path(manifest["kind"], manifest["metadata"]["namespace"])
        await self._call("POST", path, manifest, query=_STRICT)

    async def replace(self, manifest: Manifest) -> None:
        """Write a whole object; code 409 where somebody else changed it since it was read."""
        meta = manifest["metadata"]
        path = f"{_path(manifest['kind'], meta['namespace'])}/{meta['name']}"
        await self._call("PUT", path, manifest, query=_STRICT)

    async def patch(self, manifest: Manifest, part: str = "") -> None:
        """Change an object, or its `status` or `scale`, by a merge patch; code 409 as `replace`."""
        meta = manifest["metadata"]
        path = f"{_path(manifest['kind'], meta['namespace'])}/{meta['name']}"
        body = manifest if not part else {k: v for k, v in manifest.items() if k != "metadata"}
        await self._call("PATCH", f"{path}/{part}".rstrip("/"), body, media_type=_MERGE)

    async def scale(self, item: Manifest, replicas: int) -> None:
        """Set the replicas of an object by its scale subresource; code 409 as `replace`."""
        meta = item["metadata"]
        path = f"{_path(item['kind'], meta['namespace'])}/{meta['name']}/scale"
        keep = {name: meta[name] for name in ("name", "namespace", "resourceVersion")}
        body = {"metadata": keep, "spec": {"replicas": replicas}}
        await self._call("PATCH", path, body, media_type=_MERGE)

    async def delete(self, manifest: Manifest) -> None:
        """Delete an object, and what it owns; one that is gone is no error."""
        meta = manifest["metadata"]
        path = f"{_path(manifest['kind'], meta['namespace'])}/{meta['name']}"
        body = {"propagationPolicy": "Background", "preconditions": {"uid": meta["uid"]}}
        try:
            await self._call("DELETE", path, body)
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
        await self._renew()
        return await self._ask(method, path, body, media_type, query)

    async def _ask(
        self, method: str, path: str, body: Manifest | None, media_type: str,
        query: dict[str, str] | None,
    ) -> Any:  # fmt: skip
        assert self._session is not None, "the client is not open"
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": media_type}
        url = self._server + path
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, params=query
            ) as response:
                text = await read_page(response, MAX_LIST_BYTES)
                if response.status >= 400:
                    raise KubernetesError(response.status, text.decode(errors="replace")[:500])
                return msgspec.json.decode(text)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            reason = f"{url} does not answer: {error or type(error).__name__}"
            raise KubernetesError(0, reason) from error


def _path(kind: str, namespace: str) -> str:
    version, plural = _KINDS[kind]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"
