"""Records as annotations of Kubernetes pods: readiness, as the kubelet sees it, is the lease."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult, parse_qsl

import aiohttp
import msgspec

from pigou.config import ConfigError
from pigou.fleet.kubernetes.manifests import (
    DEPLOYMENT_VERSION,
    GPUS,
    MODEL,
    MODEL_NAME,
    STOCK_ROLE,
)
from pigou.fleet.registry.entry import KVShape, Topology, WorkerEntry, write_entry
from pigou.fleet.registry.record_store import Record, RegistryUnavailable, WriteConflict
from pigou.request import Role
from pigou.small_file import read_text
from pigou.wire.bodies import MAX_LIST_BYTES, read_page
from pigou.wire.names import url_host

#: Annotations of a pod: a worker's record, and the restarts of its containers at that time.
ENTRY, RESTARTS = "pigou.dev/entry", "pigou.dev/entry-restarts"
_ZONE, _RACK, _GPU = "topology.kubernetes.io/zone", "topology.kubernetes.io/rack", "nvidia.com/gpu"
#: Where a pod finds its service account.
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Seconds of a call; pods on a page of a list; seconds of one watch.
_CALL_S, _PAGE, _WATCH_S = 5.0, 500, 240
#: Bytes of an event of a watch: etcd holds objects of up to 1.5 MiB.
_LINE = 4 << 20
#: Bytes of an account's token.
_TOKEN = 1 << 20
_MERGE = "application/merge-patch+json"
_OPTIONS = ("selector", "port", "api")

Pod = dict[str, Any]


class KubernetesStore:
    """Pods of one namespace that a label selector matches; the key is the pod's name.

    A worker of Pigou writes its record into an annotation of its own pod. The record lives while
    the pod is ready, and until one of its containers restarts: nothing needs to be renewed. The
    entry of a stock engine's pod is made of its labels, `pigou.dev/stock-role` among them. The API
    server vouches for it: who may make pods here may read the fleet's secret, too.
    """

    def __init__(self, api: str, namespace: str, selector: str, port: int) -> None:
        self._pods = f"{api.rstrip('/')}/api/v1/namespaces/{namespace}/pods"
        self._selector = selector
        self._port = port  # of pods that do not register themselves
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, parts: SplitResult) -> Self:
        """Return the store of `k8s://NAMESPACE?selector=LABELS[&port=8000][&api=URL]`."""
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown or parts.path.strip("/"):
            raise ConfigError(
                f"registry: {unknown or parts.path!r} is not understood; write "
                "k8s://NAMESPACE?selector=LABELS, with port= and api= where they are needed"
            )
        port = options.get("port", "8000")
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"registry: port is {port!r}; it must be 1 to 65535")
        return cls(options.get("api") or api_server(), parts.netloc,
                   options.get("selector", ""), int(port))  # fmt: skip

    async def get(self, key: str) -> Record | None:
        """Return a live record; None where there is none."""
        pod = await self._pod(key)
        record = None if pod is None else self._record(pod)
        return record if isinstance(record, Record) else None

    async def records(self) -> Mapping[str, Record | str]:
        """Return all live records, and why a ready pod that should have one has none."""
        records: dict[str, Record | str] = {}
        query = {"limit": str(_PAGE)}
        while True:
            page = await self._list(**query)
            for pod in page.get("items") or ():
                record = self._record(pod)
                if record is not None:
                    records[_name(pod)] = record
            if not (more := (page.get("metadata") or {}).get("continue")):
                return records
            query["continue"] = more

    async def put(self, key: str, value: bytes, ttl_s: float, replaces: Record | None) -> None:  # noqa: ARG002
        """Write the annotation of a pod; its lease lasts while the pod is ready."""
        pod = await self._expected(key, replaces)
        wanted = {ENTRY: value.decode(), RESTARTS: str(_restarts(pod))}
        if wanted.items() - (pod["metadata"].get("annotations") or {}).items():
            await self._annotate(pod, wanted)

    async def renew(self, key: str, record: Record, ttl_s: float) -> None:  # noqa: ARG002
        """Check that a record is there: the kubelet's probes renew it."""
        await self._expected(key, record)

    async def delete(self, key: str, record: Record) -> None:
        """Remove the annotation, unless another record is there by now."""
        try:
            pod = await self._expected(key, record)
            await self._annotate(pod, {ENTRY: None, RESTARTS: None})
        except WriteConflict:
            return

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after changes of pods."""
        first = await self._list(limit="1")
        query = {
            "labelSelector": self._selector, "watch": "true", "timeoutSeconds": str(_WATCH_S),
            "resourceVersion": first["metadata"]["resourceVersion"],
            "allowWatchBookmarks": "true",
        }  # fmt: skip
        wake()
        timeout = aiohttp.ClientTimeout(sock_connect=_CALL_S, sock_read=_WATCH_S + _CALL_S)
        headers = _authorization()
        async with (
            self._calls() as session,
            session.get(
                self._pods, params=query, timeout=timeout, headers=headers, read_bufsize=_LINE
            ) as response,
        ):
            if response.status >= 400:
                await _body(response)
            async for line in response.content:
                kind = msgspec.json.decode(line)["type"]
                if kind == "ERROR":
                    break
                if kind != "BOOKMARK":
                    wake()
        raise RegistryUnavailable("Kubernetes ended the watch")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- within -------------------------------------------------------------------------------

    def _record(self, pod: Pod) -> Record | str | None:
        """Return the record of a pod; None where it is not ready or has none, else why not."""
        try:
            return self._parse(pod)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return f"the pod cannot be read: {error!r}"

    def _parse(self, pod: Pod) -> Record | None:
        meta, status = pod["metadata"], pod.get("status") or {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
        if conditions.get("Ready") != "True":
            return None
        annotations = meta.get("annotations") or {}
        if ENTRY in annotations:
            if annotations.get(RESTARTS) != str(_restarts(pod)):
                return None
            return Record(annotations[ENTRY].encode(), meta["uid"])
        entry = self._entry(pod)
        if entry is None:
            return None
        return Record(write_entry(entry, None), meta["uid"], vouched=True)

    def _entry(self, pod: Pod) -> WorkerEntry | None:
        """Return the entry of a pod whose worker does not register itself."""
        meta, spec = pod["metadata"], pod.get("spec") or {}
        address, labels = (pod.get("status") or {}).get("podIP"), meta.get("labels") or {}
        role = labels.get(STOCK_ROLE)
        if not address or role not in list(Role):
            return None
        annotations = meta.get("annotations") or {}
        leaving = "deletionTimestamp" in meta
        topology = Topology(
            host=spec.get("nodeName") or "", rack=labels.get(_RACK, ""),
            zone=labels.get(_ZONE, ""), gpus=_gpus(annotations, spec),
        )  # fmt: skip
        return WorkerEntry(
            worker=meta["name"], incarnation=meta["uid"], epoch=int(leaving), role=Role(role),
            model=annotations.get(MODEL_NAME) or labels.get(MODEL, ""),
            version=labels.get(DEPLOYMENT_VERSION, ""), shape=KVShape(), topology=topology,
            url=f"http://{url_host(address)}:{self._port}", draining=leaving,
        )  # fmt: skip

    async def _pod(self, key: str) -> Pod | None:
        async with (
            self._calls() as session,
            session.get(f"{self._pods}/{key}", headers=_authorization()) as response,
        ):
            return None if response.status == 404 else await _body(response)

    async def _expected(self, key: str, record: Record | None) -> Pod:
        """Return a pod, which still has the record that was read."""
        pod = await self._pod(key)
        if pod is None:
            raise RegistryUnavailable(
                f"there is no pod {key!r}; on Kubernetes --worker-id is the pod's name"
            )
        if self._record(pod) != record:
            raise WriteConflict(f"{key} was written meanwhile")
        return pod

    async def _annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        """Change annotations of a pod that nobody has changed since it was read."""
        meta = pod["metadata"]
        patch = {
            "metadata": {"annotations": annotations, "resourceVersion": meta["resourceVersion"]}
        }
        url, headers = f"{self._pods}/{meta['name']}", {"content-type": _MERGE, **_authorization()}
        data = msgspec.json.encode(patch)
        async with (
            self._calls() as session,
            session.patch(url, data=data, headers=headers) as response,
        ):
            if response.status in (404, 409):
                raise WriteConflict(f"{meta['name']} was written meanwhile")
            await _body(response)

    async def _list(self, **query: str) -> Any:
        query["labelSelector"] = self._selector
        async with (
            self._calls() as session,
            session.get(self._pods, params=query, headers=_authorization()) as response,
        ):
            return await _body(response)

    @asynccontextmanager
    async def _calls(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield a session; what it raises becomes the store's error."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_CALL_S),
                connector=aiohttp.TCPConnector(ssl=_tls()),
            )
        try:
            yield self._session
        except (
            aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, AttributeError
        ) as error:  # fmt: skip
            raise RegistryUnavailable(f"Kubernetes: {error or type(error).__name__}") from error


def api_server() -> str:
    """Return the URL of the API server of this process's cluster; raise ConfigError outside."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    if not host or not port:
        raise ConfigError(
            "registry: this process runs in no pod, so that the API server is unknown; give it as "
            "k8s://NAMESPACE?api=URL (`kubectl proxy` serves one on http://127.0.0.1:8001)"
        )
    return f"https://{url_host(host)}:{port}"


