"""`PigouTier`: Pigou's disk and object tiers under vLLM's CPU tier.

```
"secondary_tiers": [{"type": "PigouTier", "module_path": "pigou.integrations.vllm.tier",
  "tiers": ["disk=100GiB@/var/cache/pigou"], "prefill_tokens_per_s": 8000}]
```
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import takewhile
from queue import SimpleQueue
from typing import Any, ClassVar

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from pigou.config import ConfigError, check_fields, wrong
from pigou.integrations.vllm.policy import GROUP_BYTES, SEAM, PigouPolicy, salt_of
from pigou.kv.tier_config import uri_below
from pigou.request import Ints
from pigou.runtime.stores.page_store import Page, PageStore
from pigou.runtime.stores.store import Bools

log = logging.getLogger("vllm.pigou")
_PREFIX = "vllm:kv_offload_pigou_"
#: Gauges by tier, figures of `PageStore.stats`, and the seconds between readings.
_GAUGES = {
    "pages": "Chunks held in a tier of Pigou's store.",
    "used_bytes": "Bytes held in a tier of Pigou's store.",
    "price": "Price of a byte of a tier, in seconds of prefill per second.",
    "up": "1 if the medium of a tier of Pigou's store works.",
}
_GAUGES_S = 1.0
_COUNTERS = {
    "not_worth_reading": "Lookups of chunks that are held, but sooner computed than read.",
    "refused": "Chunks refused because the queue of transfers is full.",
    "failed": "Chunks lost or altered when read, and therefore computed.",
}


class TierParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `PigouTier`, beside vLLM's own."""

    tiers: list[str]  # nearest first, as NAME=SIZE@PLACE
    prefill_tokens_per_s: float = 0.0  # speed of one prompt; 0 reads all that is held
    release: str = ""  # version of weights and settings that the model's name does not tell
    queue_chunks: int = 0  # maximum in transfer each way; 0 for a quarter of the CPU tier
    quotas: dict[str, int] = {}  # bytes by `cache_salt`
    default_quota: int | None = None  # bytes of every other

    def __post_init__(self) -> None:
        check_fields(self, "prefill_tokens_per_s", "queue_chunks", ge=0)


class _Verdicts(dict[OffloadKey, bool]):
    """Chunks that a request reads, or computes although they may be held; kept in its context."""


