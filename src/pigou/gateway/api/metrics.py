"""Metrics pages: the gateway's by key, and those of all workers federated."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pigou.gateway.api.page import Access, APIPage, APIPages, check_admin
from pigou.gateway.auth.keys import NO_KEY, Key, unauthorized
from pigou.gateway.gateway import Gateway
from pigou.gateway.metrics import BUILD_INFO, MODEL, TENANT, worker_families
from pigou.gateway.model_routing import GatewayModel
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.prices import price_families
from pigou.gateway.proxy.upstream import Upstream
from pigou.gateway.request_meter import attainment_families
from pigou.metric_rows import counter_family, gauge_family
from pigou.objectives import class_label
from pigou.tracing.exporter import exporter_families
from pigou.windows.prompts import PromptWaits

Filter: TypeAlias = Callable[[Iterable[Metric]], Iterator[Metric]]


#: Families counted by the gateway alone, and families counted there and by model.
_OF_GATEWAY = (BUILD_INFO, "pigou_requests_inflight")
_OF_BOTH = ("pigou_requests", "pigou_requests_cancelled", "pigou_requests_shed")
#: Seconds that a worker has for its page; those that need longer are left out.
TIMEOUT_S = 2.0
_MAX_LINES, _MAX_LINE_CHARS = 50_000, 16_384
_NAME, _LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r"[a-zA-Z_][a-zA-Z0-9_]*"
_PAIR = rf'({_LABEL})="((?:[^"\\]|\\["\\n])*)"'
_PAIRS = re.compile(_PAIR)
_SAMPLE = re.compile(
    rf'({_NAME})(?:\{{((?:{_LABEL}="(?:[^"\\]|\\["\\n])*"(?:, ?)?)*)\}})? +(\S+)(?: +-?\d+)?'
)
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|gauge|histogram|summary|untyped)")
_HELP = re.compile(rf"# HELP ({_NAME}) (.*)")
#: Names of a family's samples besides its own, by type.
_SUFFIXES = {
    "histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count"),
}  # fmt: skip


def pages(gateway: Gateway) -> APIPages:
    """Return `/metrics` and `/metrics/workers`, which check the key themselves."""
    for model in gateway.routing:
        _register(model)
    if gateway.tracer is not None and gateway.tracer.exporter is not None:
        gateway.metrics.scrape(partial(exporter_families, gateway.tracer.exporter))
    federation = WorkerFederation(gateway.routing)

    def key_of(request: web.Request) -> Key | None:
        keys = gateway.keys
        key = NO_KEY if keys is None else keys.find(request.headers.get("authorization"))
        if key is None and not gateway.config.open_metrics:
            raise unauthorized()
        return key

    async def metrics(request: web.Request) -> web.Response:
        """Write all metrics for an admin key, a tenant's own for its key, none without."""
        key = key_of(request)
        keep: Filter = _nameless
        if key is not None and key.admin:
            keep = iter
        elif key is not None:
            keep = partial(_own, tenant=key.tenant)
        body = generate_latest(gateway_metrics(gateway, keep))
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE_LATEST})

    async def workers(request: web.Request) -> web.Response:
        """Write the metrics of all workers, for keys that see all of `/metrics`."""
        key = key_of(request)
        if key is not None:
            check_admin(key)
        body = await federation.page()
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE_LATEST})

    return APIPages([
        APIPage("/metrics", metrics, Access.PROBE, None),
        APIPage("/metrics/workers", workers, Access.OPEN, None),
    ])  # fmt: skip


def gateway_metrics(gateway: Gateway, keep: Filter = iter) -> _FilteredMetrics:
    """Return the gateway's current metrics, labelled by model."""
    for model in gateway.routing:
        model.metrics.queued.set(model.plane_driver.queued)
        queue = model.plane_driver.prefill_queue
        model.metrics.prefill_queue.set(0 if queue is None else queue.length)
    # The gateway's own metrics count what comes before the model of a request is known.
    models = [
        (model.metrics.registry, model.name)
        for model in gateway.routing
        if model.metrics is not gateway.metrics
    ]
    name = "" if models else gateway.routing.models[0].served_name
    return _FilteredMetrics(gateway.metrics.registry, name, models, keep)


def _register(model: GatewayModel) -> None:
    """Export a model's status with its metrics."""
    metrics, driver = model.metrics, model.plane_driver
    index, repeated = driver.plane.index, driver.repeated
    metrics.scrape(lambda: worker_families(model.fleet_status.gauges()))
    metrics.scrape(lambda: price_families(*model.fleet_status.prices()))
    metrics.scrape(lambda: attainment_families(driver.meter))
    metrics.scrape(lambda: _queue_families(driver))
    metrics.scrape(lambda: [
        counter_family(
            "pigou_index_evicted_blocks",
            "Blocks that the prefix index forgot to stay within its limits.", index.evicted,
        ),
        counter_family(
            "pigou_requests_repeated", "Requests whose prompt came again within 60 s after an "
            "attempt that was not served.", repeated.count,
        ),
    ])  # fmt: skip
    metrics.scrape(lambda: _wait_families(driver.prompt_waits))


