"""The gateway's own metrics, under `pigou_` names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
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
from pigou.gateway.genai_metrics import GenAIMetrics
from pigou.gateway.plane_driver import NO_BROKER, NO_PULLER
from pigou.gateway.session_retention import SessionRetention
from pigou.gateway.stage_metrics import StageMetrics
from pigou.request import BlockKeys

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
            300, 600)  # fmt: skip

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
Rows = Iterable[tuple[str, str, dict[str, float]]]


#: Label with the tenant's name.
TENANT = "tenant"
#: Label with the model's name, as vLLM calls it.
MODEL = "model_name"
BUILD_INFO = "pigou_build_info"


class BuildInfo(Collector):
    """The gauge `pigou_build_info`: 1, with the version as its label."""

    def describe(self) -> Iterable[Metric]:
        """Return the family without samples."""
        return [_build_info()]

    def collect(self) -> Iterator[Metric]:
        """Yield the one sample."""
        family = _build_info()
        family.add_metric([__version__], 1)
        yield family


def _build_info() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        BUILD_INFO, "Version of Pigou; the value is always 1.", labels=["version"]
    )


class Metrics:
    """Counters and histograms of requests, in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(BuildInfo())
        self.requests = Counter(
            "pigou_requests", "Requests by route and HTTP status.",
            ["route", "status"], registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "pigou_prompt_tokens", "Prompt tokens of finished requests.",
            ["tenant"], registry=self.registry,
        )  # fmt: skip
        self.generation_tokens = Counter(
            "pigou_generation_tokens", "Generated tokens that passed through.",
            ["tenant"], registry=self.registry,
        )  # fmt: skip
        self.migrations = Counter(
            "pigou_migrations", "Requests sent to another worker after one failed, by phase.",
            ["phase", "reason"], registry=self.registry,
        )  # fmt: skip
        self.unfinished = Counter(
            "pigou_requests_failed", "Requests that no worker could finish.",
            ["reason"], registry=self.registry,
        )  # fmt: skip
        self.cancelled = Counter(
            "pigou_requests_cancelled", "Requests whose client left.", registry=self.registry
        )
        self.stalled = Counter(
            "pigou_clients_stalled", "Streams cut off because their client took nothing.",
            registry=self.registry,
        )  # fmt: skip
        self.retried = Counter(
            "pigou_client_retries", "Requests whose client says that it tries once more.",
            registry=self.registry,
        )  # fmt: skip
        self.shed = Counter(
            "pigou_requests_shed", "Requests refused because the fleet was full.",
            registry=self.registry,
        )  # fmt: skip
        self.overflowed = Counter(
            "pigou_requests_overflowed", "Requests that went to another model or fleet.",
            ["to"], registry=self.registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "pigou_time_to_first_token_seconds", "From arrival to the first token relayed.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.prefill = Histogram(
            "pigou_prefill_leg_seconds", "From leg 1's request to its reply.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.duration = Histogram(
            "pigou_request_duration_seconds", "From arrival to the end of the reply.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.reads = Counter(
            "pigou_peer_reads", "Prompts that were to be read from another worker's cache.",
            ["outcome"], registry=self.registry,
        )  # fmt: skip
        self.read_tokens = Counter(
            "pigou_peer_read_tokens", "Tokens that are expected to come so.",
            registry=self.registry,
        )  # fmt: skip
        self.read_saves = Counter(
            "pigou_game_peer_read_saved_seconds", "Seconds that this is expected to save.",
            registry=self.registry,
        )  # fmt: skip
        self.inflight = Gauge(
            "pigou_requests_inflight", "Requests being served.", registry=self.registry
        )
        self.queued = Gauge(
            "pigou_requests_queued", "Requests that wait for a worker.", registry=self.registry
        )
        self.prefill_queue = Gauge(
            "pigou_prefill_queue_prompts",
            "Prompts of all gateways that prefill workers are to pull, or have claimed.",
            registry=self.registry,
        )
        self.unpulled_prompts = Counter(
            "pigou_prefill_queue_unpulled",
            "Prompts that decode workers computed: no worker of theirs pulls, or no broker is up.",
            ["reason"],
            registry=self.registry,
        )
        for reason in (NO_PULLER, NO_BROKER):
            self.unpulled_prompts.labels(reason)

        self.stages = StageMetrics(self.registry)
        self.genai = GenAIMetrics(self.registry)
        self.retention = SessionRetention(self.registry)
        self.itl = self._fast(
            "pigou_inter_token_latency_seconds",
            "Between two chunks of a stream, for each token of the later one.", _ITL,
        )  # fmt: skip
        self.decision = self._fast(
            "pigou_game_decision_seconds", "What one routing decision takes to compute.", _DECISION
        )
        self.cost = self._fast(
            "pigou_game_routing_cost", "Cost of the chosen workers, in the policy's unit.", _COST
        )
        self.regret = self._fast(
            "pigou_game_regret_seconds",
            "What a choice costs everybody more than the best candidate would have.", _REGRET,
        )  # fmt: skip
        self.overlap = self._fast(
            "pigou_game_overlap_blocks",
            "Leading blocks of a prompt that its worker holds.",
            _BLOCKS,
        )
        self.overlap_ratio = self._fast(
            "pigou_game_overlap_ratio", "Share of a prompt that its worker holds.", _SHARES
        )

    def decided(
        self,
        why: Explanation,
        block_size: int,
        keys: Mapping[int, BlockKeys] = NO_KEYS,
    ) -> None:
        """Count a decision.

        Args:
            keys: of the prompt's blocks, by size; empty where they are not known, or the request
                was routed before.
        """
        cached = int(why.cached[why.chosen])
        self.cost.observe(float(why.costs[why.chosen]))
        self.regret.observe(why.regret)
        self.overlap.observe(-(-cached // block_size))
        self.overlap_ratio.observe(cached / why.prompt)
        if block_size in keys:
            self.retention.take(keys[block_size], cached // block_size)

    def usage(self, tenant: str) -> dict[str, float]:
        """Return a tenant's tokens so far, by the names of their counters."""
        counters = {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
        }
        return {
            name: sum(
                sample.value
                for family in counter.collect()
                for sample in family.samples
                if sample.labels["tenant"] == tenant and sample.name.endswith("_total")
            )
            for name, counter in counters.items()
        }

    def read(self, outcome: str, read: RemoteKVFetch) -> None:
        """Count the outcome of a remote KV fetch (`upstream.fetch_kv`)."""
        self.reads.labels(outcome).inc()
        if outcome == "offered":
            self.read_tokens.inc(read.tokens)
            self.read_saves.inc(read.saves)

    def _fast(self, name: str, help: str, bounds: Sequence[float]) -> FastHistogram:
        made = FastHistogram(name, help, bounds)
        self.registry.register(made)
        return made

    def add_fleet(self, rows: Callable[[], Rows]) -> None:
        """Export the fleet's table, read anew at each scrape, as `pigou_worker_*`."""
        self.registry.register(_Fleet(rows))

    def add_count(self, name: str, help: str, read: Callable[[], int]) -> None:
        """Export a number that only rises, read anew at each scrape."""
        self.registry.register(_Count(name, help, read))

    def add(self, collector: Collector) -> None:
        """Export what a collector yields."""
        self.registry.register(collector)


class _Count(Collector):
    def __init__(self, name: str, help: str, read: Callable[[], int]) -> None:
        self._name, self._help, self._read = name, help, read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._help, value=self._read())


class _Fleet(Collector):
    def __init__(self, rows: Callable[[], Rows]) -> None:
        self._rows = rows

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for worker, role, values in self._rows():
            for name, value in values.items():
                if name not in families:
                    families[name] = _worker_family(name)
                families[name].add_metric([worker, role], value)
        yield from families.values()


def _worker_family(name: str) -> GaugeMetricFamily | CounterMetricFamily:
    help = f"{name.replace('_', ' ').capitalize()} of a worker."
    made = CounterMetricFamily if name in _WORKER_COUNTERS else GaugeMetricFamily
    name = _WORKER_UNITS.get(name, name)
    return made(f"pigou_worker_{name}", help, labels=["worker", "role"])


class FastHistogram(Collector):
    """Counts observations by bucket; to be used by one thread.

    Attributes:
        total: sum of all observations.
    """

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        """Begin; `bounds` are the upper bounds of the buckets, ascending."""
        self._name = name
        self._help = help
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def describe(self) -> list[Metric]:
        """Return its name and help, without values."""
        return [HistogramMetricFamily(self._name, self._help)]

    def collect(self) -> Iterator[Metric]:
        """Yield the cumulative counts."""
        buckets, so_far = [], 0
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), so_far))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self.total)
