"""The text of `/metrics`: all metrics, labelled, without what a key may not see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pigou import __version__

#: Label with the tenant's name.
TENANT = "tenant"
#: Label with the model's name, as vLLM calls it.
MODEL = "model_name"
_BUILD = "pigou_build_info"
_Filter: TypeAlias = Callable[[Iterable[Metric]], Iterator[Metric]]


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


#: Metrics of one model: its registry and name.
ModelPage: TypeAlias = tuple[CollectorRegistry, str]
#: Families that are counted before the model of a request is known, and those of it besides.
_OF_GATEWAY = (_BUILD, "pigou_requests_inflight")
_OF_BOTH = ("pigou_requests", "pigou_requests_cancelled", "pigou_requests_shed")


def page(
    registry: CollectorRegistry, model: str, models: Sequence[ModelPage] = (),
    *, tenant: str | None = None,
) -> bytes:  # fmt: skip
    """Return the metrics in the text format of Prometheus.

    Args:
        registry: all metrics; of the gateway alone where there are several `models`.
        model: the fleet's model; the label `model_name` of every sample but the build's.
        models: metrics of each of several models.
        tenant: writes this tenant's own samples, and nothing else; None writes all.
    """
    return generate_latest(
        _FilteredMetrics(registry, model, models, lambda families: _own(families, tenant))
    )


def samples(
    registry: CollectorRegistry, model: str, models: Sequence[ModelPage] = ()
) -> Iterator[Sample]:
    """Yield the samples of a page with all metrics; arguments as of `page`."""
    for family in _FilteredMetrics(registry, model, models, iter).collect():
        yield from family.samples


def page_without_tenants(
    registry: CollectorRegistry, model: str, models: Sequence[ModelPage] = ()
) -> bytes:
    """Return the metrics with sums over all tenants in place of each; arguments as of `page`."""
    return generate_latest(_FilteredMetrics(registry, model, models, _nameless))


class _FilteredMetrics(Collector):
    """Metrics of a registry, filtered and labelled as they are read."""

    def __init__(
        self, registry: CollectorRegistry, model: str, models: Sequence[ModelPage], keep: _Filter
    ) -> None:
        self._registry, self._model, self._models = registry, model, models
        self._keep = keep

    def collect(self) -> Iterator[Metric]:
        own = (_labelled(family, self._model) for family in self._registry.collect())
        yield from self._keep(self._merged(own) if self._models else own)

    def _merged(self, own: Iterable[Metric]) -> Iterator[Metric]:
        """Yield each family once, with the samples of all models."""
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
    """Put the samples of a family to those that are there under its name."""
    known = families.setdefault(family.name, family)
    if known is not family:
        families[family.name] = _with(known, [*known.samples, *family.samples])


def _own(families: Iterable[Metric], tenant: str | None) -> Iterator[Metric]:
    for family in families:
        if tenant is None:
            yield family
        elif samples := [s for s in family.samples if s.labels.get(TENANT) == tenant]:
            yield _with(family, samples)


def _nameless(families: Iterable[Metric]) -> Iterator[Metric]:
    for family in families:
        if any(TENANT in sample.labels for sample in family.samples):
            yield _with(family, _summed(family.samples))
        else:
            yield family


def _summed(samples: Iterable[Sample]) -> list[Sample]:
    """Return counters without the label of tenants, those that are the same then as their sum."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != TENANT)
        sums[sample.name, labels] = sums.get((sample.name, labels), 0.0) + sample.value
    return [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]


def _labelled(family: Metric, model: str) -> Metric:
    if family.name == _BUILD or not model:
        return family
    label = {MODEL: model}
    return _with(family, [_relabelled(sample, label) for sample in family.samples])


def _relabelled(sample: Sample, label: dict[str, str]) -> Sample:
    return sample._replace(labels=label | sample.labels)


def _with(family: Metric, samples: list[Sample]) -> Metric:
    made = Metric(family.name, family.documentation, family.type, family.unit)
    made.samples = samples
    return made


def _build_info() -> GaugeMetricFamily:
    return GaugeMetricFamily(_BUILD, "Version of Pigou; the value is always 1.", labels=["version"])
