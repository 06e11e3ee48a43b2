"""`pigou serve --planner price` under load that rises and falls: the benchmark, shortened."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.lib.servers import LOOPBACK, Server, free_ports
from benchmarks.live.planner import WORKER, Phase, measure, replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SLO = (1.0, 0.06)


def serve(port: int, journal: Path) -> list[str]:
    return [
        sys.executable, "-m", "pigou", "serve", "--port", str(port), "--prefill", "0",
        "--decode", "0", "--both", "1", "--slo", f"ttft={SLO[0]},itl={SLO[1]}",
        "--planner", "price,hold_s=5", "--max-workers", "3", "--planner-interval", "1",
        "--start-up", "5", "--journal", str(journal), "--", *WORKER,
    ]  # fmt: skip


def test_the_fleet_follows_the_load_and_no_stream_is_lost_or_changed(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url, journal = f"http://{LOOPBACK}:{port}", tmp_path / "journal.jsonl"
    phases = (Phase(15, 2.0, 60, 30), Phase(20, 8.0, 60, 50), Phase(20, 1.0, 60, 30))
    with Server(serve(port, journal), url=url, log=tmp_path / "log") as gateway:
        gateway.wait_healthy()
        outcome, shown, _ = asyncio.run(measure(url, phases, SLO, ("starting",), 3, 1.0))
        assert (outcome.lost, outcome.changed) == (0, 0), outcome.reasons
        assert outcome.killed, "a worker was killed while it started"
        assert shown["failures"] == 0
        assert shown["moves"]["add_workers"] >= 1
        assert shown["moves"].get("drain_worker", 0) + shown["moves"].get("remove_worker", 0) >= 1
        assert sum(shown["replicas"]["both"].values()) < 3
        os.kill(gateway.pid, signal.SIGKILL)
    same, windows, _ = replay(journal)
    assert same
    assert windows > 40
