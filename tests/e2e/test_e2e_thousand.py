"""The kill figures: a thousand greedy streams while processes are killed and frozen."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.client import SECRET, Endpoint
from tests.e2e.conftest import REAL
from tests.e2e.fleet import Fleet
from tests.lib.server_process import ServerProcess, nats_server

STREAMS = int(os.environ.get("PIGOU_KILL_STREAMS", "1000"))
SEED = int(os.environ.get("PIGOU_KILL_SEED", "5"))
CLIENTS = 12
CUT = "cut off by the death of its gateway"
PROMPTS = [list(range(300 + 7 * i, 340 + 9 * i)) for i in range(8)]
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "temperature": 0, "max_tokens": 48, "ignore_eos": True,
     "return_token_ids": True} for prompt in PROMPTS
]  # fmt: skip


class Faults(threading.Thread):
    """Does the next fault each time that so many further streams have ended."""

    def __init__(self, plan: list[Callable[[], str]], ended: Counter[str]) -> None:
        super().__init__(daemon=True)
        self.plan, self.ended = plan, ended
        self.done: list[str] = []

    def run(self) -> None:
        for number, fault in enumerate(self.plan, 1):
            while self.ended.total() < number * STREAMS // (len(self.plan) + 1):
                time.sleep(0.02)
            self.done.append(fault())


def thousand(told: Callable[[int], Any], plan: list[Callable[[], str]]) -> Counter[str]:
    """Have clients ask for a thousand streams, or for more until all faults of a plan are done.

    Return the verdicts. `told` returns what a client was told of a stream, or a text where the
    stream counts apart.
    """
    expected = [told(number) for number in range(len(BODIES))]
    ended: Counter[str] = Counter()
    numbers, lock = itertools.count(), threading.Lock()

    def client(_: int) -> None:
        while True:
            with lock:
                number = next(numbers)
            if number >= STREAMS and not faults.is_alive():
                return
            try:
                answer = told(number)
            except Exception as error:
                verdict = f"lost: {error!r:.300}"
            else:
                same = "whole" if answer == expected[number % len(BODIES)] else None
                verdict = answer if isinstance(answer, str) else same or f"changed: {answer!r:.300}"
            with lock:
                ended[verdict] += 1

    faults = Faults(plan, ended)
    faults.start()
    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    seconds = time.monotonic() - began
    print(f"{dict(ended)} of {ended.total()} streams over {faults.done} in {seconds:.0f} s")
    assert len(faults.done) == len(plan)
    assert ended.total() >= STREAMS
    return ended


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_greedy_streams_over_kills_and_freezes_are_whole(real: Fleet) -> None:
    generator = random.Random(SEED)

    def harm(number: signal.Signals) -> str:
        rows = [row for row in real.rows().values() if row["state"] == "up"]
        busy = [r for r in rows if r["decode_requests"] or r["prefill_requests"]] or rows
        victim = generator.choice(busy)
        real.note()
        with suppress(ProcessLookupError):
            os.kill(victim["pid"], number)
        time.sleep(0.5)
        with suppress(AssertionError):
            real.recovered([victim["pid"]])
        return f"{number.name} {victim['id']}"

    plan = [signal.SIGKILL] * 7 + [signal.SIGSTOP] * 2
    generator.shuffle(plan)
    ended = thousand(
        lambda number: real.stream(**BODIES[number % len(BODIES)]).told,
        [lambda number=number: harm(number) for number in plan],  # type: ignore[misc]
    )
    assert set(ended) == {"whole"}
    real.settle()


class Registered:
    """Workers and two gateways that know each other by NATS alone: registry, queue and bus.

    Attributes:
        processes: workers and gateways by name; each can be killed and started again.
        deaths: when each was killed.
        down: the one that is not to be asked now.
    """

    def __init__(self, stack: ExitStack, folder: Path, checkpoint: Path) -> None:
        self._stack, self._folder, self._checkpoint = stack, folder, checkpoint
        self._random, self._count = random.Random(SEED), itertools.count()
        self.nats: ServerProcess = stack.enter_context(nats_server(folder))
        self.processes: dict[str, Fleet] = {}
        self.workers = ("prefill-0", "prefill-1", "decode-0", "decode-1")
        self.gateways, self.down = ("gateway-0", "gateway-1"), ""
        names = (*self.workers, *self.gateways)
        self.deaths: dict[str, list[float]] = {name: [] for name in names}
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.start, names))
        self.all_up()

    def start(self, name: str) -> None:
        log = self._folder / f"{next(self._count)}-{name}.log"
        registry, queue = f"{self.nats.url}/fleet", f"{self.nats.url}/q?lease_s=3"
        role = name.partition("-")[0]
        if role == "gateway":
            fleet = Fleet.start(log, registry=registry, prefill_queue=queue, peers=self.nats.url)
        else:
            pulls = ("--prefill-queue", queue) if role == "prefill" else ()
            fleet = Fleet.run(
                [sys.executable, "-m", "pigou", "worker", "--port", "0", "--role", role,
                 "--registry", registry, "--lease", "3", "--worker-id", name, *pulls,
                 "--model", str(self._checkpoint), "--served-model-name", "tiny", *REAL], log,
            )  # fmt: skip
        self.processes[name] = fleet
        self._stack.callback(fleet.abandon)

    def all_up(self) -> None:
        """Wait until both gateways send to the present process of each worker."""
        urls = {self.processes[name].url for name in self.workers}
        for name in self.gateways:
            self.processes[name].wait(
                lambda rows: {row["url"] for row in rows.values() if row["state"] == "up"} == urls,
                seconds=120,
            )

    def kill(self, name: str) -> str:
        """Kill a process, and start it again."""
        self.down = name
        self.deaths[name].append(time.monotonic())
        self.processes[name].process.kill()
        self.processes[name].abandon()
        self.start(name)
        self.all_up()
        self.down = ""
        return name

    def kill_nats(self) -> str:
        self.nats.kill()
        time.sleep(self._random.random() * 6)  # shorter and longer than leases last
        self.nats.start()
        return "nats"

    def told(self, number: int) -> Any:
        """Ask the two gateways in turn, if both are up; say what its gateway's death cut off."""
        name, began = f"gateway-{number // len(BODIES) % 2}", time.monotonic()
        name = "gateway-0" if name == self.down else name
        try:
            return self.processes[name].stream(**BODIES[number % len(BODIES)]).told
        except Exception:
            if any(when >= began for when in self.deaths[name]):
                return CUT
            raise


