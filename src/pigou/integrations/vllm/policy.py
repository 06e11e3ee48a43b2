"""`PigouPolicy`: price-based eviction in vLLM's CPU tier of KV chunks.

```
"kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240,
  "eviction_policy": "PigouPolicy", "cache_policy_module_path": "pigou.integrations.vllm.policy"}
```
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from pigou.kv.tenure import salt_expiry
from pigou.kv.tier_eviction.reuse import AT_ONCE, ReuseModel, age_bin, use_class
from pigou.request import NEVER

SEAM = "vllm 0.32"  # engine version that this was written against
log = logging.getLogger("vllm.pigou")
_EXPIRED = f"tenure1:{0:064}:1"  # salt of an expired tenure
GROUP_BYTES = 4  # size of the KV cache group at a key's end
_MAX_ABSENT, _ABSENT = 262_144, 16  # absent chunks remembered; the same per chunk of capacity


def salt_of(context: ReqContext) -> tuple[str, int]:
    """Return the `cache_salt` in `kv_transfer_params`, and its expiry in ns since 1970."""
    salt = str((context.kv_transfer_params or {}).get("cache_salt") or "")
    try:
        return salt, salt_expiry(salt)
    except ValueError:  # a malformed tenure
        return _EXPIRED, 1


class _CachedChunk:
    """A chunk held, or an absent one (`status` is None) whose uses are remembered."""

    __slots__ = (
        "end", "expiry", "key", "kids", "last", "rank", "slot", "stamp", "status", "up", "uses",
    )  # fmt: skip

    def __init__(self, key: OffloadKey) -> None:
        self.key = key
        self.status: ChunkStatus | None = None
        self.uses = 0
        self.last = -AT_ONCE  # last use, in nanoseconds
        self.end = 0  # position of its last token in the prompt; 0 if unknown
        self.expiry = NEVER
        self.up: _CachedChunk | None = None  # the chunk before it in its prompt
        self.kids = 0  # held chunks after it
        self.rank = 0.0
        self.stamp = 0  # number of its current heap item; 0 for none
        self.slot = 0  # index among the held chunks

    @property
    def free(self) -> bool:
        return self.status is not None and self.kids == 0 and self.status.ref_cnt == 0


class _Tails(dict[bytes, _CachedChunk]):
    """The last chunk seen of each KV cache group, kept in a request's context."""


