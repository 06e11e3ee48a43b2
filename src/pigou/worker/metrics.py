"""The worker's Prometheus metrics, named like vLLM's, in their own registry."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client import Counter, generate_latest
from prometheus_client.core import Metric

from pigou.engine.plan import Finished
from pigou.engine.speculation import DraftPricer
from pigou.kv.offload import TierCounts
from pigou.metric_rows import MetricSet, counter_family, gauge_family
from pigou.request import SECOND
from pigou.runtime.stores.offloader import StoreStatus
from pigou.worker.device_use import EnergyCounter, WorkEstimate
from pigou.worker.engine_thread.commands import Gauges
from pigou.worker.engine_thread.kv_offload import OffloadConnector
from pigou.worker.http.reply import ReplySequence

#: Content type of `WorkerMetrics.page`.
CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
         40, 80, 160, 640, 2560)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
        40, 80)  # fmt: skip
_SPAN = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
         7680)  # fmt: skip
_STEP = tuple(2**power for power in (0, *range(3, 15)))
#: Histograms, by name without `vllm:`: help and buckets; None for token counts.
_HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT),
    "inter_token_latency_seconds": ("Between tokens of a request.", _ITL),
    "request_time_per_output_token_seconds": ("Mean time between tokens of a request.", _ITL),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _SPAN),
    "request_queue_time_seconds": ("From arrival to the row.", _SPAN),
    "request_inference_time_seconds": ("From the row to the last token.", _SPAN),
    "request_prefill_time_seconds": ("From the row to the first token.", _SPAN),
    "request_decode_time_seconds": ("From the first token to the last.", _SPAN),
    "request_prompt_tokens": ("Tokens of a prompt.", None),
    "request_generation_tokens": ("Tokens generated for a request.", None),
    "request_params_max_tokens": ("Output limit of a request.", None),
    "request_prefill_kv_computed_tokens": ("Prompt tokens computed here.", None),
    "iteration_tokens_total": ("Tokens computed in a step.", _STEP),
    "request_num_preemptions": ("Preemptions of a request.", (0, 1, 2, 5, 10)),
}
REASONS = ("stop", "length", "abort", "error")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Row(NamedTuple):
    """A metric read at each scrape: name, help, and source attribute."""

    name: str  # a counter's without `_total`
    help: str
    source: str  # dotted path of a value or method
    counter: bool = False

    def value(self, source: object) -> float | None:
        """Read the value from an object; None hides the metric."""
        value: Any = attrgetter(self.source)(source)
        read: float | None = value() if callable(value) else value
        return read


def _counters(*rows: tuple[str, str, str]) -> tuple[Row, ...]:
    return tuple(Row(*row, counter=True) for row in rows)


#: Rows read from `WorkerMetrics`; names that begin with `vllm:` are vLLM's.
_ENGINE_ROWS = (
    Row("vllm:num_requests_running", "Requests that compute.", "running"),
    Row("vllm:num_requests_waiting", "Requests that wait for a row.", "waiting"),
    Row("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "gauges.usage"),
    Row("pigou_kv_blocks", "KV blocks on the device.", "blocks"),
    Row("pigou_kv_blocks_free", "Allocatable blocks, cached ones included.", "gauges.free"),
    Row("pigou_kv_blocks_cached", "Blocks that can be hit, in use or not.", "gauges.cached"),
    Row("pigou_kv_table_blocks",
        "Blocks in the tables of running requests, shared ones for each of them.",
        "gauges.table_blocks"),
    Row("pigou_kv_table_tokens", "Tokens in the tables' blocks.", "gauges.table_tokens"),
    Row("pigou_kv_block_tokens", "Tokens that a block has room for.", "block_tokens"),
    Row("pigou_kv_requests_held",
        "Prompts held for other workers, computed or cached ones.", "gauges.held"),
    Row("pigou_kv_requests_loading", "Requests whose blocks are on their way.", "gauges.loading"),
    Row("pigou_kv_price",
        "Return that a block of cache entries has to earn to stay, in the policy's unit.",
        "gauges.price"),
    Row("pigou_kv_entries_missing", "Evicted entries of running requests.", "gauges.missing"),
    *_counters(
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
         "gauges.stats.queried_tokens"),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.",
         "gauges.stats.hit_tokens"),
        ("vllm:external_prefix_cache_queries", "Prompt tokens that other workers offered.",
         "offered_tokens"),
        ("vllm:external_prefix_cache_hits", "Offered tokens that arrived.", "loaded_tokens"),
        ("vllm:num_preemptions", "Times that a request lost its row.", "gauges.stats.preemptions"),
        ("vllm:prompt_tokens", "Tokens of the prompts.", "prompt_tokens"),
        ("vllm:prompt_tokens_cached", "Prompt tokens not computed here.", "cached_tokens"),
        ("vllm:generation_tokens", "Tokens sampled.", "generated_tokens"),
        ("pigou_kv_blocks_received", "KV blocks that came from other workers.",
         "gauges.blocks_received_total"),
        ("pigou_kv_bytes_received", "Bytes of received KV blocks.", "gauges.bytes_received_total"),
        ("pigou_kv_blocks_lent", "Cached KV blocks that were offered to other workers.",
         "gauges.blocks_leased_total"),
        ("pigou_swaps", "Preemptions that moved KV to host memory.", "gauges.stats.swaps"),
        ("pigou_kv_entries_given", "Evicted cache entries of requests.",
         "gauges.stats.evicted_tokens"),
        ("pigou_kv_entries_revived",
         "Evicted entries computed again on their own.", "gauges.stats.recomputed_tokens"),
        ("pigou_engine_steps", "Steps computed.", "gauges.steps_total"),
        ("pigou_computed_tokens", "Tokens of prompts and outputs computed in steps.",
         "gauges.tokens_total"),
        ("pigou_prefill_seconds", "Seconds of the steps that computed chunks of prompts.",
         "prefill_s"),
        ("pigou_prefill_tokens", "Tokens of prompt chunks.", "gauges.prefill_tokens_total"),
    ),
)  # fmt: skip
_IDLE_ROWS = (
    Row("pigou_kv_idle_tokens", "KV held for over 5 s that nothing computes with.", "tokens"),
)
#: Rows read from `WorkEstimate`.
_WORK_ROWS = (
    *_counters(
        ("vllm:estimated_flops_per_gpu", "Estimated FLOPs of the steps on a GPU.", "flops"),
        ("vllm:estimated_read_bytes_per_gpu", "Estimated bytes of memory reads.", "read_bytes"),
        ("vllm:estimated_write_bytes_per_gpu", "Estimated bytes of memory writes.", "write_bytes"),
    ),
    Row("pigou_gpu_peak_flops_per_second", "FLOPs a second of the GPU's data sheet.",
        "peak_flops"),
    Row("pigou_gpu_peak_bytes_per_second", "Memory bandwidth of the GPU.", "peak_bytes_per_second"),
)  # fmt: skip
#: KV by tenant, as the gateway marks it.
_TENANT_ROWS = (
    Row("pigou_kv_tenant_blocks", "KV blocks of a tenant, in use or cached, with quotas; `*` of "
        "all that have none.", "blocks"),
)  # fmt: skip
#: Rows read from `TierFigures`.
TIER_ROWS = (
    Row("pigou_tier_up", "1 while the tier's store takes work, else 0.", "status.up"),
    Row("pigou_tier_blocks", "KV blocks that the tier holds, incoming ones included.", "blocks"),
    Row("pigou_tier_used_bytes", "Bytes used in the tier's store.", "status.used_bytes"),
    Row("pigou_tier_cap_bytes", "Maximum of bytes in the tier's store.", "status.cap_bytes"),
    Row("pigou_tier_price", "Price of a byte in seconds of prefill; 0 if the policy has none.",
        "price"),
    Row("pigou_tier_queued_blocks", "Blocks that wait to be read or written.", "queued"),
    *_counters(
        ("pigou_tier_stored_blocks", "Blocks written to the tier.", "counts.stored"),
        ("pigou_tier_restored_blocks", "Blocks read from the tier to the device for a request.",
         "counts.restored"),
        ("pigou_tier_recalled_blocks",
         "Blocks read from the tier for a session that was expected back.", "counts.recalled"),
        ("pigou_tier_evicted_blocks", "Blocks evicted from the tier.", "counts.evicted"),
        ("pigou_tier_quota_evicted_blocks",
         "Blocks of tenants above their ceilings, evicted for others; with quotas.",
         "quota_evicted"),
        ("pigou_tier_quota_refused_blocks",
         "Blocks refused: their tenant is above its ceiling, or floors keep the room; with quotas.",
         "quota_refused"),
        ("pigou_tier_lost_blocks", "Blocks that could not be written or read.", "counts.lost"),
        ("pigou_tier_corrupt_blocks", "Blocks that were torn or altered: misses.",
         "status.counts.corrupt"),
        ("pigou_tier_refused_blocks",
         "Blocks refused because queues were full or the store down.", "refused"),
    ),
)  # fmt: skip
TIER_TENANT_ROWS = (
    Row("pigou_tier_tenant_bytes", "Bytes of a tenant's KV blocks in the tier, with quotas; `*` of "
        "tenants without an account.", "bytes"),
)  # fmt: skip
#: Rows read from `DraftPricer`, and of the accepted tokens at each position.
_DRAFT_ROWS = _counters(
    ("vllm:spec_decode_num_drafts", "Drafts verified, one for a sequence and step.", "drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", "draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", "accepted_tokens"),
)
_POSITION_ROWS = _counters(
    ("vllm:spec_decode_num_accepted_tokens_per_pos",
     "Accepted draft tokens by their position in the draft.", "real"),
)  # fmt: skip
_ENERGY_ROWS = _counters(
    ("pigou_device_energy_joules", "Energy of the worker's device since its start, by its counter.",
     "joules"),
)  # fmt: skip
#: Rows read from `ExpertLoads.report`, of the last 1,000 to 2,000 steps.
_EXPERT_ROWS = (
    Row("pigou_expert_imbalance",
        "(max - mean) / mean of the experts' tokens, mean of the layers.", "imbalance"),
    Row("pigou_expert_rank_imbalance",
        "(max - mean) / mean of the tokens of the processes that share experts.",
        "rank_imbalance"),
    Row("pigou_experts_activated", "Experts of a layer that a step reads.", "activated_per_step"),
    *_counters(
        ("pigou_expert_tokens", "Tokens given to experts, each once per expert and layer.",
         "tokens"),
        ("pigou_experts_moved", "Experts that processes fetched to balance loads.", "moved"),
    ),
)  # fmt: skip


class WorkerMetrics(MetricSet):
    """Counts requests, tokens and steps; event loop only."""

    def __init__(
        self, model: str, max_model_len: int, cache: dict[str, str], blocks: int,
        work: WorkEstimate | None = None,
    ) -> None:  # fmt: skip
        """Create one model's metrics; `cache` labels `vllm:cache_config_info`."""
        super().__init__()
        self._labels = {"model_name": model, "engine": "0"}
        self.gauges, self.waiting = Gauges(), 0
        self.blocks, self.block_tokens = blocks, float(cache.get("block_size", 0))
        self.prompt_tokens = self.cached_tokens = self.offered_tokens = self.loaded_tokens = 0
        self.generated_tokens = 0
        self.show(_ENGINE_ROWS, lambda: [((), self)])
        self.show(_IDLE_ROWS, self._idle, "tenant")
        self.show(_TENANT_ROWS, lambda: [
            ((tenant,), SimpleNamespace(blocks=blocks))
            for tenant, blocks in self.gauges.tenant_blocks.items()
        ], "tenant")  # fmt: skip
        if work is not None:
            self.show(_WORK_ROWS, lambda: [((), work)])
        tokens = _token_buckets(max_model_len)
        self._histogram = {
            name: self.histogram(
                f"vllm:{name}", text, tokens if buckets is None else buckets, *self._labels
            ).labels(**self._labels)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._success = self._new_family("request_success", "Requests that ended.",
                                         "finished_reason", REASONS)  # fmt: skip
        self._sources = self._new_family("prompt_tokens_by_source", "Where prompt KV came from.",
                                         "source", SOURCES)  # fmt: skip
        info = self.gauge(
            "vllm:cache_config_info", "Configuration of the KV cache.", *cache, "engine"
        )
        info.labels(**cache, engine="0").set(1)
        self._itl = self._histogram["inter_token_latency_seconds"]

    def show(
        self,
        rows: Sequence[Row],
        read: Callable[[], Iterable[tuple[tuple[str, ...], Any]]],
        *labels: str,
    ) -> None:
        """Register rows of the objects that `read` returns at each scrape, with extra labels."""
        own, names = tuple(self._labels.values()), (*self._labels, *labels)

        def families() -> Iterator[Metric]:
            objects = list(read())
            for row in rows:
                values = [((*own, *more), row.value(source)) for more, source in objects]
                samples = [(labels, value) for labels, value in values if value is not None]
                if samples:
                    family = counter_family if row.counter else gauge_family
                    yield family(row.name, row.help, samples, *names)

        self.scrape(families)

    def _idle(self) -> list[tuple[tuple[str, ...], SimpleNamespace]]:
        now, tokens = time.time_ns(), defaultdict(float, {"": 0.0})
        for pinned in self.gauges.pinned:
            if pinned.is_idle(now):
                tokens[pinned.tenant] += len(pinned.blocks) * self.block_tokens
        return [((tenant,), SimpleNamespace(tokens=held)) for tenant, held in tokens.items()]

    def show_tiers(self, tiers: OffloadConnector) -> None:
        """Register each tier's metrics."""
        self.show(TIER_ROWS, lambda: tier_figures(tiers), "tier")
        self.show(TIER_TENANT_ROWS, lambda: [
            ((name, tenant), SimpleNamespace(bytes=size))
            for name, tier in zip(tiers.names, tiers.tiers.tiers, strict=True)
            if tier.accounts is not None
            for tenant, size in tier.accounts.held().items()
        ], "tier", "tenant")  # fmt: skip

    def show_drafts(self, drafts: DraftPricer) -> None:
        """Register the counts of draft tokens."""
        self.show(_DRAFT_ROWS, lambda: [((), drafts)])
        positions = drafts.accepted_at
        self.show(
            _POSITION_ROWS,
            lambda: [((str(at),), int(count)) for at, count in enumerate(positions)], "position",
        )  # fmt: skip

    def show_experts(self, report: Callable[[], dict[str, Any]]) -> None:
        """Register loads of experts; figures that a report lacks are not shown."""
        lacking = {"rank_imbalance": None, "moved": None}
        self.show(_EXPERT_ROWS, lambda: [((), SimpleNamespace(**{**lacking, **report()}))])

    def show_energy(self, counter: EnergyCounter) -> None:
        """Register the device's energy use."""
        self.show(_ENERGY_ROWS, lambda: [((counter.source,), counter)], "source")

    @property
    def running(self) -> int:
        """Requests with a row."""
        return self.gauges.running + self.gauges.loading

    @property
    def prefill_s(self) -> float:
        """Seconds of steps with prompt chunks."""
        return self.gauges.prefill_ns_total / SECOND

    def step(self, tokens: int) -> None:
        """Count a step of `tokens` tokens."""
        self._histogram["iteration_tokens_total"].observe(tokens)

    def begun(self, sequence: ReplySequence, remote_tokens: int) -> None:
        """Count a prompt's first row; other workers offered `remote_tokens`."""
        prompt = len(sequence.prompt)
        local = sequence.cached - sequence.loaded
        self.prompt_tokens += prompt
        self.cached_tokens += sequence.cached
        self.offered_tokens += remote_tokens
        self.loaded_tokens += sequence.loaded
        counts = (max(prompt - sequence.cached, 0), local, sequence.loaded)
        for source, count in zip(SOURCES, counts, strict=True):
            self._sources[source].inc(count)
        self._histogram["request_prefill_kv_computed_tokens"].observe(counts[0])
        self._observe("request_queue_time_seconds", sequence.begun - sequence.arrival)

    def token(self, sequence: ReplySequence, now: int) -> None:
        """Count a token received at `now`, monotonic nanoseconds."""
        if sequence.first:
            self._itl.observe((now - sequence.last) / SECOND)
        else:
            sequence.first = now
            self._observe("time_to_first_token_seconds", now - sequence.arrival)
        sequence.last = now

    def finished(
        self, sequence: ReplySequence, finished: Finished, reason: str, limit: int
    ) -> None:
        """Count a finished request."""
        self._success[reason if reason in REASONS else "error"].inc()
        histogram = self._histogram
        histogram["request_prompt_tokens"].observe(len(sequence.prompt))
        histogram["request_generation_tokens"].observe(finished.generated)
        histogram["request_params_max_tokens"].observe(limit)
        histogram["request_num_preemptions"].observe(finished.preemptions)
        if not sequence.first:
            return
        span, begun = sequence.last - sequence.first, sequence.begun or sequence.arrival
        self._observe("e2e_request_latency_seconds", sequence.last - sequence.arrival)
        self._observe("request_inference_time_seconds", sequence.last - begun)
        self._observe("request_prefill_time_seconds", sequence.first - begun)
        self._observe("request_decode_time_seconds", span)
        if (tokens := len(sequence.choice.tokens)) > 1:
            self._observe("request_time_per_output_token_seconds", span // (tokens - 1))

    def page(self) -> bytes:
        """Return the Prometheus page."""
        return generate_latest(self.registry)

    def _observe(self, name: str, nanoseconds: int) -> None:
        self._histogram[name].observe(nanoseconds / SECOND)

    def _new_family(
        self, name: str, text: str, label: str, values: tuple[str, ...]
    ) -> dict[str, Counter]:
        counter = self.counter(f"vllm:{name}", text, *self._labels, label)
        return {value: counter.labels(**self._labels, **{label: value}) for value in values}


def _token_buckets(max_tokens: int) -> tuple[float, ...]:
    """Return buckets 1, 2, 5, 10, 20, 50, ... up to `max_tokens`."""
    buckets = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    return tuple(bucket for bucket in buckets if bucket <= max_tokens)


class TierFigures(NamedTuple):
    """Metrics of one tier, read per scrape."""

    blocks: int
    price: float
    queued: int
    refused: int
    counts: TierCounts
    status: StoreStatus
    quota_evicted: int | None
    quota_refused: int | None


def tier_figures(tiers: OffloadConnector) -> Iterator[tuple[tuple[str], TierFigures]]:
    """Return each tier's metrics, by name."""
    parts = zip(tiers.status().items(), tiers.tiers.tiers, tiers.tiers.counts, strict=True)
    for (name, status), tier, counts in parts:
        reads, writes, accounts = status.reads, status.writes, tier.accounts
        yield (name,), TierFigures(
            len(tier), float(getattr(tier.policy, "price", 0.0)), reads.blocks + writes.blocks,
            reads.refused + writes.refused, counts, status,
            None if accounts is None else accounts.evicted,
            None if accounts is None else accounts.refused,
        )  # fmt: skip


def health_of(tiers: OffloadConnector) -> dict[str, dict[str, Any]]:
    """Return each tier's store health, by name, with the reason if it is down."""
    shown = ("up", "reason", "used_bytes", "cap_bytes")
    statuses = tiers.status().items()
    return {name: {key: getattr(status, key) for key in shown} for name, status in statuses}