@pytest.fixture
def registered(tmp_path: Path, checkpoint: Path) -> Iterator[Registered]:
    pytest.importorskip("nats")
    with ExitStack() as stack:
        yield Registered(stack, tmp_path, checkpoint)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_streams_over_kills_of_workers_a_gateway_and_nats_are_whole(
    registered: Registered,
) -> None:
    """With registry, prefill queue and bus; all but those of the killed gateway."""
    names = [*registered.workers, "gateway-1", *registered.workers, "gateway-1"]
    plan = [lambda name=name: registered.kill(name) for name in names]  # type: ignore[misc]
    plan += [registered.kill_nats] * 6
    random.Random(SEED).shuffle(plan)
    ended = thousand(registered.told, plan)
    cut = ended.pop(CUT, 0)
    assert cut <= 2 * CLIENTS
    assert set(ended) == {"whole"}
    gateway = registered.processes["gateway-0"]
    unpulled, computed = "pigou_prefill_queue_unpulled_total", "pigou_prefill_leg_seconds_count"
    print(f"{cut} cut off; gateway-0: {gateway.metric(computed):.0f} prompts pulled, "
          f"{gateway.metric(unpulled):.0f} computed where they are decoded")  # fmt: skip
    assert gateway.metric(computed) > gateway.metric(unpulled)
    registered.all_up()
    for name in registered.workers:
        Endpoint(registered.processes[name].url, SECRET).settle(name)
