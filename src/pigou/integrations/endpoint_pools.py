"""Pools of an endpoint picker: a watched file of endpoints, or the pods of an InferencePool.

A pool lists all its endpoints, at the start and after each change; `PoolFollower` adds and
drains members of the fleet until they match.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import parse_qsl, urlsplit

import msgspec

from pigou.background import Background, cancel, wait_for
from pigou.config import ConfigError, is_http_url
from pigou.fleet.config import AttachedWorker
from pigou.fleet.kubernetes.kubernetes_api import KubernetesApi, KubernetesError, account_api
from pigou.fleet.member import Member
from pigou.fleet.supervisor import Supervisor
from pigou.request import Role
from pigou.small_file import load_yaml, read_bytes
from pigou.wire.names import url_host

_log = logging.getLogger("pigou.epp")
#: Seconds between two looks at a file, and its bytes.
_LOOK_S, _MAX_FILE = 0.5, 4 << 20
#: Seconds between two lists of pods, however few events come; after an event; of one call.
_RELIST_S, _COALESCE_S, _CALL_S = 30.0, 0.1, 5.0
#: Labels of a pod's role, the first that it has, and what llm-d's values mean.
_ROLE_LABELS = ("pigou.dev/role", "pigou.dev/stock-role", "llm-d.ai/role")
_LLMD_ROLES = {"prefill-decode": Role.BOTH, "encode-prefill": Role.PREFILL,
               "encode-prefill-decode": Role.BOTH}  # fmt: skip
_ZONE, _RACK = "topology.kubernetes.io/zone", "topology.kubernetes.io/rack"

Apply = Callable[[Collection[AttachedWorker]], None]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class EndpointPool(Protocol):
    """Lists endpoints for a picker, beside those of `--attach` and `--registry`."""

    ready: bool  # False before the first list: nothing is picked

    async def follow(self, apply: Apply) -> None:
        """Call `apply` with all endpoints, at the start and after each change, until cancelled."""


def open_pool(text: str) -> EndpointPool:
    """Return the pool of a file's path, or of `k8s://NAMESPACE/POOL`. Raises ConfigError."""
    if text.startswith("k8s://"):
        return InferencePool.parse(text)
    if "://" in text or not text:
        raise ConfigError(
            f"pool is {text!r}; give a YAML or JSON file of endpoints, or k8s://NAMESPACE/POOL"
        )
    return FilePool(Path(text))


class PoolFollower:
    """Keeps the fleet's attached members as a pool lists them."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._members: dict[str, tuple[AttachedWorker, Member]] = {}  # by URL
        self._used: set[str] = set()  # ids of members, which are used once

    def apply(self, endpoints: Collection[AttachedWorker]) -> None:
        """Add members for new endpoints; drain those that are gone, or have changed."""
        wanted = {endpoint.url: endpoint for endpoint in endpoints}
        for url, (endpoint, member) in list(self._members.items()):
            if wanted.get(url) != endpoint:
                _log.info("%s has left the pool", member.id)
                del self._members[url]
                self._supervisor.drain(member)
        for url, endpoint in wanted.items():
            if url not in self._members:
                named = msgspec.structs.replace(endpoint, id=self._name(endpoint.id))
                member = self._supervisor.attached.adopt(named)
                self._members[url] = endpoint, member
                self._supervisor.add(member)
                _log.info("%s joins the pool at %s as %s", member.id, url, endpoint.role.value)

    def _name(self, id: str) -> str:
        number, name = 1, id
        while name in self._used or self._supervisor.member(name) is not None:
            number += 1
            name = f"{id}.{number}"
        self._used.add(name)
        return name


# --- a file -----------------------------------------------------------------------------------


class _Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An endpoint of a file; `key` and the rest are those of `--attach`."""

    url: str
    role: Role = Role.BOTH
    labels: dict[Literal["host", "rack", "zone"], str] = {}  # labels of its node
    key: str = ""
    events: str = ""
    replay: str = ""
    topic: str = ""


