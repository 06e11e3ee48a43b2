"""What a journal costs the gateway's event loop, and how fast it replays.

python -m benchmarks.control.journal
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pigou.config import ControlConfig
from pigou.control.journal import JournalRecorder, PlaneCalls, report_tokens
from pigou.control.messages import CacheChanged, Ended, FirstToken, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.gateway.journal import Journal
from pigou.request import SECOND, FinishReason, Request, Worker
from pigou.wire.kv_event_decoding import Stored
from pigou.workload.journal_file import lines
from pigou.workload.journal_replay import replay_journal

CONFIG = ControlConfig(policy="toll")
WORKERS, REQUESTS, BLOCKS, ROUNDS = 8, 1500, 128, 5


def requests() -> Iterator[Request]:
    """Prompts of 2,048 tokens with a shared half."""
    for number in range(REQUESTS):
        keys = np.arange(1, BLOCKS + 1, dtype=np.uint64)
        keys[BLOCKS // 2 :] += np.uint64(1000 * (number + 1))
        yield Request(f"request-{number}", 16 * BLOCKS, 128, arrival=1, keys={16: keys})


def drive(plane: PlaneCalls) -> float:
    """Return the microseconds that a request's calls take, all together."""
    now = SECOND
    for number in range(WORKERS):
        plane.observe(WorkerUp(Worker(f"w{number}", "")), now)
    began = time.perf_counter()
    for number, request in enumerate(requests()):
        now += 1_000_000
        plane.submit(request, now)
        names = tuple(range(number * 64 + 1, number * 64 + 65))
        event = Stored(names, None, tuple(range(number, number + 1024)), 16)
        plane.observe(CacheChanged(f"w{number % WORKERS}", (event,)), now)
        plane.observe(FirstToken(request.id), now)
        for _ in range(10):
            report_tokens(plane, [(request.id, 5)], now)
        plane.observe(Ended(request.id, FinishReason.STOP), now)
        if number % 100 == 0:
            plane.tick(now)
    return (time.perf_counter() - began) / REQUESTS * 1e6


def main() -> None:
    plain: list[float] = []
    told: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"

        def recorded() -> float:
            path.unlink(missing_ok=True)
            journal = Journal(path, CONFIG)
            taken = drive(JournalRecorder(ControlPlane(CONFIG), journal.write))
            journal.close()
            return taken

        ways: list[tuple[list[float], Callable[[], float]]] = [
            (plain, lambda: drive(ControlPlane(CONFIG))),
            (told, recorded),
        ]
        for number in range(ROUNDS + 1):
            for times, way in ways:
                taken = way()
                if number:  # the first compiles
                    times.append(taken)
        size = path.stat().st_size
        found = replay_journal(lines(path))
    assert found.difference is None
    one, two = statistics.median(plain), statistics.median(told)
    print(f"a request of {16 * BLOCKS} tokens (14 calls): {one:.0f} us, {two:.0f} us with journal")
    print(f"difference {two - one:.0f} us a request; spread {min(told):.0f} to {max(told):.0f} us")
    print(f"{size / REQUESTS:.0f} bytes a request")
    print(f"replay: {found.entries / found.took:.0f} entries/s, {found.requests / found.took:.0f} "
          "requests/s")  # fmt: skip


if __name__ == "__main__":
    main()
