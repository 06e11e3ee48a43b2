"""Several steps planned as one are, to the last event, those steps one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np
import pytest
from core_oracle import Oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Effects, Finish, Rates, Result
from pigou.request import NEVER, BlockRemoved, BlockStored, FinishReason, Request

#: Nanoseconds that a step takes.
STEP = 10


@dataclass
class Call:
    """A request that arrives at a time, and what happens to it later."""

    at: int
    tokens: list[int]
    most: int
    priority: int
    remote: int
    hold: bool
    abort_after: int | None
    load_after: int


@dataclass
class History:
    """All that the world saw of an engine."""

    seen: list[Any] = field(default_factory=list)
    plans: int = 0
    steps: int = 0

    def note(self, effects: Effects, now: int) -> None:
        for event in effects.events:
            if isinstance(event, BlockRemoved):
                self.seen += [("removed", tuple(each)) for each in event.hashes.tolist()]
            elif isinstance(event, BlockStored):
                # One event may name what several do: what counts is what stands on what.
                chain = [*event.parent.tolist(), *event.hashes.tolist()]
                above = chain if len(event.parent) else [None, *chain]
                for i, pair in enumerate(event.hashes.tolist()):
                    self.seen.append(("stored", event.request, event.first + i, pair, above[i]))
        for each in effects.finished:
            self.seen.append((now, each.request, each.reason, each.cached, each.generated,
                              each.preemptions, each.held.tolist()))  # fmt: skip


class World:
    """A virtual clock around one engine and the oracle."""

    def __init__(self, config: EngineConfig, rates: Rates | None, calls: list[Call]) -> None:
        self.core = EngineCore(config)
        self.core.rates = rates
        self.oracle = Oracle(self.core)
        self.history = History()
        self.now = 0
        self.left = len(calls)
        self._ties = count()
        self._agenda: list[tuple[int, int, Any]] = []
        for i, call in enumerate(calls):
            self.later(call.at, lambda i=i, call=call: self.arrive(f"r{i}", call))

    def later(self, at: int, what: Any) -> None:
        heappush(self._agenda, (at, next(self._ties), what))

    def arrive(self, name: str, call: Call) -> None:
        self.call = call
        request = self.oracle.request(
            name, call.tokens, call.most, priority=call.priority, arrival=call.at,
            remote=call.remote, hold=call.hold,
        )  # fmt: skip
        self.oracle.add(request, call.tokens)
        if call.abort_after is not None:
            self.later(self.now + call.abort_after, lambda: self.abort(name))
        self.delays = {**getattr(self, "delays", {}), name: call.load_after}

    def note(self, effects: Effects) -> None:
        self.oracle.observe(effects)
        self.history.note(effects, self.now)
        self.left -= len(effects.finished)
        for each in effects.finished:
            if len(each.held):
                self.later(self.now + 35, lambda name=each.request: self.release(name))

    def abort(self, name: str) -> None:
        self.oracle.held.pop(name, None)
        self.note(self.core.abort(name))

    def release(self, name: str) -> None:
        self.oracle.held.pop(name, None)
        self.note(self.core.release(name))

    def answer(self, name: str) -> None:
        size = self.core.config.block_size
        tokens = len(self.oracle.loads[name].blocks) * size if self.now % 3 else 0
        self.note(self.oracle.answer(name, tokens))

    def run(self) -> History:
        while self.left or self._agenda:
            while self._agenda and self._agenda[0][0] <= self.now:
                heappop(self._agenda)[2]()
            self.step()
            self.oracle.check()
        return self.history

    def step(self) -> None:
        horizon = self._agenda[0][0] if self._agenda else NEVER
        plan = self.core.schedule(self.now, horizon)
        self.history.seen += [("started", s.request, s.computed) for s in plan.started]
        self.history.seen += [("preempted", name) for name in plan.preempted]
        for load in plan.loads:
            if len(load.blocks):
                delay = self.delays[load.request]
                self.later(self.now + delay, lambda name=load.request: self.answer(name))
        # A load that comes in cuts a repeat, as any call that reaches the engine does.
        horizon = self._agenda[0][0] if self._agenda else NEVER
        result = self.oracle.execute(plan, -(-(horizon - self.now) // STEP))
        if not plan:
            assert horizon < NEVER or not self.left, "somebody waits for nothing"
            self.now = max(horizon, self.now) if horizon < NEVER else self.now
            return
        self.now += STEP * result.steps
        self.history.plans += 1
        self.history.steps += result.steps
        self.note(self.core.apply(plan, result))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, Any], Rates | None, list[Call]]:
    size = draw(st.integers(1, 4))
    settings = {
        "blocks": draw(st.integers(6, 16)),
        "block_size": size,
        "host_blocks": draw(st.sampled_from([0, 16])),
        "max_seqs": draw(st.integers(2, 5)),
        "max_batched_tokens": draw(st.sampled_from([2, 5, 20])),
        "max_model_len": 64,
        "order": draw(st.sampled_from(["fcfs", "priority"])),
    }
    if settings["order"] == "priority":
        settings["max_background_tokens"] = draw(st.sampled_from([0, 1, 3]))
    room = min(settings["blocks"] * size, 40)
    calls = []
    for _ in range(draw(st.integers(1, 8))):
        tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        tokens = ([1] * draw(st.integers(0, 8)) + tokens)[: room - 1]
        calls.append(
            Call(
                at=draw(st.integers(0, 30)) * 7,
                tokens=tokens,
                most=draw(st.integers(1, max(1, room - len(tokens)))),
                priority=draw(st.integers(0, 2)),
                remote=min(draw(st.sampled_from([0, 0, 4, 20])), len(tokens)),
                hold=draw(st.booleans()),
                abort_after=draw(st.sampled_from([None, None, None, 1, 55])),
                load_after=draw(st.integers(1, 60)),
            )
        )
    rates = draw(st.sampled_from([None, Rates(prefill=1.0, swap=1e9, block_bytes=1)]))
    return settings, rates, calls


@settings(max_examples=examples(150))
@given(worlds(), st.integers(2, 30), st.booleans())
def test_repeated_steps_equal_single_ones(
    world: tuple[dict[str, Any], Rates | None, list[Call]], most: int, chunks: bool
) -> None:
    config, rates, calls = world
    single = World(EngineConfig(**config, max_repeat=1), rates, calls).run()
    many = EngineConfig(**config, max_repeat=most, repeat_chunks=chunks)
    repeated = World(many, rates, calls).run()
    assert repeated.seen == single.seen
    assert repeated.steps == single.steps
    assert repeated.plans <= single.plans


def engine(**fields: Any) -> EngineCore:
    base = {"blocks": 16, "block_size": 2, "max_seqs": 4, "max_model_len": 64, "max_repeat": 100}
    return EngineCore(EngineConfig(**{**base, **fields}))


def decoding(core: EngineCore, *requests: Request) -> None:
    """Bring requests to the point where they decode."""
    for request in requests:
        core.add(request)
    core.apply(core.schedule(0), Result())


def test_a_repeat_ends_with_the_first_to_reach_its_length() -> None:
    core = engine()
    decoding(core, Request("a", 2, 9), Request("b", 2, 4))
    plan = core.schedule(0)
    assert plan.repeat == 3
    effects = core.apply(plan, Result(steps=3))
    assert [(f.request, f.generated) for f in effects.finished] == [("b", 4)]
    assert effects.tokens.tolist() == [3, 3]


def test_a_repeat_ends_before_blocks_run_out() -> None:
    core = engine(blocks=5)
    decoding(core, Request("a", 2, 9), Request("b", 2, 9))
    plan = core.schedule(0)
    assert plan.repeat == 2
    assert not core.apply(plan, Result(steps=2)).finished
    assert core.schedule(0).preempted == ["b"]


def test_a_plan_has_one_step_when_the_horizon_is_reached() -> None:
    core = engine()
    decoding(core, Request("a", 2, 9))
    assert core.schedule(50, 50).repeat == 1


def test_chunks_of_a_prompt_are_repeated_up_to_the_last_where_that_is_allowed() -> None:
    core = engine(max_batched_tokens=4, repeat_chunks=True)
    decoding(core, Request("a", 2, 30))
    core.add(Request("b", 10, 9))
    plan = core.schedule(0)
    assert plan.counts.tolist() == [1, 3]
    assert plan.samples.tolist() == [True, False]
    assert plan.repeat == 3
    assert core.apply(plan, Result(steps=2)).tokens.tolist() == [2, 0]
    plan = core.schedule(0)
    assert (plan.starts.tolist(), plan.repeat) == ([4, 6], 1)
    core.apply(plan, Result())
    plan = core.schedule(0)
    assert (plan.counts.tolist(), plan.samples.tolist()) == ([1, 1], [True, True])


def test_prompts_are_not_repeated_else() -> None:
    core = engine(max_batched_tokens=4)
    decoding(core, Request("a", 2, 9))
    core.add(Request("b", 6, 9))
    plan = core.schedule(0)
    assert plan.counts.tolist() == [1, 3]
    assert plan.repeat == 1


def test_a_head_that_cannot_be_admitted_does_not_cut_a_repeat() -> None:
    core = engine(blocks=6)
    decoding(core, Request("a", 2, 9))
    core.add(Request("big", 11, 1))
    plan = core.schedule(0)
    assert plan.rows.tolist() == [0]
    assert plan.repeat == 8


def test_what_overshot_is_truncated_and_its_blocks_freed() -> None:
    core = engine(block_size=1, blocks=12)
    decoding(core, Request("a", 1, 10))
    plan = core.schedule(0)
    assert plan.repeat == 9
    hashes = np.arange(2, 22, dtype=np.uint64).reshape(10, 2)
    result = Result(
        steps=6, finished=[Finish(0, FinishReason.STOP, 2)], full_block_hashes={0: hashes}
    )
    effects = core.apply(plan, result)
    assert effects.tokens.tolist() == [2]
    assert effects.finished[0].generated == 3
    stored = [e for e in effects.events if isinstance(e, BlockStored)]
    assert sum(len(e.hashes) for e in stored) == 3
    assert core.free_blocks == 12
    core.check_integrity()


def test_blocks_that_were_written_beyond_an_end_cannot_be_hit() -> None:
    """A repeat that overran has written to blocks that were cached: they must lose their hash."""
    core = engine(block_size=1, blocks=8)
    old = np.arange(2, 14, dtype=np.uint64).reshape(6, 2)
    core.add(Request("old", 6, 1, old))
    core.apply(core.schedule(0), Result())
    assert core.cached_blocks == 6
    decoding(core, Request("a", 1, 8))
    plan = core.schedule(0)
    written = set(core.tables[0, :6].tolist())
    core.apply(plan, Result(steps=5, finished=[Finish(0, FinishReason.STOP, 1)]))
    cached = np.flatnonzero(core._state.pool.keys.any(axis=1)).tolist()
    assert not written & set(cached)
    core.check_integrity()


@pytest.mark.parametrize("steps", [0, 10])
def test_a_result_that_does_not_fit_is_refused(steps: int) -> None:
    core = engine()
    decoding(core, Request("a", 2, 9))
    with pytest.raises(ValueError, match=f"{steps} steps were done"):
        core.apply(core.schedule(0), Result(steps=steps))
