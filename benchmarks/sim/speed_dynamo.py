"""The peer of `benchmarks.sim.speed`: Dynamo's offline replay, run by the peer's own Python.

Arguments: trace, workers, what the engine is set to (JSON). Prints a JSON object: the seconds that
the replay took, and the requests that it completed.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import KvRouterConfig, run_mocker_trace_replay


def main() -> None:
    trace, workers, engine = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    began = time.perf_counter()
    replay = run_mocker_trace_replay(
        [trace],
        trace_block_size=512,
        extra_engine_args={"engine": engine},
        num_workers=workers,
        router_mode="kv_router",
        router_config=KvRouterConfig(),
        capture_planner_details=False,
    )
    seconds = time.perf_counter() - began
    print(json.dumps({"wall_s": seconds, "completed": replay.summary["completed_requests"]}))


if __name__ == "__main__":
    main()
