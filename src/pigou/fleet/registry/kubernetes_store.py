"""Records as annotations of Kubernetes pods: readiness, as the kubelet sees it, is the lease."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self
from urllib.parse import SplitResult, parse_qsl

from pigou.config import ConfigError
from pigou.fleet.kubernetes.kubernetes_api import KubernetesApi, KubernetesError, account_api
from pigou.fleet.kubernetes.manifests import DEPLOYMENT_VERSION, GPUS, MODEL, MODEL_NAME, STOCK_ROLE
from pigou.fleet.registry.entry import KVShape, Topology, WorkerEntry, write_entry
from pigou.fleet.registry.record_store import Record, RegistryUnavailable, WriteConflict
from pigou.request import Role
from pigou.wire.names import url_host

#: Annotations of a pod: a worker's record, and the restarts of its containers at that time.
ENTRY, RESTARTS = "pigou.dev/entry", "pigou.dev/entry-restarts"
_ZONE, _RACK, _GPU = "topology.kubernetes.io/zone", "topology.kubernetes.io/rack", "nvidia.com/gpu"
_CALL_S = 5.0
_OPTIONS = ("selector", "port", "api")

Pod = dict[str, Any]


class KubernetesStore:
    """Pods of one namespace that a label selector matches; the key is the pod's name.

    A Pigou worker annotates its own pod; the record lives while the pod is ready and its containers
    do not restart. Labels make the entry of a stock engine's pod (`pigou.dev/stock-role`).
    """

    def __init__(self, api: KubernetesApi, namespace: str, selector: str, port: int) -> None:
        self._api, self._namespace, self._selector = api, namespace, selector
        self._port = port  # port of pods that do not register themselves

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
        api = account_api(options.get("api", ""), _CALL_S)
        return cls(api, parts.netloc, options.get("selector", ""), int(port))

    async def get(self, key: str) -> Record | None:
        """Return a live record; None where there is none."""
        pod = await self._pod(key)
        record = None if pod is None else self._record(pod)
        return record if isinstance(record, Record) else None

    async def records(self) -> Mapping[str, Record | str]:
        """Return live records, and reasons for ready pods without one."""
        async with _calls():
            pods = await self._api.list("Pod", self._namespace, self._selector)
        records = {_name(pod): self._record(pod) for pod in pods}
        return {name: record for name, record in records.items() if record is not None}

    async def put(self, key: str, value: bytes, ttl_s: float, replaces: Record | None) -> None:  # noqa: ARG002
        """Write the annotation of a pod; its lease lasts while the pod is ready."""
        pod = await self._expected(key, replaces)
        wanted = {ENTRY: value.decode(), RESTARTS: str(_restarts(pod))}
        if wanted.items() - (pod["metadata"].get("annotations") or {}).items():
            await self._annotate(pod, wanted)

    async def renew(self, key: str, record: Record, ttl_s: float) -> None:  # noqa: ARG002
        """Check that a record exists: the kubelet's probes renew it."""
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
        events = self._api.watch("Pod", self._namespace, self._selector)
        async with _calls(), aclosing(events):
            async for event in events:
                kind = "" if event is None else event["type"]
                if kind == "ERROR":
                    break
                if kind != "BOOKMARK":
                    wake()
        raise RegistryUnavailable("Kubernetes ended the watch")

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

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
        async with _calls():
            try:
                return await self._api.get("Pod", self._namespace, key)
            except KubernetesError as error:
                if error.code != 404:
                    raise
        return None

    async def _expected(self, key: str, record: Record | None) -> Pod:
        """Return a pod whose record is unchanged."""
        pod = await self._pod(key)
        if pod is None:
            raise RegistryUnavailable(
                f"there is no pod {key!r}; on Kubernetes --worker-id is the pod's name"
            )
        if self._record(pod) != record:
            raise WriteConflict(f"{key} was written meanwhile")
        return pod

    async def _annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        """Patch a pod's annotations if it is unchanged."""
        meta = pod["metadata"]
        keep = {name: meta[name] for name in ("name", "namespace", "resourceVersion")}
        changed = {"kind": "Pod", "metadata": {**keep, "annotations": annotations}}
        async with _calls():
            try:
                await self._api.patch(changed)
            except KubernetesError as error:
                if error.code not in (404, 409):
                    raise
                raise WriteConflict(f"{meta['name']} was written meanwhile") from error


@asynccontextmanager
async def _calls() -> AsyncIterator[None]:
    """Convert the client's errors into the store's."""
    try:
        yield
    except (KubernetesError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RegistryUnavailable(str(error) or type(error).__name__) from error


def _name(pod: Any) -> str:
    try:
        return str(pod["metadata"]["name"])
    except (KeyError, TypeError):
        return "(a pod without a name)"


def _restarts(pod: Pod) -> int:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return sum(status.get("restartCount", 0) for status in statuses)


def _gpus(annotations: Mapping[str, str], spec: Pod) -> int:
    """Return a worker's GPUs, by the operator's note or its containers."""
    if (noted := annotations.get(GPUS, "")).isdecimal():
        return int(noted)
    limits = (
        (container.get("resources") or {}).get("limits") or {}
        for container in spec.get("containers") or ()
    )
    numbers = [str(limit.get(_GPU, "0")) for limit in limits]
    return sum(int(number) for number in numbers if number.isdecimal())