class PigouTier(SecondaryTierManager):
    """Chunks in a `PageStore`, by the request's tenure. Reads and writes on threads of its own.

    Runs in the scheduler process, so it never waits: what finds the queue full is refused.
    """

    medium: ClassVar[base.Medium] = base.Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: Any = None, **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        try:
            params = msgspec.convert(given, TierParams)
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"{tier_type}: {wrong(error, TierParams, given)}") from None
        config = offloading_spec.config
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._span = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
        tiers = params.tiers
        if replica := config.parallel.data_parallel_index:  # a folder has one owner
            tiers = [uri_below(tier, f"dp{replica}") for tier in tiers]
        self.store = PageStore(
            tiers, _layout(config, params.release), self._block_size_bytes,
            page_tokens=self._span, quotas=params.quotas, default_quota=params.default_quota,
        )  # fmt: skip
        if params.prefill_tokens_per_s:
            page_s = self._span / params.prefill_tokens_per_s
            self.store.learn(page_s, page_s * self._span / PigouPolicy.attention_tokens)
        self._limit = params.queue_chunks or max(1, len(self._rows) // 4)
        self._readers = ThreadPoolExecutor(1, "pigou-tier-read")
        self._writers = ThreadPoolExecutor(1, "pigou-tier-write")
        self._jobs: dict[int, tuple[TransferJob, Future[None] | None]] = {}
        self._queued = {True: 0, False: 0}  # chunks in transfer, by `is_promotion`
        self._finished: SimpleQueue[JobResult] = SimpleQueue()
        self._counts = Counter[str]()
        self._gauges_read = 0.0
        log.info(
            "PigouTier (%s): %s, chunks of %d tokens in %d bytes, at most %d in transfer",
            SEAM, " ".join(tiers), self._span, self._block_size_bytes, self._limit,
        )  # fmt: skip

    def on_new_request(self, req_context: ReqContext) -> base.RequestOffloadingContext:
        """Offload new chunks only."""
        del req_context
        return base.RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> base.LookupResult:
        """HIT for a chunk that is held, and read sooner than computed with those after it."""
        verdicts = _verdicts(req_context)
        if key not in verdicts:
            self._judge(key, req_context, verdicts)
        if verdicts[key] and self._queued[True] >= self._limit:
            self._counts["refused"] += 1
        elif verdicts[key]:
            return base.LookupResult.HIT
        return base.LookupResult.MISS

    def _judge(self, key: OffloadKey, context: ReqContext, verdicts: _Verdicts) -> None:
        salt, verdicts[key] = salt_of(context)[0], False
        if self.store.held([Page(key, None, 0, salt)]):
            pages = self._prompt(_positions(context, [key]), salt)
            first = [page.key for page in pages].index(key)
            rest = takewhile(lambda page: page.key not in verdicts, pages[first + 1 :])
            run = [pages[first], *rest]
            best = self.store.worth_reading(run)
            verdicts.update((OffloadKey(page.key), True) for page in run[:best])
            self._counts["not_worth_reading"] += not best

    def _prompt(self, positions: dict[OffloadKey, int], salt: str) -> list[Page]:
        """Return the pages of a prompt, first to last by KV cache group."""
        pages: list[Page] = []
        for key in sorted(positions, key=lambda key: (key[-GROUP_BYTES:], positions[key])):
            last = pages[-1].key if pages else b""
            parent = last if last[-GROUP_BYTES:] == key[-GROUP_BYTES:] else None
            pages.append(Page(key, parent, max(0, positions[key] // self._span - 1), salt))
        return pages

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue chunks of the CPU tier to be written; refuse them if the queue is full."""
        count, queued = len(job_metadata.keys), self._queued[False]
        if queued and queued + count > self._limit:
            self._counts["refused"] += count
            self._jobs[job_metadata.job_id] = job_metadata, None
            self._finished.put(JobResult(job_metadata.job_id, success=False))
        else:
            self._submit(job_metadata, self._writers, self.store.put)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue chunks to be read into the CPU tier."""
        self._submit(job_metadata, self._readers, self.store.get)

    def _submit(
        self, job: TransferJob, threads: ThreadPoolExecutor,
        move: Callable[[Sequence[Page], Any, Ints], Bools],
    ) -> None:  # fmt: skip
        keys: list[OffloadKey] = list(job.keys)
        rows = dict(zip(keys, np.asarray(job.chunk_ids).tolist(), strict=True))
        positions, (salt, _) = _positions(job.req_context, keys), salt_of(job.req_context)

        def run() -> None:
            begin = time.monotonic()
            good: list[bytes] = []
            try:
                pages = [page for page in self._prompt(positions, salt) if page.key in rows]
                slots = np.array([rows[OffloadKey(page.key)] for page in pages], dtype=np.int32)
                moved = move(pages, self._rows, slots).tolist()
                good = [page.key for page, done in zip(pages, moved, strict=True) if done]
            except Exception:
                log.exception("PigouTier: %d chunks were not moved", len(keys))
            whole = len(good) == len(keys) if job.is_promotion else bool(good)
            took, size = time.monotonic() - begin, len(good) * self._block_size_bytes
            self._finished.put(JobResult(job.job_id, whole, good or None, took, size))

        self._queued[job.is_promotion] += len(keys)
        self._jobs[job.job_id] = job, threads.submit(run)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the transfers that ended; what could not be read is computed by its request."""
        finished = []
        while not self._finished.empty():
            done = self._finished.get_nowait()
            job, future = self._jobs.pop(done.job_id)
            if future is not None:
                self._queued[job.is_promotion] -= len(job.keys)
            if job.is_promotion and not done.success:
                lost = set(job.keys) - set(done.successful_keys or ())
                _verdicts(job.req_context).update(dict.fromkeys(lost, False))
                self._counts["failed"] += len(lost)
            finished.append(done)
        return finished

    def drain_jobs(self) -> None:
        """Wait until no transfer touches the CPU tier."""
        wait([future for _, future in self._jobs.values() if future is not None])

    def shutdown(self) -> None:
        """Finish the transfers under way, and close the store."""
        for threads in (self._readers, self._writers):
            threads.shutdown(cancel_futures=True)
        self.store.close()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, base.OffloadingMetricMetadata]:
        """Return this tier's metrics."""
        del extra_config
        gauge, counter = base.OffloadingGaugeMetadata, base.OffloadingCounterMetadata
        gauges = {_PREFIX + name: gauge(text, ("tier",)) for name, text in _GAUGES.items()}
        return gauges | {_PREFIX + name: counter(text) for name, text in _COUNTERS.items()}

    def get_stats(self) -> metrics.OffloadingConnectorStats:
        """Return counts since the last call, and gauges once in a while."""
        stats = metrics.OffloadingConnectorStats()
        for name, count in self._counts.items():
            stats.increase_counter(_PREFIX + name, count)
        self._counts.clear()
        if time.monotonic() - self._gauges_read >= _GAUGES_S:
            self._gauges_read = time.monotonic()
            for tier in self.store.stats()["tiers"]:
                for name in _GAUGES:
                    stats.set_gauge(_PREFIX + name, float(tier[name]), (tier["name"],))
        return stats


def _verdicts(context: ReqContext) -> _Verdicts:
    verdicts: _Verdicts = context.get_state(_Verdicts) or _Verdicts()
    context.set_state(verdicts)
    return verdicts


def _positions(context: ReqContext, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
    """Return positions of a request's chunks: all by vLLM's private attribute, else of `keys`."""
    known = dict(getattr(context, "_offload_key_positions", {}))
    return known | {key: context.get_offload_key_position(key) or 0 for key in keys}


def _layout(config: Any, release: str) -> str:
    """Return all that decides the bytes of a chunk."""
    ranks = [getattr(config.parallel, f"{kind}_size") for kind in ("tp", "pp", "pcp", "dcp")]
    kinds = config.replicated_layout, config.canonical_layout, config.kv_cache_layout
    return repr((config.model, config.cache, config.groups, ranks, kinds, release))