class PigouPolicy(CachePolicy):
    """Evicts the chunk of least value, last chunks of prompts first.

        value = rate(uses, age) * (1 + 0.5 * end / attention_tokens)

    The rate is learned (`ReuseModel`); the other factor is the mean prefill time of a token up to
    `end`, in times of the first one's. Set other constants in a subclass, loaded by its own path.
    """

    #: Position at which a token's attention takes as long as its matrix products.
    attention_tokens: ClassVar[int] = 32_768
    sweep: ClassVar[int] = 4  # held chunks valued again for each one evicted
    clock: Callable[[], int] = staticmethod(time.time_ns)  # nanoseconds since 1970

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()
        log.info("PigouPolicy (%s): %d chunks, price-based eviction", SEAM, cache_capacity)

    def clear(self) -> None:
        """Forget all chunks and all that was learned."""
        self._chunks: dict[OffloadKey, _CachedChunk] = {}
        self._order: list[_CachedChunk] = []
        self._absent: OrderedDict[OffloadKey, _CachedChunk] = OrderedDict()
        self._heap: list[tuple[float, int, _CachedChunk]] = []
        self._stamp = self._hand = 0
        self.reuse = ReuseModel(sample=4, prior=20.0, decay=0.98, followed=8192)

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return a held chunk."""
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.status

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None,  # noqa: ARG002
    ) -> None:  # fmt: skip
        """Hold a chunk; vLLM 0.33 gives the context too."""
        held = self._absent.pop(key, None)
        if held is None:
            held = _CachedChunk(key)
            held.uses, held.last = 1, self.clock()
        held.status, held.slot = chunk, len(self._order)
        self._chunks[key] = held
        self._order.append(held)
        if held.up is not None:
            held.up.kids += 1
        self._offer(held, self.clock())

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk whose store failed."""
        chunk = self._chunks[key]
        self._release_parent(chunk, self.clock())
        self._forget(chunk)

    def _forget(self, chunk: _CachedChunk) -> ChunkStatus:
        status = self._chunks.pop(chunk.key).status
        assert status is not None
        last = self._order.pop()
        if last is not chunk:
            self._order[chunk.slot] = last
            last.slot = chunk.slot
        chunk.status, chunk.stamp = None, 0
        self._remember(chunk)
        return status

    def _remember(self, chunk: _CachedChunk) -> None:
        self._absent[chunk.key] = chunk
        if len(self._absent) > min(_MAX_ABSENT, _ABSENT * self.cache_capacity):
            self._absent.popitem(last=False)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Record a use of chunks not held, with their position in the prompt."""
        now = self.clock()
        missed = [key for key in keys if key not in self._chunks]
        positions = {key: req_context.get_offload_key_position(key) or 0 for key in missed}
        _, expiry = salt_of(req_context)
        tails = req_context.get_state(_Tails) or _Tails()
        req_context.set_state(tails)
        for key in sorted(positions, key=positions.__getitem__):
            chunk = self._absent.pop(key, None) or _CachedChunk(key)
            chunk.end, chunk.expiry = positions[key] or chunk.end, expiry
            before = tails.get(key[-GROUP_BYTES:])
            if before is not None and before.end < chunk.end:
                chunk.up = before
            tails[key[-GROUP_BYTES:]] = chunk
            self._use(chunk, now)
            self._remember(chunk)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Record a use of chunks of one prompt."""
        del req_context
        held = list(keys)
        self._use_prompt(held, set(held), self.clock())

    def on_request_finished(
        self, key_groups: Sequence[Sequence[OffloadKey]], insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey], req_context: ReqContext,
    ) -> None:  # fmt: skip
        """Record a request's uses: an age counts from its end."""
        del insertion_only_keys, req_context
        now = self.clock()
        for keys in key_groups:
            self._use_prompt(keys, reused_keys, now)

    def _use_prompt(self, keys: Sequence[OffloadKey], reused: set[OffloadKey], now: int) -> None:
        above: _CachedChunk | None = None
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                continue
            lost = chunk.up is None or chunk.up.status is None
            if lost and above is not None and above.end < chunk.end:
                if chunk.up is not None:
                    chunk.up.kids -= 1
                chunk.up = above
                above.kids += 1
            if key in reused:
                self._use(chunk, now)
            chunk.last = now
            above = chunk
        for key in reversed(keys):
            if (chunk := self._chunks.get(key)) is not None:
                self._offer(chunk, now)

    def _use(self, chunk: _CachedChunk, now: int) -> None:
        chunk.uses += now - chunk.last >= AT_ONCE
        chunk.last = now
        if not chunk.key[-GROUP_BYTES - 1] & self.reuse.mask:
            self.reuse.use(chunk.key[:-GROUP_BYTES], now)

    def mark_evictable(self, key: OffloadKey) -> None:
        """Consider a chunk whose last transfer ended."""
        self._offer(self._chunks[key], self.clock())

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict exactly n chunks of least value; None, changing nothing, if n are not free."""
        now = self.clock()
        self._revalue(n, now)
        taken: list[_CachedChunk] = []
        passed: list[_CachedChunk] = []
        while len(taken) < n and (chunk := self._cheapest(now)) is not None:
            chunk.stamp = 0
            if chunk.key in protected:
                passed.append(chunk)
            else:
                taken.append(chunk)
                self._release_parent(chunk, now)
        if enough := len(taken) == n:
            evicted = [(chunk.key, self._forget(chunk)) for chunk in taken]
        else:
            for chunk in taken:
                if chunk.up is not None:
                    chunk.up.kids += 1
            passed += taken
        for chunk in passed:
            self._offer(chunk, now)
        return evicted if enough else None

    def _cheapest(self, now: int) -> _CachedChunk | None:
        heap = self._heap
        while heap:
            rank, stamp, chunk = heapq.heappop(heap)
            if chunk.stamp != stamp or not chunk.free:
                continue
            if self._value(chunk, now) <= rank:
                return chunk
            self._offer(chunk, now)
        return None

    def _release_parent(self, chunk: _CachedChunk, now: int) -> None:
        if chunk.up is not None:
            chunk.up.kids -= 1
            self._offer(chunk.up, now)

    def _revalue(self, n: int, now: int) -> None:
        """Value some held chunks again, in turns: values fall with age, which no heap notices."""
        order = self._order
        for _ in range(min(self.sweep * n, len(order))):
            self._hand = (self._hand + 1) % len(order)
            chunk = order[self._hand]
            if chunk.free and self._value(chunk, now) != chunk.rank:
                self._offer(chunk, now)
        if len(self._heap) > 4 * len(order) + 64:
            self._heap = [item for item in self._heap if item[2].stamp == item[1]]
            heapq.heapify(self._heap)

    def _offer(self, chunk: _CachedChunk, now: int) -> None:
        """Rank a chunk for eviction if it is free."""
        if chunk.free:
            self._stamp += 1
            chunk.stamp, chunk.rank = self._stamp, self._value(chunk, now)
            heapq.heappush(self._heap, (chunk.rank, chunk.stamp, chunk))

    def _value(self, chunk: _CachedChunk, now: int) -> float:
        if chunk.expiry <= now:
            return 0.0
        rate = self.reuse.rates[use_class(chunk.uses)][age_bin(now - chunk.last)]
        return rate * (1.0 + 0.5 * chunk.end / self.attention_tokens)