def _tls() -> ssl.SSLContext | bool:
    authority = ACCOUNT / "ca.crt"
    return ssl.create_default_context(cafile=authority) if authority.exists() else True


def _authorization() -> dict[str, str]:
    """Return the header that shows the pod's account, whose token is renewed now and then."""
    try:
        return {"authorization": f"Bearer {read_text(ACCOUNT / 'token', _TOKEN).strip()}"}
    except (OSError, UnicodeDecodeError):
        return {}


async def _body(response: aiohttp.ClientResponse) -> Any:
    if response.status >= 400:
        text = (await read_page(response))[:200].decode(errors="replace")
        raise RegistryUnavailable(f"Kubernetes answered {response.status}: {text}")
    return msgspec.json.decode(await read_page(response, MAX_LIST_BYTES))


def _name(pod: Any) -> str:
    try:
        return str(pod["metadata"]["name"])
    except (KeyError, TypeError):
        return "(a pod without a name)"


def _restarts(pod: Pod) -> int:
    """Return how often containers of a pod were started again."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return sum(status.get("restartCount", 0) for status in statuses)


def _gpus(annotations: Mapping[str, str], spec: Pod) -> int:
    """Return the GPUs of a worker as the operator notes them, or those of its pod's containers."""
    if (noted := annotations.get(GPUS, "")).isdecimal():
        return int(noted)
    limits = (
        (container.get("resources") or {}).get("limits") or {}
        for container in spec.get("containers") or ()
    )
    numbers = [str(limit.get(_GPU, "0")) for limit in limits]
    return sum(int(number) for number in numbers if number.isdecimal())