class FilePool:
    """Endpoints of a YAML or JSON file; a file that is not understood changes nothing."""

    def __init__(self, path: Path) -> None:
        """Read the file once. Raises ConfigError."""
        self._path, self.ready = path, False
        try:
            self._data = read_bytes(path, _MAX_FILE)
        except OSError as error:
            raise ConfigError(f"pool {path} cannot be read: {error.strerror or error}") from error
        self._endpoints = read_endpoints(self._data, str(path))

    async def follow(self, apply: Apply) -> None:
        """Call `apply` with the endpoints; the file is read twice a second."""
        apply(self._endpoints)
        self.ready = True
        complaint = ""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                data = await asyncio.to_thread(read_bytes, self._path, _MAX_FILE)
                if data == self._data:
                    complaint = ""
                    continue
                self._endpoints, self._data = read_endpoints(data, str(self._path)), data
            except (OSError, ConfigError) as error:
                if str(error) != complaint:
                    _log.error("the pool stays as it was: %s", error)
                complaint = str(error)
            else:
                apply(self._endpoints)


def read_endpoints(data: bytes, name: str) -> list[AttachedWorker]:
    """Return the endpoints of a file's bytes. Raises ConfigError, which names all bad entries."""
    try:
        root = load_yaml(data)
    except ValueError as error:
        raise ConfigError(f"{name} is no YAML or JSON that is understood: {error}") from error
    entries = root.get("endpoints") if isinstance(root, dict) else None
    if not isinstance(entries, list) or len(root) > 1:
        raise ConfigError(f"{name} needs one key, `endpoints`, with a list of {{url: http://..}}")
    workers: dict[str, AttachedWorker] = {}
    wrong = []
    for index, entry in enumerate(entries):
        try:
            worker = _worker(msgspec.convert(entry, _Endpoint))
            if worker.url in workers:
                raise ValueError(f"url {worker.url} is given again; give it once")
            workers[worker.url] = worker
        except ValueError as error:  # msgspec.ValidationError too
            wrong.append(f"endpoints[{index}]: {error}")
    if wrong:
        raise ConfigError(f"{name} has entries that are refused:\n  " + "\n  ".join(wrong))
    return list(workers.values())


def _worker(entry: _Endpoint) -> AttachedWorker:
    url = entry.url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url) if is_http_url(url) else None
    if parts is None or parts.query or parts.path or parts.username:
        raise ValueError(f"url is {entry.url!r}; write for example http://10.0.0.1:8000")
    if entry.labels and not entry.labels.get("host"):
        raise ValueError("labels have a rack or zone without a host; add host: NODE")
    return AttachedWorker(
        id=parts.netloc, url=url, role=entry.role, key=entry.key, events=entry.events,
        replay=entry.replay, topic=entry.topic, **entry.labels,
    )  # fmt: skip


# --- Kubernetes -------------------------------------------------------------------------------


class _Selector(msgspec.Struct, frozen=True):
    labels: Annotated[dict[str, str], msgspec.Meta(min_length=1)] = msgspec.field(
        name="matchLabels"
    )


class _TargetPort(msgspec.Struct, frozen=True):
    number: Port


