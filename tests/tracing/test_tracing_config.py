"""Options say where traces go, and OpenTelemetry's variables where there are none."""

from __future__ import annotations

import pytest

from pigou.config import ConfigError
from pigou.tracing.config import (
    ExportTarget,
    TracingConfig,
    export_target,
    resource,
    sampled_share,
)

OFF = TracingConfig()
OWN = TracingConfig(otlp_traces_endpoint="http://own:4318")
BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://base:4318/x/"}


def url(config: TracingConfig, environ: dict[str, str]) -> str | None:
    target = export_target(config, environ)
    return None if target is None else target.url


def test_nothing_is_traced_unless_it_is_asked_for() -> None:
    assert export_target(OFF, {}) is None
    assert export_target(OFF, BASE | {"OTEL_SDK_DISABLED": "true"}) is None
    assert export_target(OFF, BASE | {"OTEL_TRACES_EXPORTER": "none"}) is None
    assert OFF.arguments() == []


def test_the_endpoint_is_the_options_then_that_of_traces_then_that_of_all_signals() -> None:
    traces = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:4318/as/it/is"}
    assert url(OWN, BASE | traces) == "http://own:4318/v1/traces"
    assert url(OFF, BASE | traces) == "http://traces:4318/as/it/is"
    assert url(OFF, BASE) == "http://base:4318/x/v1/traces"
    assert export_target(TracingConfig(otlp_traces_endpoint="memory"), BASE) == ExportTarget()


def test_headers_timeout_and_packing_are_those_of_the_environment() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=all",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "api-key=a%20b, x=1",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
    }
    target = export_target(OWN, environ)
    assert target is not None
    assert target.headers == {"api-key": "a b", "x": "1"}
    assert (target.timeout_s, target.compress) == (2.5, True)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/json"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "gzip or none"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "milliseconds"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=%0d%0ax"}, "no header"),
    ],
)
def test_a_variable_that_cannot_be_honoured_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        export_target(OWN, environ)


def test_values_out_of_range_are_refused() -> None:
    for bad in ({"sample_ratio": 1.5}, {"slow": -1.0}, {"memory": -1},
                {"otlp_traces_endpoint": "localhost:4317"},
                {"otlp_traces_endpoint": "http://[::1"}):  # fmt: skip
        with pytest.raises(ConfigError, match=f"tracing.{next(iter(bad))} is"):
            TracingConfig(**bad)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT is"):
        export_target(OFF, {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"})


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, 1.0),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0.0),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, 1.0),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
          "OTEL_TRACES_SAMPLER_ARG": "0.25"}, 0.25),
    ],
)  # fmt: skip
def test_the_sampler_is_the_environments_unless_an_option_says(
    environ: dict[str, str], share: float
) -> None:
    assert sampled_share(OFF, environ) == share
    assert sampled_share(TracingConfig(sample_ratio=0.5), environ) == 0.5


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(ConfigError, match="traceidratio"):
        sampled_share(OFF, {"OTEL_TRACES_SAMPLER": "jaeger_remote"})
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER_ARG"):
        sampled_share(OFF, {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "x"})


def test_the_service_is_called_as_the_environment_says() -> None:
    given = {"OTEL_RESOURCE_ATTRIBUTES": "service.name=low,region=eu%20west"}
    assert resource("pigou-gateway", {})["service.name"] == "pigou-gateway"
    assert resource("g", given)["service.name"] == "low"
    assert resource("g", given)["region"] == "eu west"
    assert resource("g", given | {"OTEL_SERVICE_NAME": "high"})["service.name"] == "high"


def test_workers_of_the_fleet_are_told_the_same() -> None:
    config = TracingConfig(otlp_traces_endpoint="memory", sample_ratio=0.5, slow=3.0, memory=5)
    assert config.arguments() == [
        "--otlp-traces-endpoint", "memory", "--trace-sample-ratio", "0.5", "--trace-slow", "3.0",
        "--trace-memory", "5",
    ]  # fmt: skip
