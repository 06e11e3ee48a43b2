"""The metrics page: one registry, written for an administrator, a tenant, or a scraper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


def page(registry: CollectorRegistry, model: str, *, tenant: str | None = None) -> bytes:
    """Return the metrics in the text format of Prometheus.

    Args:
        registry: all metrics.
        model: the fleet's model; the label `model_name` of every sample but the build's.
        tenant: writes this tenant's own samples, and nothing else; None writes all.
    """
    return generate_latest(_View(registry, model, lambda families: _own(families, tenant)))


def page_without_tenants(registry: CollectorRegistry, model: str) -> bytes:
    """Return the metrics without the families that name tenants."""
    return generate_latest(_View(registry, model, _nameless))


class _View(Collector):
    """Metrics of a registry, filtered and labelled as they are read."""

    def __init__(self, registry: CollectorRegistry, model: str, keep: _Filter) -> None:
        self._registry, self._model, self._keep = registry, model, keep

    def collect(self) -> Iterator[Metric]:
        for family in self._keep(self._registry.collect()):
            yield _labelled(family, self._model)


def _own(families: Iterable[Metric], tenant: str | None) -> Iterator[Metric]:
    for family in families:
        if tenant is None:
            yield family
        elif kept := [s for s in family.samples if s.labels.get(TENANT) == tenant]:
            yield _with(family, kept)


def _nameless(families: Iterable[Metric]) -> Iterator[Metric]:
    return (each for each in families if not any(TENANT in s.labels for s in each.samples))


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
