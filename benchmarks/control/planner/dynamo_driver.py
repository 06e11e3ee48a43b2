"""Drives Dynamo's own planner, in a process of Dynamo's environment: JSON lines in, JSON lines out.

The first line is the setup; each line after it is what the planner sees on one tick. Each is
answered by one line. `OrchestratorEngineAdapter` is what Dynamo runs, with its built-in plugins.
Only Dynamo and the standard library are imported here; `dynamo_peer.py` is the other side.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import IO, Any


def metrics(worker: str, scheduled: dict[str, int], queued: dict[str, int], wall_s: float) -> Any:
    """Return the metrics of one forward pass of a worker."""
    from dynamo.common.forward_pass_metrics import (
        ForwardPassMetrics,
        QueuedRequestMetrics,
        ScheduledRequestMetrics,
    )

    return ForwardPassMetrics(
        worker_id=worker,
        wall_time=wall_s,
        scheduled_requests=ScheduledRequestMetrics(**scheduled),
        queued_requests=QueuedRequestMetrics(**queued),
    )


class DynamoDriver:
    """Dynamo's planner on a virtual clock that begins at 0.

    Args:
        setup: `config` of `PlannerConfig`, `capabilities` by role, `profile` by role: forward
            passes that were measured before.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        from dynamo.planner.config.planner_config import PlannerConfig
        from dynamo.planner.core.types import EngineCapabilities, WorkerCapabilities
        from dynamo.planner.plugins.clock import VirtualClock
        from dynamo.planner.plugins.orchestrator.engine_adapter import OrchestratorEngineAdapter

        config = PlannerConfig.model_validate(setup["config"])
        roles = {
            role: EngineCapabilities(**values) for role, values in setup["capabilities"].items()
        }
        self._engine = OrchestratorEngineAdapter(
            config, WorkerCapabilities(**roles), clock=VirtualClock()
        )
        self._loop = asyncio.new_event_loop()
        profiles = {role: [metrics(**each) for each in passes]
                    for role, passes in setup["profile"].items()}  # fmt: skip
        if config.mode == "agg":
            profiles = {"agg": profiles["decode"]}
        self._loop.run_until_complete(
            self._engine.bootstrap_from_fpms(
                **{f"{role}_fpms": passes for role, passes in profiles.items()}
            )
        )
        self.next = self._engine.initial_tick(0.0)

    @property
    def next_s(self) -> float:
        """When it wants its next tick."""
        return float(self.next.at_s)

    @property
    def traffic_s(self) -> float:
        """Seconds of traffic that it wants with it; 0 for none."""
        return (
            float(self.next.traffic_metrics_duration_s) if self.next.need_traffic_metrics else 0.0
        )

    def tick(self, seen: dict[str, Any]) -> dict[str, Any]:
        """Return its targets, and why.

        Args:
            seen: `counts` of `WorkerCounts`, `traffic` of `TrafficObservation` or None, and
                `passes` by role: the last forward pass of each worker.
        """
        from dynamo.planner.core.types import (
            FpmObservations,
            TickInput,
            TrafficObservation,
            WorkerCounts,
        )

        passes = None
        if self.next.need_worker_fpm:
            by_role = {
                role: {(each["worker"], 0): metrics(**each) for each in workers} or None
                for role, workers in seen["passes"].items()
            }
            passes = FpmObservations(**by_role)
        traffic = seen["traffic"] if self.next.need_traffic_metrics else None
        tick_input = TickInput(
            now_s=self.next_s,
            traffic=TrafficObservation(**traffic) if traffic else None,
            worker_counts=WorkerCounts(**seen["counts"]),
            fpm_observations=passes,
        )
        effects = self._loop.run_until_complete(self._engine.tick(self.next, tick_input))
        self.next = effects.next_tick
        scale, why = effects.scale_to, effects.diagnostics
        return {
            "targets": {} if scale is None else {
                role: count
                for role, count in (("prefill", scale.num_prefill), ("decode", scale.num_decode))
                if count is not None
            },
            "floors": {
                "prefill": why.throughput_lower_bound_prefill,
                "decode": why.throughput_lower_bound_decode,
            },
            "engine_rps": {
                "prefill": why.engine_rps_prefill, "decode": why.engine_rps_decode,
            },
            "predicted": [why.predicted_num_req, why.predicted_isl, why.predicted_osl],
            "estimated_ms": [why.estimated_ttft_ms, why.estimated_itl_ms],
            "reasons": [
                why.load_decision_reason, why.load_decision_reason_prefill,
                why.load_decision_reason_decode, why.throughput_decision_reason,
            ],
            "next_s": self.next_s,
            "traffic_s": self.traffic_s,
        }  # fmt: skip


def main() -> None:
    """Answer each line of standard input; what Dynamo prints goes to standard error."""
    os.environ.setdefault("DYN_LOG", "error")
    answers: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver: DynamoDriver | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if driver is None:
            driver = DynamoDriver(message)
            answer = {"next_s": driver.next_s, "traffic_s": driver.traffic_s}
        else:
            answer = driver.tick(message)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
