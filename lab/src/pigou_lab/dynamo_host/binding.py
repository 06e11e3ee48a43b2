"""The installed Dynamo, imported when it is asked for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any, Protocol, TypeAlias

#: (worker id, data-parallel rank, blocks of the prompt that it holds).
Placement: TypeAlias = tuple[int, int, int]

PACKAGE = "ai-dynamo-runtime"


class DynamoMissing(RuntimeError):
    """Dynamo cannot be imported here; names the package."""


class KvRouter(Protocol):
    """Used part of Dynamo's `dynamo.llm.KvRouter`."""

    def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, float] | None = None,
        **options: Any,
    ) -> Awaitable[Placement]:
        """Choose a worker for a prompt; with `request_id=` it also counts towards its load."""
        ...

    def generate(
        self,
        token_ids: Sequence[int],
        model: str,
        *,
        router_config_override: Mapping[str, float] | None = None,
        **options: Any,
    ) -> Awaitable[AsyncIterator[Any]]:
        """Route a prompt and stream the worker's answers."""
        ...

    def generate_from_request(
        self, request: Mapping[str, Any], **options: Any
    ) -> Awaitable[AsyncIterator[Any]]:
        """Route a preprocessed request and stream the worker's answers."""
        ...

    def get_potential_loads(self, token_ids: Sequence[int]) -> Awaitable[list[dict[str, int]]]:
        """Return every worker's load if it took this prompt."""
        ...


def load(module: str = "dynamo.llm") -> Any:
    """Import a module of Dynamo; raises DynamoMissing if it is absent or does not load."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DynamoMissing(
            f"{module} cannot be imported ({error}): install the packages {PACKAGE} and ai-dynamo "
            "in this environment, or run Pigou with the Python of the one that has them"
        ) from error


def version() -> str:
    """Return the version of the installed Dynamo; empty where its package is not recorded."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


def runtime(discovery: str = "file", requests: str = "tcp", events: str = "zmq") -> Any:
    """Return a `DistributedRuntime` on the running event loop; the caller shuts it down.

    Backends: `discovery` file (folder in `DYN_FILE_KV`), etcd, kubernetes or mem; `requests` tcp or
    nats; `events` zmq or nats. Raises DynamoMissing.
    """
    os.environ.setdefault("DYN_EVENT_PLANE", events)
    loop = asyncio.get_running_loop()
    return load("dynamo.runtime").DistributedRuntime(loop, discovery, requests, event_plane=events)


async def router(runtime: Any, endpoint: str, block_size: int, **config: Any) -> KvRouter:
    """Return Dynamo's router for `namespace.component.endpoint`; raises DynamoMissing."""
    llm = load()
    where = runtime.endpoint(endpoint)
    client = await where.client()
    await client.wait_for_instances()
    kv_router: KvRouter = llm.KvRouter(where, block_size, llm.KvRouterConfig(**config))
    return kv_router
