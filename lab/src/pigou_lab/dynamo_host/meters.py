"""What the integration tells Prometheus: the paper's metrics, as far as they are known here."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pigou.control.routing_controller import Parameters
from pigou.control.saturation.regime import Regime

_DECISION_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2)


class Meters:
    """Metrics of one router or switch, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._state = Gauge(
            "pigou_game_saturation_state",
            "0 below, 1 transition, 2 saturated",
            registry=self.registry,
        )
        self._temperature = Gauge(
            "pigou_game_router_temperature", "Temperature in force", registry=self.registry
        )
        self._overlap = Gauge(
            "pigou_game_router_overlap_weight", "Overlap weight in force", registry=self.registry
        )
        self._decision = Histogram(
            "pigou_game_decision_seconds", "Time of one routing decision", registry=self.registry,
            buckets=_DECISION_BUCKETS,
        )  # fmt: skip
        self._requests = Counter(
            "pigou_game_routed_requests",
            "Requests routed",
            ["regime", "to"],
            registry=self.registry,
        )
        self._moved = Counter(
            "pigou_game_retried_requests",
            "Requests sent to another frontend after the first failed", registry=self.registry,
        )  # fmt: skip

    def routed(self, regime: Regime, force: Parameters, to: str) -> None:
        """A request was routed: the regime, the parameters in force, and where to."""
        self._state.set(regime.level)
        self._temperature.set(force.temperature)
        self._overlap.set(force.overlap_weight)
        self._requests.labels(regime.value, to).inc()

    def decided(self, seconds: float) -> None:
        """A decision took so long."""
        self._decision.observe(seconds)

    def retried(self) -> None:
        """A request was sent again, to another frontend."""
        self._moved.inc()

    def exposition(self) -> bytes:
        """Return the Prometheus exposition."""
        return generate_latest(self.registry)
