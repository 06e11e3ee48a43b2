"""Metrics of a request's stages at the gateway: waits, tokenization, transfer, delivery, stalls."""

from __future__ import annotations

from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram

from pigou.request import SECOND

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
            120, 300, 600)  # fmt: skip
#: A gap is a stall above so many times the median, and above so many seconds: what is below is no
#: pause to a reader, and may be the gateway's own event loop.
STALL_RATIO, MIN_STALL_S = 10.0, 0.05
#: Gaps before the median is trusted, and by how much each moves it.
_WARM_UP, _STEP = 64, 1.02

#: Who made a stream pause: the client, which read nothing, or the engine, which produced nothing.
StallCause: TypeAlias = Literal["client", "engine"]


class StageMetrics:
    """Histograms of stages, and counters of stalls; used by the event loop only.

    Attributes:
        queue_wait: from asking for workers to the decision, each attempt.
        tokenize: of prompts, block keys included.
        transfer: from leg 1's reply to the first token of leg 2.
        typical_itl_s: running median of the seconds between tokens; 0 before any.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help: str) -> Histogram:
            return Histogram(f"pigou_{name}_seconds", help, buckets=_SECONDS, registry=registry)

        self.queue_wait = histogram(
            "queue_wait", "Wait at the gateway: within the limits of a key, and for workers."
        )
        self.tokenize = histogram("tokenize", "Tokenizing a prompt, and the keys of its blocks.")
        self.transfer = histogram("transfer", "From leg 1's reply to the first token of leg 2.")
        self._delivery = histogram(
            "delivery", "Time of a stream in which bytes waited for its client to read them."
        )
        self._stalls = Counter(
            "pigou_stream_stalls", "Pauses of streams above 10 times the median inter-token "
            "latency, by who made them.", ["cause"], registry=registry,
        )  # fmt: skip
        self._stall_seconds = Counter(
            "pigou_stream_stall_seconds", "Seconds of these pauses.", ["cause"], registry=registry
        )
        for cause in ("client", "engine"):
            self._stalls.labels(cause)
            self._stall_seconds.labels(cause)
        self.typical_itl_s = 0.0
        self._gaps = 0

    def gap(self, seconds: float, *, blocked: bool) -> bool:
        """Take in the seconds between two tokens of a worker's stream; return whether it stalled.

        The median is a frugal one: each gap moves it by a fixed factor, up or down (Ma et al.
        2013, arXiv 1407.1121, with steps that are relative).

        Args:
            seconds: for each token.
            blocked: within them the worker was not read, as the client took nothing. Then the gap
                tells nothing of the engine; the client's own pause is counted by `delivered`.
        """
        if blocked:
            return False
        typical, stalled = self.typical_itl_s, False
        self._gaps += 1
        if seconds > typical:
            if seconds > STALL_RATIO * typical and typical:
                stalled = self._stall("engine", seconds)
            self.typical_itl_s = typical * _STEP or seconds
        else:
            self.typical_itl_s = typical / _STEP
        return stalled

    def client_blocked(self, nanoseconds: int) -> None:
        """Take in a pause in which bytes waited for a client all the time."""
        seconds = nanoseconds / SECOND
        if self.typical_itl_s and seconds > STALL_RATIO * self.typical_itl_s:
            self._stall("client", seconds)

    def delivered(self, nanoseconds: int) -> None:
        """Take in the time of a whole stream in which bytes waited for its client."""
        self._delivery.observe(nanoseconds / SECOND)

    def _stall(self, cause: StallCause, seconds: float) -> bool:
        """Count a pause, if it is one to a reader; return whether it is."""
        counts = self._gaps > _WARM_UP and seconds > MIN_STALL_S
        if counts:
            self._stalls.labels(cause).inc()
            self._stall_seconds.labels(cause).inc(seconds)
        return counts
