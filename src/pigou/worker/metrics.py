"""The worker's metrics, under the names that vLLM's have, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pigou.engine.plan import Finished
from pigou.request import SECOND
from pigou.worker.device_use import WorkEstimate
from pigou.worker.engine_thread.commands import Gauges
from pigou.worker.engine_thread.kv_offload import OffloadConnector
from pigou.worker.http.reply import ReplySequence

#: Of the page that `Metrics.page` returns.
CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
         40, 80, 160, 640, 2560)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
        40, 80)  # fmt: skip
_SPAN = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
         7680)  # fmt: skip
_STEP = tuple(2**power for power in (0, *range(3, 15)))

_GAUGES = {
    "num_requests_running": "Requests that compute.",
    "num_requests_waiting": "Requests that wait for a row.",
    "kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Of those, tokens found.",
    "external_prefix_cache_queries": "Prompt tokens that other workers offered.",
    "external_prefix_cache_hits": "Of those, tokens that arrived.",
    "num_preemptions": "Times that a request lost its row.",
    "prompt_tokens": "Tokens of the prompts.",
    "prompt_tokens_cached": "Of those, tokens that were not computed here.",
    "generation_tokens": "Tokens sampled.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT),
    "inter_token_latency_seconds": ("Between tokens of a request.", _ITL),
    "request_time_per_output_token_seconds": ("Mean time between tokens of a request.", _ITL),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _SPAN),
    "request_queue_time_seconds": ("From arrival to the row.", _SPAN),
    "request_inference_time_seconds": ("From the row to the last token.", _SPAN),
    "request_prefill_time_seconds": ("From the row to the first token.", _SPAN),
    "request_decode_time_seconds": ("From the first token to the last.", _SPAN),
}
#: Figures that vLLM has no name for.
_OWN_GAUGES = {
    "kv_blocks": "KV blocks on the device.",
    "kv_blocks_free": "Of those, blocks that can be handed out, cached ones included.",
    "kv_blocks_cached": "Blocks that can be hit, in use or not.",
    "kv_table_blocks": "Blocks in the tables of running requests, shared ones for each of them.",
    "kv_table_tokens": "Tokens in these blocks.",
    "kv_block_tokens": "Tokens that a block has room for.",
    "kv_requests_held": "Prompts that are held for other workers, computed or cached ones.",
    "kv_requests_loading": "Requests whose blocks are on their way.",
    "kv_price": "Return that a block of cache entries has to earn to stay, in the policy's unit.",
    "kv_entries_missing": "Cache entries that running requests gave up, and do without.",
}
_OWN_COUNTERS = {
    "kv_blocks_received": "KV blocks that came from other workers.",
    "kv_bytes_received": "Bytes in them.",
    "kv_blocks_lent": "Cached KV blocks that were offered to other workers.",
    "swaps": "Preemptions that moved KV to host memory.",
    "kv_entries_given": "Cache entries that requests gave up.",
    "kv_entries_revived": "Of those, entries that were computed again on their own.",
    "engine_steps": "Steps computed.",
    "computed_tokens": "Tokens computed in them, of prompts and outputs.",
    "prefill_seconds": "Seconds of the steps that computed chunks of prompts.",
    "prefill_tokens": "Tokens of these chunks.",
}
REASONS = ("stop", "length", "abort", "error")
_ENGINE_LABELS = ("model_name", "engine")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class WorkerMetrics:
    """Counts what passes; used by the event loop only."""

    def __init__(
        self,
        model: str,
        max_model_len: int,
        cache: dict[str, str],
        blocks: int,
        work: WorkEstimate | None = None,
    ) -> None:
        """Make the metrics of one model.

        Args:
            work: its estimates are shown; None shows none.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        tokens = _tokens(max_model_len)
        self._gauge = {n: self._new_gauge(f"vllm:{n}", h) for n, h in _GAUGES.items()}
        self._gauge |= {n: self._new_gauge(f"pigou_{n}", h) for n, h in _OWN_GAUGES.items()}
        self._counter = {n: self._new_counter(f"vllm:{n}", h) for n, h in _COUNTERS.items()}
        self._counter |= {n: self._new_counter(f"pigou_{n}", h) for n, h in _OWN_COUNTERS.items()}
        self._histogram = {
            n: self._new_histogram(n, h, buckets) for n, (h, buckets) in _HISTOGRAMS.items()
        }
        for name, text, buckets in (
            ("request_prompt_tokens", "Tokens of a prompt.", tokens),
            ("request_generation_tokens", "Tokens generated for a request.", tokens),
            ("request_params_max_tokens", "Output limit of a request.", tokens),
            ("request_prefill_kv_computed_tokens", "Prompt tokens computed here.", tokens),
            ("iteration_tokens_total", "Tokens computed in a step.", _STEP),
            ("request_num_preemptions", "Preemptions of a request.", (0, 1, 2, 5, 10)),
        ):
            self._histogram[name] = self._new_histogram(name, text, buckets)
        self._success = self._new_family("request_success", "Requests that ended.",
                                         "finished_reason", REASONS)  # fmt: skip
        self._sources = self._new_family("prompt_tokens_by_source", "Where prompt KV came from.",
                                         "source", SOURCES)  # fmt: skip
        info = Gauge("vllm:cache_config_info", "Of the KV cache.", [*cache, "engine"],
                     registry=self.registry)  # fmt: skip
        info.labels(**cache, engine="0").set(1)
        self._gauge["kv_blocks"].set(blocks)
        self._gauge["kv_block_tokens"].set(float(cache.get("block_size", 0)))
        if work is not None:
            self.registry.register(WorkMetrics(work, model))
        self._seen = Gauges()
        self._itl = self._histogram["inter_token_latency_seconds"]

    def figures(self, gauges: Gauges, waiting: int) -> None:
        """Take in the engine's figures, and the sequences that wait for a row."""
        gauge = self._gauge
        gauge["num_requests_running"].set(gauges.running + gauges.loading)
        gauge["num_requests_waiting"].set(waiting)
        gauge["kv_cache_usage_perc"].set(gauges.usage)
        gauge["kv_blocks_free"].set(gauges.free)
        gauge["kv_blocks_cached"].set(gauges.cached)
        gauge["kv_table_blocks"].set(gauges.table_blocks)
        gauge["kv_table_tokens"].set(gauges.table_tokens)
        gauge["kv_requests_held"].set(gauges.held)
        gauge["kv_requests_loading"].set(gauges.loading)
        gauge["kv_price"].set(gauges.price)
        gauge["kv_entries_missing"].set(gauges.missing)
        for name, total in (
            ("prefix_cache_queries", "queries_total"),
            ("prefix_cache_hits", "hits_total"),
            ("num_preemptions", "preemptions_total"),
            ("kv_blocks_received", "blocks_received_total"),
            ("kv_bytes_received", "bytes_received_total"),
            ("kv_blocks_lent", "blocks_leased_total"),
            ("swaps", "swaps_total"),
            ("kv_entries_given", "given_total"),
            ("kv_entries_revived", "revived_total"),
            ("engine_steps", "steps_total"),
            ("computed_tokens", "tokens_total"),
            ("prefill_tokens", "prefill_tokens_total"),
        ):
            value = getattr(gauges, total)
            if more := value - getattr(self._seen, total):
                self._counter[name].inc(more)
                setattr(self._seen, total, value)
        if prefill_ns := gauges.prefill_ns_total - self._seen.prefill_ns_total:
            self._counter["prefill_seconds"].inc(prefill_ns / SECOND)
            self._seen.prefill_ns_total = gauges.prefill_ns_total

    def step(self, tokens: int) -> None:
        """Count a step of so many tokens."""
        self._histogram["iteration_tokens_total"].observe(tokens)

    def begun(self, sequence: ReplySequence, remote_tokens: int) -> None:
        """Count a prompt that took a row first; `remote_tokens` were offered by other workers."""
        prompt = len(sequence.prompt)
        local = sequence.cached - sequence.loaded
        self._counter["prompt_tokens"].inc(prompt)
        self._counter["prompt_tokens_cached"].inc(sequence.cached)
        self._counter["external_prefix_cache_queries"].inc(remote_tokens)
        self._counter["external_prefix_cache_hits"].inc(sequence.loaded)
        counts = (max(prompt - sequence.cached, 0), local, sequence.loaded)
        for source, count in zip(SOURCES, counts, strict=True):
            self._sources[source].inc(count)
        self._histogram["request_prefill_kv_computed_tokens"].observe(counts[0])
        self._observe("request_queue_time_seconds", sequence.begun - sequence.arrival)

    def token(self, sequence: ReplySequence, now: int) -> None:
        """Count a token that came at `now`, monotonic nanoseconds."""
        if sequence.first:
            self._itl.observe((now - sequence.last) / SECOND)
        else:
            sequence.first = now
            self._observe("time_to_first_token_seconds", now - sequence.arrival)
        sequence.last = now

    def tokens(self, count: int) -> None:
        """Count tokens sampled."""
        self._counter["generation_tokens"].inc(count)

    def finished(
        self, sequence: ReplySequence, finished: Finished, reason: str, limit: int
    ) -> None:
        """Count a request that left the engine."""
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
        """Return the page for Prometheus."""
        return generate_latest(self.registry)

    def _observe(self, name: str, nanoseconds: int) -> None:
        self._histogram[name].observe(nanoseconds / SECOND)

    def _new_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _new_counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, list(self._labels), registry=self.registry)
        return counter.labels(**self._labels)

    def _new_histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", text, list(self._labels), registry=self.registry, buckets=buckets
        )
        return histogram.labels(**self._labels)

    def _new_family(
        self, name: str, text: str, label: str, values: tuple[str, ...]
    ) -> dict[str, Counter]:
        names = [*self._labels, label]
        counter = Counter(f"vllm:{name}", text, names, registry=self.registry)
        return {value: counter.labels(**self._labels, **{label: value}) for value in values}


