"""Tracing configuration: options and OpenTelemetry variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from pigou import __version__
from pigou.config import ConfigError, check_bounds, is_http_url, option

#: Endpoint that exports nothing: traces are for `GET /traces` alone.
MEMORY = "memory"
_PATH = "/v1/traces"
_GROUP = "Traces"
_ENDPOINT, _BASE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_SAMPLERS = ("always_on", "always_off", "traceidratio")


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Destination and sampling of traces."""

    otlp_traces_endpoint: Annotated[
        str,
        option(
            "OTLP/HTTP endpoint of traces, as http://HOST:4318/v1/traces; `memory` only keeps the "
            "last ones for GET /traces. By default from OTEL_EXPORTER_OTLP_*.",
            _GROUP,
            name="otlp_traces_endpoint",
        ),
    ] = ""
    sample_ratio: Annotated[
        float | None,
        option(
            "Share of traces to export if the client does not decide. By default from "
            "OTEL_TRACES_SAMPLER, else all.",
            _GROUP,
            name="trace_sample_ratio",
            show_default=False,
        ),
    ] = None
    slow: Annotated[
        float,
        option(
            "Export unsampled traces, too, of requests that failed or took at least this many "
            "seconds; 0 exports neither.",
            _GROUP,
            name="trace_slow",
        ),
    ] = 10.0
    memory: Annotated[
        int, option("Traces kept for GET /traces; 0 for none.", _GROUP, name="trace_memory")
    ] = 256

    def __post_init__(self) -> None:
        url = self.otlp_traces_endpoint
        if url and url != MEMORY:
            check_endpoint("tracing.otlp_traces_endpoint", url)
        check_bounds("tracing.sample_ratio", self.sample_ratio or 0.0, ge=0, le=1)
        check_bounds("tracing.slow", self.slow, ge=0, le=86_400, unit=" seconds")
        check_bounds("tracing.memory", self.memory, ge=0, le=100_000)

    def arguments(self) -> list[str]:
        """Return the options for a worker of the same fleet."""
        if not self.otlp_traces_endpoint and self == TracingConfig():
            return []
        given = ["--otlp-traces-endpoint", self.otlp_traces_endpoint]
        given = given if self.otlp_traces_endpoint else []
        if self.sample_ratio is not None:
            given += ["--trace-sample-ratio", str(self.sample_ratio)]
        return [*given, "--trace-slow", str(self.slow), "--trace-memory", str(self.memory)]


class ExportTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Destination of spans."""

    url: str = ""  # empty to export nothing
    headers: dict[str, str] = {}
    timeout_s: float = 10.0
    compress: bool = False  # gzip
    certificate: str = ""  # CA file; empty for the system's


def export_target(
    config: TracingConfig, environ: Mapping[str, str] = os.environ
) -> ExportTarget | None:
    """Return the target by options and OTEL_* variables, or None; raises ConfigError."""
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    url, own = config.otlp_traces_endpoint, bool(config.otlp_traces_endpoint)
    if url == MEMORY:
        return ExportTarget()
    if not url and (is_off or environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"):
        return None
    if own:
        url = with_default_path(url)
    elif url := environ.get(_ENDPOINT, ""):
        check_endpoint(_ENDPOINT, url)
    elif base := environ.get(_BASE, ""):
        check_endpoint(_BASE, base)
        url = base.rstrip("/") + _PATH
    if not url:
        return None
    protocol = _variable(environ, "PROTOCOL")
    if protocol not in ("", "http/json", "http/protobuf"):
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; traces are sent by OTLP/HTTP alone: "
            "set it to http/json, with the receiver's HTTP port (4318)"
        )
    compression = _variable(environ, "COMPRESSION")
    if compression not in ("", "none", "gzip"):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_COMPRESSION is {compression!r}; give gzip or none")
    return ExportTarget(
        url=url,
        headers=_headers(_variable(environ, "HEADERS")),
        timeout_s=_timeout_s(_variable(environ, "TIMEOUT")),
        compress=compression == "gzip",
        certificate=_variable(environ, "CERTIFICATE"),
    )


def sampled_share(config: TracingConfig, environ: Mapping[str, str] = os.environ) -> float:
    """Return the default sampling ratio; raises ConfigError."""
    if config.sample_ratio is not None:
        return config.sample_ratio
    name = environ.get("OTEL_TRACES_SAMPLER", "").removeprefix("parentbased_") or "always_on"
    if name not in _SAMPLERS:
        raise ConfigError(f"OTEL_TRACES_SAMPLER is {name!r}; give one of {', '.join(_SAMPLERS)}")
    if name != "traceidratio":
        return float(name == "always_on")
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "1.0")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG is {text!r}; it must be in [0, 1]")
    return ratio


def resource(service: str, environ: Mapping[str, str] = os.environ) -> dict[str, str | int]:
    """Return this process's attributes, common to all spans."""
    given = _pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    host = socket.gethostname()
    own: dict[str, str | int] = {
        "service.name": service,
        "service.version": __version__,
        "service.instance.id": f"{host}:{os.getpid()}",
        "host.name": host,
        "process.pid": os.getpid(),
        "telemetry.sdk.language": "python",
    }
    name = environ.get("OTEL_SERVICE_NAME", "")
    return own | given | ({"service.name": name} if name else {})


def check_endpoint(name: str, url: str) -> None:
    """Raise ConfigError unless the URL is of an HTTP server."""
    if not is_http_url(url):
        raise ConfigError(
            f"{name} is {url!r}; give the URL of an OTLP/HTTP receiver, such as "
            f"http://127.0.0.1:4318{_PATH}, or {MEMORY}"
        )


def with_default_path(url: str) -> str:
    """Return an endpoint, with the OTLP/HTTP path if it has none."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else url


def _variable(environ: Mapping[str, str], name: str) -> str:
    """Return an exporter variable; the traces one overrides the general one."""
    own = environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "")
    return (own or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")).strip()


def _headers(text: str) -> dict[str, str]:
    pairs = _pairs(text)
    for name, value in pairs.items():
        if not name.isascii() or not (name + value).isprintable():
            raise ConfigError(f"OTEL_EXPORTER_OTLP_HEADERS has {name!r}, which is no header")
    return pairs


def _pairs(text: str) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in text.split(",") if "=" in entry)
    return {unquote(key.strip()): unquote(value.strip()) for key, _, value in pairs}


def _timeout_s(text: str) -> float:
    if not text:
        return 10.0
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TIMEOUT is {text!r}; give milliseconds")
    return int(text) / 1000