class _PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of an InferencePool; the proxy reads the rest."""

    selector: _Selector
    ports: Annotated[tuple[_TargetPort, ...], msgspec.Meta(min_length=1, max_length=8)] = (
        msgspec.field(name="targetPorts")
    )
    protocol: Literal["http"] = msgspec.field(name="appProtocol", default="http")


class InferencePool:
    """Ready pods of an InferencePool: one endpoint for each pod and target port."""

    def __init__(
        self, api: KubernetesApi, namespace: str, name: str, events: int = 0, replay: int = 0
    ) -> None:
        """`events` and `replay` are ports of KV events; those of later target ports follow."""
        self._api, self._namespace, self._name = api, namespace, name
        self._events, self._replay, self.ready = events, replay, False
        self._wake = asyncio.Event()
        self._background = Background()

    @classmethod
    def parse(cls, text: str) -> InferencePool:
        """Return the pool of `k8s://NAMESPACE/POOL[?api=URL][&events=PORT][&replay=PORT]`."""
        parts = urlsplit(text)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        name = parts.path.strip("/")
        unknown = sorted(options.keys() - {"api", "events", "replay"})
        if unknown or not parts.netloc or not name or "/" in name:
            raise ConfigError(
                f"pool is {text!r}; write k8s://NAMESPACE/POOL, with api=URL, events=PORT and "
                "replay=PORT where they are needed"
            )
        ports = [options.get(key, "0") for key in ("events", "replay")]
        for port in ports:
            if not port.isdecimal() or not int(port) < 65536:
                raise ConfigError(f"pool has port {port!r} for events; it must be 1 to 65535")
        api = account_api(options.get("api", ""), _CALL_S)
        return cls(api, parts.netloc, name, *map(int, ports))

    async def follow(self, apply: Apply) -> None:
        """Call `apply` after events of the pool and its pods, and each 30 s."""
        watches: dict[str, asyncio.Task[None]] = {}  # by the selector that they watch
        complaint = ""
        try:
            watches[""] = self._background.start("pools", partial(self._watch, "InferencePool", ""))
            while True:
                self._wake.clear()
                try:
                    pool = await self._api.get("InferencePool", self._namespace, self._name)
                    spec = msgspec.convert(pool.get("spec"), _PoolSpec)
                    labels = spec.selector.labels.items()
                    selector = ",".join(f"{key}={value}" for key, value in labels)
                    if selector not in watches:
                        await cancel(*(watches.pop(old) for old in watches.keys() - {""}))
                        watch = partial(self._watch, "Pod", selector)
                        watches[selector] = self._background.start("pods", watch)
                    pods = await self._api.list("Pod", self._namespace, selector)
                    apply([worker for pod in pods for worker in self._workers(pod, spec)])
                    self.ready, complaint = True, ""
                except (KubernetesError, msgspec.ValidationError) as error:
                    if str(error) != complaint:
                        complaint = str(error)
                        _log.error("pool %s stays as it was: %s", self._name, error)
                await wait_for(self._wake, _RELIST_S if not complaint else 1.0)
                await asyncio.sleep(_COALESCE_S)
        finally:
            await cancel(*watches.values())
            await self._api.close()

    async def _watch(self, kind: str, selector: str) -> None:
        """Wake the reader after events; a watch that ends begins again after a second."""
        while True:
            try:
                async with aclosing(self._api.watch(kind, self._namespace, selector)) as events:
                    async for event in events:
                        if event is None or event.get("type") != "BOOKMARK":
                            self._wake.set()
            except KubernetesError as error:
                _log.info("the watch of %s ended: %s", kind, error)
                await asyncio.sleep(1.0)

    def _workers(self, pod: Mapping[str, Any], spec: _PoolSpec) -> list[AttachedWorker]:
        """Return the endpoints of a pod; none while it is not ready, or is being deleted."""
        meta, status = pod["metadata"], pod.get("status") or {}
        ready = any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        )
        address, labels = status.get("podIP"), meta.get("labels") or {}
        role = _role(labels)
        if not ready or "deletionTimestamp" in meta or not address or role is None:
            return []
        node = (pod.get("spec") or {}).get("nodeName") or ""
        host = url_host(address)
        return [
            AttachedWorker(
                id=meta["name"] if index == 0 else f"{meta['name']}-{port.number}",
                url=f"http://{host}:{port.number}", role=role, host=node,
                events=f"tcp://{host}:{self._events + index}" if self._events else "",
                replay=f"tcp://{host}:{self._replay + index}" if self._replay else "",
                rack=labels.get(_RACK, "") if node else "",
                zone=labels.get(_ZONE, "") if node else "",
            )
            for index, port in enumerate(spec.ports)
        ]  # fmt: skip


def _role(labels: Mapping[str, str]) -> Role | None:
    """Return a pod's role by its labels, by default both; None for one that serves no tokens."""
    text = next((labels[name] for name in _ROLE_LABELS if labels.get(name)), Role.BOTH.value)
    return Role(text) if text in list(Role) else _LLMD_ROLES.get(text)
