"""Four Ray nodes on this machine: a raylet each, with labels and two CPUs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

#: Bytes of each object store: nothing of the fleet passes through it.
_STORE = 80 * 2**20
#: Ray finds a dead node after three looks.
_LOOKS = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3,
}  # fmt: skip


class RayNodes:
    """A cluster of four nodes in two racks; node 0 is the head.

    Attributes:
        address: of the head.
        start_s: seconds that it took to start.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        began = time.monotonic()
        head = self._arguments(0) | {"include_dashboard": False, "_system_config": _LOOKS}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = {"n0": self._cluster.head_node}
        for number in range(1, 4):
            self._add(number)
        self._cluster.wait_for_nodes()
        self.address: str = self._cluster.address
        self.start_s = time.monotonic() - began

    @staticmethod
    def _arguments(number: int) -> dict[str, Any]:
        labels = {"host": f"n{number}", "rack": f"r{number // 2}", "zone": "z"}
        return {"num_cpus": 2, "num_gpus": 0, "object_store_memory": _STORE, "labels": labels}

    def _add(self, number: int) -> None:
        node = self._cluster.add_node(wait=False, **self._arguments(number))
        self._nodes[f"n{number}"] = node

    def kill(self, host: str) -> list[int]:
        """Kill a node with all that runs on it, as a power cut would; return the process ids."""
        node = self._nodes.pop(host)
        (raylet,) = node.all_processes["raylet"]
        pids = _descendants(raylet.process.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        return pids

    def shutdown(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


def _descendants(pid: int) -> list[int]:
    """Return a process with its children and theirs, from the top."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Run four nodes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    nodes = RayNodes()
    try:
        yield nodes
    finally:
        nodes.shutdown()
