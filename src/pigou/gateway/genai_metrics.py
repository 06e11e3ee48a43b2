"""OpenTelemetry's server metrics of generative AI, under the names that Prometheus gives them.

Names, attributes and buckets: semantic conventions for generative AI, `gen_ai.server.*` (status:
development). A dot is an underscore in Prometheus, and the unit ends the name.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram

_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96,
             81.92)  # fmt: skip
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
                10)  # fmt: skip
#: `gen_ai.provider.name` of this server.
PROVIDER = "pigou"
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model",
           "gen_ai_response_model")  # fmt: skip
_ERROR = "error_type"


@dataclass(frozen=True, slots=True)
class GenAIRequest:
    """A request that ended, as the conventions describe it."""

    chat: bool  # whether its operation is `chat`, and not `text_completion`
    request_model: str  # name that it asked for
    response_model: str  # name of the model that served it
    error: str  # its `error.type`; empty where it succeeded
    duration_s: float  # from its arrival to the end of its reply
    # from its arrival to its first token; None where there was none, or the reply came in one
    # piece.
    first_token_s: float | None
    tokens: int  # generated, of all its sequences
    sequences: int = 1


class GenAIMetrics:
    """The three histograms `gen_ai_server_*`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds", "From arrival to the end of the reply.",
            [*_LABELS, _ERROR], buckets=_DURATION, registry=registry,
        )  # fmt: skip
        self._first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds", "From arrival to the first token.",
            _LABELS, buckets=_FIRST_TOKEN, registry=registry,
        )  # fmt: skip
        self._per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean seconds for a token after the first one.",
            _LABELS, buckets=_PER_TOKEN, registry=registry,
        )  # fmt: skip

    def ended(self, request: GenAIRequest) -> None:
        """Count a request; its times between tokens only where it succeeded."""
        operation = "chat" if request.chat else "text_completion"
        labels = (operation, PROVIDER, request.request_model, request.response_model)
        self._duration.labels(*labels, request.error).observe(request.duration_s)
        first_s = request.first_token_s
        if first_s is None or request.error:
            return
        self._first_token.labels(*labels).observe(first_s)
        gaps = request.tokens / request.sequences - 1
        if gaps > 0:
            self._per_token.labels(*labels).observe((request.duration_s - first_s) / gaps)