def _tokens(max_tokens: int) -> tuple[float, ...]:
    """Return the buckets 1, 2, 5, 10, 20, 50, ... up to `max_tokens`."""
    buckets = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    return tuple(bucket for bucket in buckets if bucket <= max_tokens)


_WORK = (
    ("vllm:estimated_flops_per_gpu", "flops", "Estimated FLOPs of the steps on a GPU."),
    ("vllm:estimated_read_bytes_per_gpu", "read_bytes", "Estimated bytes read from its memory."),
    ("vllm:estimated_write_bytes_per_gpu", "write_bytes", "Estimated bytes written to it."),
)
_PEAKS = (
    ("pigou_gpu_peak_flops_per_second", "peak_flops", "FLOPs a second of the GPU's data sheet."),
    ("pigou_gpu_peak_bytes_per_second", "peak_bytes_per_second", "Bytes a second of its memory."),
)


class WorkMetrics(Collector):
    """Reads the estimates of a worker's steps when the page is asked for."""

    def __init__(self, work: WorkEstimate, model: str) -> None:
        self._work, self._labels = work, (model, "0")

    def collect(self) -> Iterator[Metric]:
        """Return the counters, and the GPU's peaks where they are known."""
        for name, field, text in _WORK:
            counter = CounterMetricFamily(name, text, labels=_ENGINE_LABELS)
            counter.add_metric(self._labels, getattr(self._work, field))
            yield counter
        for name, field, text in _PEAKS:
            if peak := getattr(self._work, field):
                gauge = GaugeMetricFamily(name, text, labels=_ENGINE_LABELS)
                gauge.add_metric(self._labels, peak)
                yield gauge


