"""A worker with tiers and the bundled model, whose device has room for two of its prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from worker_process import Worker, start, stop

#: Tokens of a prompt; of 40 device blocks, it takes a bit over a third.
LENGTH = 240
DEVICE = ("--executor", "torch", "--blocks", "40", "--dtype", "fp32", "--max-model-len", "512",
          "--no-tier-recall")  # fmt: skip
#: Prompts that tests ask for: more than the device has room for.
PROMPTS = 6
Answer = tuple[str, int]


def prompt(number: int, length: int = LENGTH) -> list[int]:
    return [Random(number * 1000 + i).randrange(5, 500) for i in range(length)]


class TieredWorker:
    """Starts a worker with options, ends it in any way, and starts it again with the same log."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log = log
        self.options = options
        self.worker: Worker = self.start()

    def start(self) -> Worker:
        self.worker = start("bundled", *DEVICE, *self.options, log=self.log)
        return self.worker

    def kill(self) -> None:
        stop(self.worker)

    def ask(self, number: int) -> Answer:
        """Return the text after a prompt, and how many of its tokens were not computed."""
        body = self.worker.complete(prompt(number), max_tokens=12, temperature=0.0, ignore_eos=True)
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return body["choices"][0]["text"], cached

    def texts(self, count: int) -> list[str]:
        return [self.ask(number)[0] for number in range(count)]

    def hits(self, count: int) -> int:
        """Ask once more for all; return the tokens that were not computed."""
        return sum(self.ask(number)[1] for number in range(count))

    def health(self) -> dict[str, Any]:
        reply = self.worker.get("/health")
        assert reply.status == 200
        body: dict[str, Any] = reply.json
        return body

    def figure(self, name: str, tier: str) -> float:
        """Return a gauge or a counter of a tier."""
        names = (f"pigou_tier_{name}", f"pigou_tier_{name}_total")
        return sum(self.worker.metric(each, tier=tier) for each in names)

    def still(self, tier: str) -> None:
        """Wait until nothing is on its way to a tier any more."""
        seen = -1.0
        while (stored := self.figure("stored_blocks", tier)) != seen or self.figure(
            "queued_blocks", tier
        ):
            seen = stored
            time.sleep(0.3)


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for what comes sooner or later; each look may do something for it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def caches(disk: Path) -> tuple[str, ...]:
    # By age alone: what is stored when does not depend on how quick the machine is.
    return ("--tier", "host=3MiB,policy=lru", "--tier", f"disk=32MiB@{disk},policy=lru")