def _wait_families(prompts: PromptWaits) -> Iterator[Metric]:
    text = "From arrival to computation, of streams; to the worker, of whole replies."
    family = HistogramMetricFamily("pigou_prompt_wait_seconds", text, labels=["length"])
    for length, counts in prompts.by_length.items():
        family.add_metric([length], counts.buckets, counts.total)
    yield family
    text, begun = "Prompts that began to be computed, by their tokens.", prompts.begun_tokens
    buckets, total = begun.buckets, begun.total
    yield HistogramMetricFamily("pigou_prompt_begun_tokens", text, buckets, sum_value=total)
    late_s, tokens = prompts.maxima(time.monotonic())
    text = "Longest wait of a long prompt of the last 10 s, begun or not."
    yield gauge_family("pigou_prompt_longest_wait_seconds", text, late_s)
    text = "Longest prompt at workers before its first token."
    yield gauge_family("pigou_prompt_longest_tokens", text, tokens)


def _queue_families(driver: PlaneDriver) -> Iterator[Metric]:
    """Yield waiting requests by class and lane where they wait apart, and degraded modes."""
    admission, degradation = driver.plane.admission, driver.degradation
    if admission.lanes.some:
        states = list(admission.lanes.states(admission.queue, time.monotonic_ns()))
        labels = [
            (class_label(one.lane.workload), "long" if one.lane.is_long else "short")
            for one in states
        ]
        for name, help, value in (
            ("requests", "Requests that wait, by lane.", "waiting"),
            ("wait_seconds", "Wait of a lane's oldest request.", "waited_s"),
            ("starves", "1 if a lane waits for 10 s while others are served.", "starves"),
        ):
            values = [float(getattr(one, value)) for one in states]
            samples = list(zip(labels, values, strict=True))
            yield gauge_family(f"pigou_lane_{name}", help, samples, "class", "lane")
    if degradation.modes:
        yield gauge_family(
            "pigou_degraded_mode", "1 while a degraded mode is on.",
            [((mode,), float(degradation.is_on(mode))) for mode in degradation.modes], "mode",
        )  # fmt: skip


class _FilteredMetrics(Collector):
    """A registry's metrics, filtered and labelled on read."""

    def __init__(
        self, registry: CollectorRegistry, model: str,
        models: Sequence[tuple[CollectorRegistry, str]], keep: Filter,
    ) -> None:  # fmt: skip
        self._registry, self._model, self._models = registry, model, models
        self._keep = keep

    def collect(self) -> Iterator[Metric]:
        own = (_labelled(family, self._model) for family in self._registry.collect())
        yield from self._keep(self._merged(own) if self._models else own)

    def _merged(self, own: Iterable[Metric]) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry, model in self._models:
            for family in registry.collect():
                if family.name not in _OF_GATEWAY:
                    _join(families, _labelled(family, model))
        for family in own:
            if family.name not in families or family.name in _OF_BOTH:
                _join(families, family)
        yield from families.values()


def _join(families: dict[str, Metric], family: Metric) -> None:
    known = families.setdefault(family.name, family)
    if known is not family:
        families[family.name] = _with(known, [*known.samples, *family.samples])


def _own(families: Iterable[Metric], tenant: str) -> Iterator[Metric]:
    for family in families:
        if samples := [s for s in family.samples if s.labels.get(TENANT) == tenant]:
            yield _with(family, samples)


def _nameless(families: Iterable[Metric]) -> Iterator[Metric]:
    for family in families:
        if any(TENANT in sample.labels for sample in family.samples):
            yield _with(family, _summed(family.samples))
        else:
            yield family


def _summed(samples: Iterable[Sample]) -> list[Sample]:
    """Return counters without tenant labels, equal series summed."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != TENANT)
        sums[sample.name, labels] = sums.get((sample.name, labels), 0.0) + sample.value
    return [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]


def _labelled(family: Metric, model: str) -> Metric:
    if family.name == BUILD_INFO or not model:
        return family
    own = [sample._replace(labels={MODEL: model} | sample.labels) for sample in family.samples]
    return _with(family, own)


def _with(family: Metric, samples: list[Sample]) -> Metric:
    made = Metric(family.name, family.documentation, family.type, family.unit)
    made.samples = samples
    return made


@dataclass(frozen=True, slots=True)
class WorkerPage:
    """A worker's page."""

    labels: Mapping[str, str]  # labels for all samples: worker, role, pool, model_name
    text: str | None  # the page; None if it did not come in time


@dataclass(slots=True)
class _SampleFamily:
    type: str = "untyped"
    help: str = ""
    values: dict[str, str] = field(default_factory=dict)

    def owns(self, name: str, sample: str) -> bool:
        """True if a sample belongs to a family of this name."""
        return sample in {name + suffix for suffix in _SUFFIXES.get(self.type, ("",))}