_TIER_LABELS = (*_ENGINE_LABELS, "tier")


class TierMetrics(Collector):
    """Reads the tiers' figures when the page is asked for."""

    def __init__(self, tiers: OffloadConnector, model: str) -> None:
        self._tiers = tiers
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Return one family for each figure, with a sample for each tier."""
        figures = {name: _figures(self._tiers, i) for i, name in enumerate(self._tiers.names)}
        for key, text in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"pigou_tier_{key}", text, labels=_TIER_LABELS)
            for name, values in figures.items():
                gauge.add_metric((self._model, "0", name), values[key])
            yield gauge
        for key, text in TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"pigou_tier_{key}", text, labels=_TIER_LABELS)
            for name, values in figures.items():
                counter.add_metric((self._model, "0", name), values[key])
            yield counter


TIER_GAUGES = {
    "up": "1 while its store takes work, else 0.",
    "blocks": "KV blocks that it holds, those on their way included.",
    "used_bytes": "Bytes taken in its store.",
    "cap_bytes": "Bytes that its store never exceeds.",
    "price": "Price of a byte in seconds of prefill; 0 where its policy has none.",
    "queued_blocks": "Blocks that wait to be read or written.",
}
TIER_COUNTERS = {
    "stored_blocks": "Blocks written to it.",
    "restored_blocks": "Blocks read from it into the device for a request.",
    "recalled_blocks": "Blocks read from it for a session that was expected back.",
    "evicted_blocks": "Blocks that it gave up for others.",
    "lost_blocks": "Blocks that could not be written or read.",
    "corrupt_blocks": "Blocks that were torn or altered: misses.",
    "refused_blocks": "Blocks that were turned away as queues were full or the store down.",
}


def _figures(tiers: OffloadConnector, number: int) -> dict[str, float]:
    status = tiers.status()[tiers.names[number]]
    tier, counts = tiers.tiers.tiers[number], tiers.tiers.counts[number]
    return {
        "up": float(status.up),
        "blocks": len(tier),
        "used_bytes": status.used_bytes,
        "cap_bytes": status.cap_bytes,
        "price": float(getattr(tier.policy, "price", 0.0)),
        "queued_blocks": status.reads.blocks + status.writes.blocks,
        "stored_blocks": counts.stored,
        "restored_blocks": counts.restored,
        "recalled_blocks": counts.recalled,
        "evicted_blocks": counts.evicted,
        "lost_blocks": counts.lost,
        "corrupt_blocks": status.counts.corrupt,
        "refused_blocks": status.reads.refused + status.writes.refused,
    }


def health_of(tiers: OffloadConnector) -> dict[str, dict[str, Any]]:
    """Say of each tier, by name, whether its store works, and if not, why."""
    return {
        name: {
            "up": status.up,
            "reason": status.reason,
            "used_bytes": status.used_bytes,
            "cap_bytes": status.cap_bytes,
        }
        for name, status in tiers.status().items()
    }
