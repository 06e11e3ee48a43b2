"""Small fakes of vLLM's types, under its module names, where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType
from typing import Any

OFFLOAD = "vllm.v1.kv_offload"


class ChunkStatus:
    def __init__(self, chunk_id: int) -> None:
        self.ref_cnt, self.chunk_id = -1, chunk_id

    @property
    def is_ready(self) -> bool:
        return self.ref_cnt >= 0


class CachePolicy(ABC):
    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity

    @abstractmethod
    def get(self, key: bytes) -> Any: ...
    @abstractmethod
    def insert(self, key: bytes, chunk: Any) -> None: ...
    @abstractmethod
    def remove(self, key: bytes) -> None: ...
    @abstractmethod
    def touch(self, keys: Any, req_context: Any) -> None: ...
    @abstractmethod
    def evict(self, n: int, protected: set[bytes]) -> Any: ...
    @abstractmethod
    def clear(self) -> None: ...
    def mark_evictable(self, key: bytes) -> None:  # noqa: B027
        pass

    def mark_non_evictable(self, key: bytes) -> None:  # noqa: B027
        pass


@dataclass
class ReqContext:
    req_id: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    _state: dict[type, Any] = field(default_factory=dict)
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict)

    def set_state(self, val: Any) -> None:
        self._state[type(val)] = val

    def get_state(self, cls: type) -> Any:
        return self._state.get(cls)

    def set_offload_key_position(self, key: bytes, end_token: int) -> None:
        self._offload_key_positions[key] = end_token

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._offload_key_positions.get(key)


class LookupResult(Enum):
    MISS, HIT, HIT_PENDING, RETRY = auto(), auto(), auto(), auto()


class Medium(Enum):
    CPU, STORAGE = "CPU", "STORAGE"


class Locality(Enum):
    LOCAL, REMOTE = "LOCAL", "REMOTE"


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass(frozen=True)
class Metadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: ReqContext


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:  # fmt: skip
        assert primary_kv_view.strides is not None
        self._offloading_spec, self._primary_kv_view = offloading_spec, primary_kv_view
        self._block_size_bytes, self.tier_type = primary_kv_view.strides[0], tier_type
        self.locality: Any = None
        self.bp_detector = backpressure_detector


class Stats:
    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}

    def increase_counter(self, name: str, value: float, labelvalues: tuple[str, ...] = ()) -> None:
        self.values[name, labelvalues] = self.values.get((name, labelvalues), 0) + value

    def set_gauge(self, name: str, value: float, labelvalues: tuple[str, ...] = ()) -> None:
        self.values[name, labelvalues] = value


class CPUOffloadingManager:
    """What vLLM's manager of that name asks of a policy, in its order."""

    def __init__(self, num_chunks: int, policy: Any) -> None:
        self._policy, self._free = policy, list(range(num_chunks))[::-1]

    def on_new_request(self, ctx: ReqContext) -> None:
        ctx._state["seen"], ctx._state["new"], ctx._state["reused"] = [], set(), set()  # type: ignore[index]

    def lookup(self, key: bytes, ctx: ReqContext) -> LookupResult:
        chunk = self._policy.get(key)
        if chunk is None:
            return LookupResult.MISS
        return LookupResult.HIT if chunk.is_ready else LookupResult.HIT_PENDING

    def _note(self, kind: str, keys: Iterable[bytes], ctx: ReqContext) -> None:
        state: dict[Any, Any] = ctx._state
        if "seen" not in state:
            self.on_new_request(ctx)
        for key in keys:
            if key not in state["seen"]:
                state["seen"].append(key)
            if kind and (kind == "new" or key not in state["new"]):
                state[kind].add(key)

    def prepare_load(self, keys: list[bytes], ctx: ReqContext) -> Any:
        for key in keys:
            chunk = self._policy.get(key)
            if chunk.ref_cnt == 0:
                self._policy.mark_non_evictable(key)
            chunk.ref_cnt += 1
        self._note("reused", keys, ctx)
        return [self._policy.get(key).chunk_id for key in keys]

    def complete_load(self, keys: list[bytes], ctx: ReqContext) -> None:
        for key in keys:
            chunk = self._policy.get(key)
            chunk.ref_cnt -= 1
            if chunk.ref_cnt == 0:
                self._policy.mark_evictable(key)

    def prepare_store(self, keys: list[bytes], ctx: ReqContext) -> Any:
        held = {key: self._policy.get(key) for key in keys}
        missed = [key for key in keys if held[key] is None]
        if missed:
            self._policy.on_store_miss(missed, ctx)
        self._note("reused", [k for k in keys if held[k] is not None and held[k].is_ready], ctx)
        evicted = []
        if len(missed) > len(self._free):
            found = self._policy.evict(len(missed) - len(self._free), set(keys))
            if found is None:
                return None
            evicted = [key for key, _ in found]
            self._free += [chunk.chunk_id for _, chunk in found]
        for key in missed:
            self._policy.insert(key, ChunkStatus(self._free.pop()))
        self._note("new", missed, ctx)
        return Stored(missed, evicted)

    def complete_store(self, keys: Iterable[bytes], ctx: ReqContext, success: bool = True) -> None:
        for key in keys:
            chunk = self._policy.get(key)
            if chunk is None or chunk.is_ready:
                continue
            if success:
                chunk.ref_cnt = 0
                self._policy.mark_evictable(key)
            else:
                self._policy.remove(key)
                self._free.append(chunk.chunk_id)

    def on_request_finished(self, ctx: ReqContext) -> None:
        state: dict[Any, Any] = ctx._state
        keys = sorted(state["seen"], key=lambda key: ctx.get_offload_key_position(key) or 0)
        self._policy.on_request_finished(
            (tuple(keys),), state["new"] - state["reused"], state["reused"], ctx
        )

    def reset_cache(self) -> None:
        self._policy.clear()


@dataclass
class Stored:
    keys_to_store: list[bytes]
    evicted_keys: list[bytes]


def install() -> None:
    """Put the fakes where vLLM's modules would be, unless vLLM is installed."""
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is not None:
        return
    named = {
        f"{OFFLOAD}.base": {
            "OffloadKey": bytes, "ReqContext": ReqContext, "LookupResult": LookupResult,
            "Medium": Medium, "Locality": Locality, "OffloadingMetricMetadata": Metadata,
            "RequestOffloadingContext": RequestOffloadingContext,
            "OffloadingCounterMetadata": Metadata, "OffloadingGaugeMetadata": Metadata,
        },
        f"{OFFLOAD}.cpu.policies.base": {"CachePolicy": CachePolicy, "ChunkStatus": ChunkStatus},
        f"{OFFLOAD}.tiering.base": {
            "JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager,
            "TransferJob": TransferJob,
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
            "OffloadingConnectorStats": Stats
        },
    }  # fmt: skip
    for name, members in named.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        for member, value in members.items():
            if not hasattr(sys.modules[name], member):
                setattr(sys.modules[name], member, value)