class WorkerFederation:
    """Scrapes all workers that are up, one round at a time for all callers."""

    def __init__(self, models: Iterable[GatewayModel], timeout_s: float = TIMEOUT_S) -> None:
        self._models, self._timeout_s = models, timeout_s
        self._round: asyncio.Task[bytes] | None = None

    async def page(self) -> bytes:
        """Return the merged page in Prometheus' text format."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._collect(), name="federation")
        return await asyncio.shield(self._round)

    async def pages(self) -> list[WorkerPage]:
        """Return each worker's page."""
        targets: dict[str, tuple[Upstream, dict[str, str]]] = {}
        for model in self._models:
            rows = {row.id: row for row in model.fleet_status.rows()}
            for upstream in model.upstreams:
                worker, row = upstream.worker, rows.get(upstream.worker.id)
                labels = {
                    "worker": worker.id, "role": worker.role.value,
                    "pool": "" if row is None else row.pool, MODEL: model.served_name,
                }  # fmt: skip
                targets.setdefault(worker.url, (upstream, labels))  # a frontend of several: once
        return await asyncio.gather(*(self._page(*target) for target in targets.values()))

    async def _collect(self) -> bytes:
        return await asyncio.to_thread(federated, await self.pages())

    async def _page(self, upstream: Upstream, labels: dict[str, str]) -> WorkerPage:
        page = await upstream.page("/metrics", self._timeout_s)
        try:
            return WorkerPage(labels, None if page is None else page.decode())
        except UnicodeDecodeError:
            return WorkerPage(labels, None)


def federated(pages: Sequence[WorkerPage]) -> bytes:
    """Merge workers' metrics pages: each family once, with the samples of all.

    Labels that clash with the fleet's become `exported_...`, as in Prometheus. Comments, malformed
    lines, and families of a conflicting type are dropped.
    """
    families: dict[str, _SampleFamily] = {}
    state: list[str] = []
    for page in pages:
        fleet_labels = _written(page.labels)
        malformed = 0 if page.text is None else _merge(page, families)
        state += [
            f"pigou_worker_page_up{{{fleet_labels}}} {int(page.text is not None)}",
            f"pigou_worker_page_malformed_lines{{{fleet_labels}}} {malformed}",
        ]
    stale = sum(page.text is None for page in pages)
    out = [
        *_headed("pigou_worker_pages_stale", "Workers whose page did not come in time."),
        f"pigou_worker_pages_stale {stale}",
        *_headed("pigou_worker_page_up", "Whether a worker's page is in this one."), *state[::2],
        *_headed("pigou_worker_page_malformed_lines", "Lines of a page that were left out."),
        *state[1::2],
    ]  # fmt: skip
    for name, family in families.items():
        if family.values and not name.startswith("pigou_worker_page"):
            out += _headed(name, family.help, family.type)
            out += [f"{series} {value}" for series, value in family.values.items()]
    return "\n".join([*out, ""]).encode()


def _headed(name: str, help: str, type: str = "gauge") -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {type}"]


def _merge(page: WorkerPage, families: dict[str, _SampleFamily]) -> int:
    """Merge a page's samples into the families; return the number of dropped lines."""
    text = page.text or ""
    fleet_labels, left_out = _written(page.labels), 0
    helps: dict[str, str] = {}
    name, family = "", _SampleFamily()
    agrees = True
    for line in text.split("\n", _MAX_LINES)[:_MAX_LINES]:
        if not line or line.isspace():
            continue
        if line.startswith("#"):
            if (match := _HELP.fullmatch(line)) is not None:
                helps[match[1]] = match[2]
            elif (match := _TYPE.fullmatch(line)) is not None:
                name = match[1]
                known = families.get(name)
                family = known or _SampleFamily(match[2], helps.get(name, ""))
                families[name] = family
                agrees = family.type == match[2]
            continue
        sample = _SAMPLE.fullmatch(line) if len(line) <= _MAX_LINE_CHARS else None
        if sample is None or not _is_number(sample[3]):
            left_out += 1
            continue
        if not family.owns(name, sample[1]):  # without a type of its own
            name, agrees = sample[1], True
            family = families.setdefault(name, _SampleFamily(help=helps.get(name, "")))
            agrees = family.owns(name, name)
        if not agrees:
            left_out += 1
            continue
        own = _fleet_labelled(sample[2] or "", page.labels)
        labels = f"{own},{fleet_labels}" if own else fleet_labels
        family.values[f"{sample[1]}{{{labels}}}"] = sample[3]
    return left_out


def _fleet_labelled(labels: str, fleet: Mapping[str, str]) -> str:
    """Return a sample's labels together with the fleet's."""
    if not any(name in labels for name in fleet):
        return labels.rstrip(", ")
    pairs = []
    for name, value in _PAIRS.findall(labels):
        if name not in fleet:
            pairs.append(f'{name}="{value}"')
        elif value != fleet[name]:
            pairs.append(f'exported_{name}="{value}"')
    return ",".join(pairs)


def _written(labels: Mapping[str, str]) -> str:
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in labels.items()
    }
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
