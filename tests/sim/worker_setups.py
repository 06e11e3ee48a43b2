"""A single simulated worker for tests: what reaches it when, and what is heard of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.plan import Finished, Load
from pigou.lifecycle.request import RequestLifecycle
from pigou.request import KVEvent, Request
from pigou.sim.request_run import Attempt, Leg, RequestRun
from pigou.sim.streams import ITLHistogram
from pigou.sim.timing import Law, LawTiming, Timing
from pigou.sim.timing_measured import MeasuredTiming, WorkerProfile
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.worker import SimWorker
from pigou.sim.workload import RequestSpec

#: A step takes 1,000 ns, 100 ns for each sequence that decodes, and 10 ns for each prompt token.
LAW = LawTiming(Law(itl_a=1e-6, itl_b=1e-7, prefill=1e-6, prefill_token=1e-8))

#: About as long, but the third step of a plan takes longer, and steps of two sequences scatter.
VARIED = MeasuredTiming(
    WorkerProfile(
        decodes=((1, 1.1e-6), (8, 1.8e-6)),
        prompts=((0, 0.0), (100, 1e-6)),
        cache=((0, 0.0), (100, 1e-7)),
        alone=1e-6,
        rhythm=((1, (-1e-7, -1e-7, 2e-7)), (4, (-2e-7, -1e-7, 3e-7))),
        scatter=((1, (1.0, 1.0, 1.0)), (2, (0.8, 0.9, 1.3))),
    )
)

Doing = Callable[["Bench", int], None]


@dataclass
class Bench:
    """A worker, its legs by id, and a journal of (nanoseconds, what, ...) of what it tells.

    A load is answered after `load_time` nanoseconds.
    """

    worker: SimWorker
    clock: Clock
    load_time: int = 700
    legs: dict[str, Leg] = field(default_factory=dict)
    journal: list[tuple[Any, ...]] = field(default_factory=list)
    dead: bool = False
    changed: list[tuple[Any, ...]] = field(default_factory=list)

    def note(self, now: int, *what: object) -> None:
        """Write to the journal, after what was published by then."""
        if self.changed:
            self.journal.append((0, "cache", self.changed))
            self.changed = []
        self.say(now, *what)

    def say(self, now: int, *what: object) -> None:
        """Write to the journal what happens where nobody looks at what was published."""
        self.journal.append((now - EPOCH, *what))

    def refused(self, leg: Leg, error: Exception, now: int) -> None:
        """A leg was not taken in."""
        self.note(now, "refused", leg.request.id, type(error).__name__)

    def first_token(self, leg: Leg, now: int) -> None:
        """A leg yielded its first token."""
        self.note(now, "first", leg.request.id)

    def finished(self, leg: Leg, finished: Finished, now: int) -> None:
        """A leg ended by itself."""
        what = (finished.cached, finished.preemptions, leg.produced, leg.published)
        self.note(now, "finished", leg.request.id, *what)

    def wanted(self, leg: Leg, load: Load, now: int) -> None:
        """A leg wants blocks."""
        self.note(now, "wanted", leg.request.id, len(load.blocks))
        if len(load.blocks) and not self.dead:
            id_, tokens = leg.request.id, len(load.blocks) * self.worker.core.config.block_size
            self.clock.at(
                now + self.load_time, Phase.LINK, int(id_),
                lambda at: self.worker.loaded(id_, tokens, at),
            )  # fmt: skip

    def cache_changed(self, worker: str, events: tuple[KVEvent, ...], now: int) -> None:
        """KV events are published."""
        # One event may name what several do: what counts is the order of what they name.
        named = ((type(each).__name__, each.hashes.tolist()) for each in events)  # type: ignore[union-attr]
        self.changed += [(worker, kind, *pair) for kind, pairs in named for pair in pairs]


def add(
    number: int, prompt: int, output: int, *, arrival: int = -1, streams: bool = True,
    hold: bool = False, remote: int = 0, content: int = -1, priority: int = 0,
) -> Doing:  # fmt: skip
    """Send a request; those of the same `content` have the same prompt."""

    def do(bench: Bench, now: int) -> None:
        blocks = prompt // bench.worker.core.config.block_size
        start = 1000 * (number if content < 0 else content) + 1
        hashes = np.arange(start, start + 2 * blocks, dtype=np.uint64).reshape(-1, 2)
        call = RequestRun(number, RequestSpec(prompt, output), now, lambda _, __: None)
        request = Request(
            str(number), prompt, output, hashes,
            arrival=EPOCH + arrival if arrival >= 0 else now, hold=hold, remote=remote,
            priority=priority,
        )  # fmt: skip
        trip = Attempt(call, RequestLifecycle(str(number)), hashes, 4, now, slot=number)
        leg = Leg(trip, "w", request, streams=streams)
        bench.legs[str(number)] = leg
        bench.worker.add(leg, now)

    return do


def abort(number: int) -> Doing:
    """Take a request back, as a client does; what it had yielded is noted."""

    def do(bench: Bench, now: int) -> None:
        leg = bench.legs[str(number)]
        bench.worker.settle(leg)
        bench.say(now, "aborted", number, leg.produced)  # chunks may publish theirs later
        bench.worker.abort(leg, now)

    return do


def release(number: int) -> Doing:
    """Free the blocks that are held for a request."""
    return lambda bench, now: bench.worker.release(str(number), now)


def retime(timing: Timing) -> Doing:
    """Let steps take another time."""
    return lambda bench, now: bench.worker.retime(timing, now)


def look(bench: Bench, now: int) -> None:
    """Note the load, and the tokens that nobody was told of."""
    bench.worker.catch_up()
    bench.note(now, "load", *bench.worker.load(now))
    seats, counts = (np.zeros(len(bench.legs) + 1, dtype=np.int64) for _ in range(2))
    size = bench.worker.publish_tokens(now, seats, counts, 0)
    bench.note(now, "told", *zip(seats[:size].tolist(), counts[:size].tolist(), strict=True))


def end(bench: Bench, now: int) -> None:
    """Let the worker die, and note what its legs had yielded."""
    bench.note(now, "died", *((leg.request.id, leg.produced) for leg in bench.worker.die()))
    bench.dead = True


def journal(
    doings: Sequence[tuple[int, Doing]], *, stepwise: bool, ahead: bool = True, looks: int = 500,
    until: int = 300_000, die: int = 0, timing: Timing = LAW, **engine: Any,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Let things happen (nanoseconds from the beginning, what) to a worker; return its journal.

    The load is looked at every `looks` nanoseconds; at `die` it dies.
    """
    config = {"blocks": 40, "block_size": 4, "max_seqs": 4, "max_batched_tokens": 16}
    clock, gaps = Clock(), ITLHistogram()
    many = {"max_repeat": 1 << 16, "repeat_chunks": True}
    engine = config | {"max_model_len": 100, "headroom": 0} | many | engine
    bench = Bench.__new__(Bench)
    worker = SimWorker(
        0, EngineConfig(**engine), timing, clock, bench,
        partial(bench.cache_changed, "w"), gaps, ahead=ahead, stepwise=stepwise,
        lagging={},
    )  # fmt: skip
    bench.__init__(worker, clock)  # type: ignore[misc]

    def reach(doing: Doing, now: int) -> None:
        if not bench.dead:
            doing(bench, now)

    for order, (at, doing) in enumerate(doings):
        clock.at(EPOCH + at, Phase.SEND, order, partial(reach, doing))
    for at in range(looks, until, looks) if looks else ():
        clock.at(EPOCH + at, Phase.TICK, 0, partial(reach, look))
    if die:
        clock.at(EPOCH + die, Phase.FAULT, 0, lambda now: end(bench, now))
    while clock.step():
        pass
    worker.close()
    worker.core.check_integrity()
    core = worker.core
    left = (0, 0, 0) if bench.dead else (core.running, core.waiting, core.held)
    figures = (worker.steps, worker.busy_ns, *left)
    bench.note(EPOCH, "end", *figures, *gaps.sums.tolist(), gaps.histogram.tobytes())
    return bench.journal
