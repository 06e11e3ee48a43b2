"""The kill figures: a thousand greedy streams while workers are killed and frozen."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from tests.e2e.fleet import Fleet

STREAMS = int(os.environ.get("PIGOU_KILL_STREAMS", "1000"))
CLIENTS = 12
#: Faults over all streams: kill -9, and SIGSTOP without an end.
KILLS, FREEZES = 7, 2
PROMPTS = [list(range(300 + 7 * i, 340 + 9 * i)) for i in range(8)]
FIELDS = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, "return_token_ids": True}


class Faults(threading.Thread):
    """Does a fault to one worker each time that so many further streams have ended."""

    def __init__(self, fleet: Fleet, ended: Counter[str]) -> None:
        super().__init__(daemon=True)
        self.fleet, self.ended = fleet, ended
        self.done: list[str] = []
        self.over = threading.Event()

    def run(self) -> None:
        generator = random.Random(5)
        plan = [signal.SIGKILL] * KILLS + [signal.SIGSTOP] * FREEZES
        generator.shuffle(plan)
        for number, each in enumerate(plan, 1):
            while self.ended.total() < number * STREAMS // (len(plan) + 1):
                if self.over.wait(0.02):
                    return
            rows = [row for row in self.fleet.rows().values() if row["state"] == "up"]
            busy = [r for r in rows if r["decode_requests"] or r["prefill_requests"]] or rows
            victim = generator.choice(busy)
            self.fleet.note()
            with suppress(ProcessLookupError):
                os.kill(victim["pid"], each)
                self.done.append(f"{each.name} {victim['id']}")
            time.sleep(0.5)
            with suppress(AssertionError):
                self.fleet.recovered([victim["pid"]])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_greedy_streams_over_kills_and_freezes_are_whole(real: Fleet) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": prompt, **FIELDS} for prompt in PROMPTS]
    expected = [real.stream(**body).told for body in bodies]
    ended: Counter[str] = Counter()
    numbers = itertools.count()
    lock = threading.Lock()

    def client(_: int) -> None:
        while True:
            with lock:
                number = next(numbers)
            if number >= STREAMS:
                return
            at = number % len(bodies)
            try:
                told = real.stream(**bodies[at]).told
            except Exception as error:
                verdict = f"lost: {error!r:.300}"
            else:
                verdict = "whole" if told == expected[at] else f"changed: {told!r:.300}"
            with lock:
                ended[verdict] += 1

    faults = Faults(real, ended)
    faults.start()
    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    faults.over.set()
    faults.join()
    seconds = time.monotonic() - began
    print(f"{ended['whole']} of {STREAMS} streams whole over {faults.done} in {seconds:.0f} s")
    assert ended == {"whole": STREAMS}
    assert len(faults.done) == KILLS + FREEZES
    real.settle()
