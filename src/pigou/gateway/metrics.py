"""The gateway's metrics: `pigou_*`, and OpenTelemetry's `gen_ai_server_*`."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pigou import __version__
from pigou.control.messages import RemoteKVFetch
from pigou.control.router import Explanation
from pigou.gateway.request import GatewayRun
from pigou.metric_rows import MetricSet, counter_family, gauge_family
from pigou.objectives import class_label
from pigou.request import SECOND, BlockKeys
from pigou.windows.prompts import BucketCounts

#: Labels with the tenant's name, and with the model's, as vLLM calls it.
TENANT, MODEL, CLASS = "tenant", "model_name", "class"
BUILD_INFO = "pigou_build_info"
#: Reasons for which a prompt is not pulled: no worker pulls it, or there is no broker.
NO_PULLER, NO_BROKER = "no_puller", "no_broker"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
            300, 600)  # fmt: skip
_STAGE = (0.0005, *_SECONDS)
_ITL = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
        0.3, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)  # fmt: skip
_DECISION = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)
#: Costs are in the unit of the policy: seconds for Pigou's own, blocks or requests for others.
_COST = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 100_000)
_REGRET = (0, 0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_BLOCKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SHARES = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
#: Columns of the fleet's table that only rise, and those whose metric names their unit.
_WORKER_COUNTERS = ("restarts", "out_of_memory", "tokens", "kv_events")
_WORKER_UNITS = {"kv_usage": "kv_usage_ratio"}
NO_KEYS: Mapping[int, BlockKeys] = MappingProxyType({})
#: Rows of the fleet's table: (worker, role, name -> value).
Rows: TypeAlias = Iterable[tuple[str, str, dict[str, float]]]
#: Ratio to the median gap and seconds above which a gap is a stall. Shorter gaps are no pause to a
#: reader, and may come from the gateway's own event loop.
STALL_RATIO, MIN_STALL_S = 10.0, 0.05
#: Gaps before the median is trusted, and by how much each moves it.
_WARM_UP, _STEP = 64, 1.02
#: Cause of a stream's pause: the client read nothing, or the engine produced nothing.
StallCause: TypeAlias = Literal["client", "engine"]
#: Prompts whose end is remembered.
_MAX_SESSIONS = 65_536
#: Buckets, names and labels of OpenTelemetry's semantic conventions for generative AI (status:
#: development). A dot is an underscore in Prometheus, and the unit ends the name.
_GENAI_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96,
                   81.92)  # fmt: skip
_GENAI_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_GENAI_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5,
                      7.5, 10)  # fmt: skip
#: Tenants with series of their own, and the label of the others, which no tenant can have.
MAX_SHOWN_TENANTS, OTHER_TENANTS = 64, "(others)"
_TENANT_TTFT = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TENANT_DURATION = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
#: `gen_ai.provider.name` of this server.
PROVIDER = "pigou"
_GENAI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model",
                 "gen_ai_response_model")  # fmt: skip


class Metrics(MetricSet):
    """Metrics of a model's requests, with their own registry."""

    def __init__(self) -> None:
        super().__init__()
        self.scrape(lambda: [gauge_family(
            BUILD_INFO, "Version of Pigou; the value is always 1.", [((__version__,), 1)], "version"
        )])  # fmt: skip
        counter, seconds = self.counter, self.histogram
        self.requests = counter(
            "pigou_requests", "Requests by route and HTTP status.", "route", "status"
        )
        self.prompt_tokens = counter(
            "pigou_prompt_tokens", "Prompt tokens of finished requests.", TENANT
        )
        self.generation_tokens = counter(
            "pigou_generation_tokens", "Generated tokens that passed through.", TENANT
        )
        self.untokenized = counter(
            "pigou_untokenized_tokens",
            "Tokens that workers need not tokenize (prompt) or detokenize (output).", "side",
        )  # fmt: skip
        self.migrations = counter(
            "pigou_migrations", "Requests sent to another worker after one failed, by phase.",
            "phase", "reason",
        )  # fmt: skip
        self.unfinished = counter(
            "pigou_requests_failed", "Requests that no worker could finish.", "reason"
        )
        self.cancelled = counter("pigou_requests_cancelled", "Requests whose client left.")
        self.stalled = counter(
            "pigou_clients_stalled", "Streams cut off because their client read nothing."
        )
        self.retried = counter(
            "pigou_client_retries", "Requests that their client marks as a retry."
        )
        self.shed = counter("pigou_requests_shed", "Requests refused because the fleet was full.")
        self.overflowed = counter(
            "pigou_requests_overflowed", "Requests that went to another model or fleet.", "to"
        )
        self.degraded = counter(
            "pigou_requests_degraded", "Requests answered with less under load, by mode.", "mode"
        )
        self.first_token = seconds(
            "pigou_time_to_first_token_seconds", "From arrival to the first token relayed.",
            _SECONDS,
        )  # fmt: skip
        self.prefill = seconds(
            "pigou_prefill_leg_seconds", "From leg 1's request to its reply.", _SECONDS
        )
        self.duration = seconds(
            "pigou_request_duration_seconds", "From arrival to the end of the reply.", _SECONDS
        )
        self.reads = counter(
            "pigou_peer_reads", "Prompts to be read from another worker's cache.",
            "outcome",
        )  # fmt: skip
        self.read_tokens = counter("pigou_peer_read_tokens", "Tokens expected from peer reads.")
        self.read_saves = counter(
            "pigou_game_peer_read_saved_seconds", "Seconds that peer reads are expected to save."
        )
        self.inflight = self.gauge("pigou_requests_inflight", "Requests being served.")
        self.queued = self.gauge("pigou_requests_queued", "Requests that wait for a worker.")
        self.prefill_queue = self.gauge(
            "pigou_prefill_queue_prompts",
            "Prompts of all gateways waiting to be pulled by prefill workers, or claimed.",
        )
        self.unpulled_prompts = counter(
            "pigou_prefill_queue_unpulled",
            "Prompts computed by decode workers: no prefill worker pulls, or no broker is up.",
            "reason",
        )
        for reason in (NO_PULLER, NO_BROKER):
            self.unpulled_prompts.labels(reason)
        self.stages, self.genai = StageMetrics(self), GenAIMetrics(self)
        self.tenants = TenantMetrics()
        self.scrape(self.tenants.families)
        self.classes = TenantMetrics(CLASS)
        self.scrape(self.classes.families)
        self.retention = SessionRetention(self)
        fast = self._fast_histogram
        self.itl = fast(
            "pigou_inter_token_latency_seconds",
            "Between two chunks of a stream, for each token of the later one.", _ITL,
        )  # fmt: skip
        self.decision = fast(
            "pigou_game_decision_seconds", "Seconds to compute one routing decision.", _DECISION
        )
        self.cost = fast(
            "pigou_game_routing_cost", "Cost of the chosen workers, in the policy's unit.", _COST
        )
        self.regret = fast(
            "pigou_game_regret_seconds",
            "Extra cost of a choice to all requests over that of the best candidate.", _REGRET,
        )  # fmt: skip
        self.overlap = fast(
            "pigou_game_overlap_blocks", "Leading blocks of a prompt that its worker holds.",
            _BLOCKS,
        )  # fmt: skip
        self.overlap_ratio = fast(
            "pigou_game_overlap_ratio", "Share of a prompt that its worker holds.", _SHARES
        )

    def _fast_histogram(self, name: str, help: str, buckets: Sequence[float]) -> FastHistogram:
        made = FastHistogram(name, help, buckets)
        self.registry.register(made)
        return made

    def decided(
        self, why: Explanation, block_size: int, keys: Mapping[int, BlockKeys] = NO_KEYS
    ) -> None:
        """Count a decision; `keys` are the prompt's block keys, on first attempts only."""
        cached = int(why.cached[why.chosen])
        self.cost.observe(float(why.costs[why.chosen]))
        self.regret.observe(why.regret)
        self.overlap.observe(-(-cached // block_size))
        self.overlap_ratio.observe(cached / why.prompt)
        if block_size in keys:
            self.retention.take(keys[block_size], cached // block_size)

    def usage(self, tenant: str) -> dict[str, float]:
        """Return a tenant's tokens so far, by counter name."""
        counters = {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
        }
        return {
            name: sum(
                sample.value
                for family in counter.collect()
                for sample in family.samples
                if sample.labels[TENANT] == tenant and sample.name.endswith("_total")
            )
            for name, counter in counters.items()
        }

    def read(self, outcome: str, read: RemoteKVFetch) -> None:
        """Count the outcome of a remote KV fetch (`upstream.fetch_kv`)."""
        self.reads.labels(outcome).inc()
        if outcome == "offered":
            self.read_tokens.inc(read.tokens)
            self.read_saves.inc(read.saves)


class FastHistogram(BucketCounts, Collector):
    """A histogram for use by one thread."""

    observe = BucketCounts.add

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._name, self._help = name, help

    def describe(self) -> list[Metric]:
        """Return name and help, without values."""
        return [HistogramMetricFamily(self._name, self._help)]

    def collect(self) -> Iterator[Metric]:
        """Yield the cumulative counts."""
        yield HistogramMetricFamily(self._name, self._help, self.buckets, sum_value=self.total)


def worker_families(rows: Rows) -> Iterator[Metric]:
    """Yield the fleet's table as `pigou_worker_*`."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for worker, role, values in rows:
        for name, value in values.items():
            if name not in families:
                kind = CounterMetricFamily if name in _WORKER_COUNTERS else GaugeMetricFamily
                families[name] = kind(
                    f"pigou_worker_{_WORKER_UNITS.get(name, name)}",
                    f"{name.replace('_', ' ').capitalize()} of a worker.",
                    labels=["worker", "role"],
                )
            families[name].add_metric([worker, role], value)
    yield from families.values()


class StageMetrics:
    """Histograms of request stages, and stall counters; for the event loop only."""

    def __init__(self, metrics: MetricSet) -> None:
        seconds = metrics.histogram
        self.queue_wait = seconds(  # from asking for workers to the decision, each attempt
            "pigou_queue_wait_seconds",
            "Wait at the gateway: within the limits of a key, and for workers.", _STAGE,
        )  # fmt: skip
        self.tokenize = seconds(
            "pigou_tokenize_seconds", "Tokenizing a prompt, and the keys of its blocks.", _STAGE
        )
        self.transfer = seconds(
            "pigou_transfer_seconds", "From leg 1's reply to the first token of leg 2.", _STAGE
        )
        self._delivery = seconds(
            "pigou_delivery_seconds",
            "Time of a stream in which bytes waited for its client to read them.", _STAGE,
        )  # fmt: skip
        self._stalls = metrics.counter(
            "pigou_stream_stalls", "Pauses of streams above 10 times the median inter-token "
            "latency, by cause.", "cause",
        )  # fmt: skip
        self._stall_seconds = metrics.counter(
            "pigou_stream_stall_seconds", "Seconds of stream pauses.", "cause"
        )
        for cause in ("client", "engine"):
            self._stalls.labels(cause)
            self._stall_seconds.labels(cause)
        self.typical_itl_s = 0.0  # running median of the seconds between tokens; 0 before any
        self._gaps = 0

    def gap(self, seconds: float) -> bool:
        """Record the seconds per token between two reads of a stream; return True for a stall.

        The median is frugal (Ma et al. 2013, arXiv 1407.1121, with relative steps).
        """
        typical = self.typical_itl_s
        self._gaps += 1
        if seconds <= typical:
            self.typical_itl_s = typical / _STEP
            return False
        self.typical_itl_s = typical * _STEP or seconds
        return typical > 0.0 and seconds > STALL_RATIO * typical and self._stall("engine", seconds)

    def client_blocked(self, nanoseconds: int) -> None:
        """Count a pause during which bytes waited for a client."""
        seconds = nanoseconds / SECOND
        if self.typical_itl_s and seconds > STALL_RATIO * self.typical_itl_s:
            self._stall("client", seconds)

    def delivered(self, nanoseconds: int) -> None:
        """Count a stream's total time of waiting for its client."""
        self._delivery.observe(nanoseconds / SECOND)

    def _stall(self, cause: StallCause, seconds: float) -> bool:
        counts = self._gaps > _WARM_UP and seconds > MIN_STALL_S
        if counts:
            self._stalls.labels(cause).inc()
            self._stall_seconds.labels(cause).inc(seconds)
        return counts


class SessionRetention:
    """Counts blocks repeated from a session's earlier prompts, and those still cached."""

    def __init__(self, metrics: MetricSet) -> None:
        self._returned = metrics.counter(
            "pigou_session_blocks_returned",
            "KV blocks of earlier prompts that a session's next prompt begins with.",
        )
        self._retained = metrics.counter(
            "pigou_session_blocks_retained",
            "Returned blocks still cached on the worker that computes the next prompt.",
        )
        self._last_blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, keys: BlockKeys, cached_blocks: int) -> None:
        """Count a routed prompt's block keys, and how many the worker had cached."""
        if not len(keys):
            return
        chain: list[int] = keys.tolist()
        for index in range(len(chain) - 1, -1, -1):
            if chain[index] in self._last_blocks:
                self._returned.inc(index + 1)
                self._retained.inc(min(cached_blocks, index + 1))
                del self._last_blocks[chain[index]]  # the session ends further on now
                break
        self._last_blocks[chain[-1]] = None
        if len(self._last_blocks) > _MAX_SESSIONS:
            self._last_blocks.popitem(last=False)


class TenantRow:
    """Requests of a tenant, or of several."""

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.cached_tokens = 0
        self.ttft, self.duration = BucketCounts(_TENANT_TTFT), BucketCounts(_TENANT_DURATION)

    def add(self, other: TenantRow) -> None:
        """Add another row."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.ttft.merge(other.ttft)
        self.duration.merge(other.duration)


class TenantMetrics:
    """Latency and cache hits by tenant: those with most requests, and the others' sum.

    A tenant that leaves the shown ones is added to the others, so that no series falls. With
    another `label` the rows are of classes.
    """

    def __init__(self, label: str = TENANT, shown: int = MAX_SHOWN_TENANTS) -> None:
        self._label, self._max_shown = label, shown
        self._rows: dict[str, TenantRow] = {}
        self._others = TenantRow()
        self._counts: Counter[str] = Counter()  # requests of all tenants

    def ended(self, run: GatewayRun, error: str) -> None:
        """Count a request; latency only if it succeeded."""
        row = self._row(run.parsed.tenant if self._label == TENANT else class_label(run.workload))
        row.requests += 1
        computed = None if run.metered is None else run.metered.computed
        if computed is not None:
            row.prompt_tokens += computed.prompt
            row.cached_tokens += max(0, computed.prompt - computed.uncached)
        if error:
            return
        row.duration.add((time.monotonic_ns() - run.parsed.arrival) / SECOND)
        if run.ttft_s is not None:
            row.ttft.add(run.ttft_s)

    def _row(self, tenant: str) -> TenantRow:
        self._counts[tenant] += 1
        if tenant in self._rows:
            return self._rows[tenant]
        if len(self._rows) >= self._max_shown:
            smallest = min(self._rows, key=self._counts.__getitem__)
            if self._counts[tenant] <= 2 * self._counts[smallest]:
                return self._others
            self._others.add(self._rows.pop(smallest))
        row = self._rows[tenant] = TenantRow()
        return row

    def families(self) -> Iterator[Metric]:
        """Yield `pigou_tenant_*`, or `pigou_class_*`."""
        label, rows = self._label, [*self._rows.items()]
        if label == TENANT:
            rows.append((OTHER_TENANTS, self._others))
        elif not rows:
            return
        for name, text in (
            ("requests", f"Requests of a {label} that models were asked for."),
            ("prompt_tokens", "Prompt tokens that began to be answered."),
            ("cached_tokens", "Those of them that were cached on their worker."),
        ):
            samples = [((tenant,), getattr(row, name)) for tenant, row in rows]
            yield counter_family(f"pigou_{label}_{name}", text, samples, label)
        for name, field, text in (
            ("time_to_first_token", "ttft", "From arrival to the first token."),
            ("request_duration", "duration", "From arrival to the reply's end."),
        ):
            family = HistogramMetricFamily(f"pigou_{label}_{name}_seconds", text, labels=[label])
            for tenant, row in rows:
                counts: BucketCounts = getattr(row, field)
                family.add_metric([tenant], counts.buckets, counts.total)
            yield family


class GenAIMetrics:
    """The three histograms `gen_ai_server_*`."""

    def __init__(self, metrics: MetricSet) -> None:
        self._duration = metrics.histogram(
            "gen_ai_server_request_duration_seconds", "From arrival to the end of the reply.",
            _GENAI_DURATION, *_GENAI_LABELS, "error_type",
        )  # fmt: skip
        self._first_token = metrics.histogram(
            "gen_ai_server_time_to_first_token_seconds", "From arrival to the first token.",
            _GENAI_FIRST_TOKEN, *_GENAI_LABELS,
        )  # fmt: skip
        self._per_token = metrics.histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean seconds for a token after the first one.", _GENAI_PER_TOKEN, *_GENAI_LABELS,
        )  # fmt: skip

    def ended(self, run: GatewayRun, requested: str, served: str, error: str) -> None:
        """Count a request by its models' names; times between tokens only if it succeeded."""
        parsed, stats = run.parsed, run.stats
        operation = "chat" if parsed.chat else "text_completion"
        labels = (operation, PROVIDER, requested, served)
        duration_s = (time.monotonic_ns() - parsed.arrival) / SECOND
        self._duration.labels(*labels, error).observe(duration_s)
        first_s = run.ttft_s
        if first_s is None or error:
            return
        self._first_token.labels(*labels).observe(first_s)
        gaps = stats.completion_tokens / parsed.sequences - 1
        if gaps > 0:
            self._per_token.labels(*labels).observe((duration_s - first_s) / gaps)
