"""Preemption x prefix hit x chunking x transfer x hold x swap x abort x repeat x drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
from core_oracle import Oracle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.lib.examples import examples

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan, Rates

RATES = [
    None,
    Rates(prefill=1.0, swap=1e9, block_bytes=1),
    Rates(prefill=1e9, swap=1.0, block_bytes=1),
    Rates(prefill=1.0, swap=4.0, block_bytes=2),
]


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    size = draw(st.integers(1, 4))
    order = draw(st.sampled_from(["fcfs", "priority", "priority", "edf"]))
    background = draw(st.sampled_from([0, 1, 2, 7])) if order == "priority" else 0
    return EngineConfig(
        blocks=draw(st.integers(3, 12)),
        block_size=size,
        host_blocks=draw(st.sampled_from([0, 4, 16, 16])),
        max_seqs=draw(st.sampled_from([1, 3, 4, 6])),
        max_batched_tokens=draw(st.sampled_from([1, 3, 8, 20, 20])),
        max_model_len=64,
        order=order,
        max_background_tokens=background,
        headroom=draw(st.sampled_from([0, 1, 1])),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        max_repeat=draw(st.sampled_from([1, 4, 9])),
        num_speculative_tokens=draw(st.sampled_from([0, 0, 2, 5])),
    )


class Seam(RuleBasedStateMachine):
    """Calls in any order that the contract allows, against the oracle."""

    now = 0

    @initialize(config=configs(), rates=st.sampled_from(RATES), data=st.data())
    def begin(self, config: EngineConfig, rates: Rates | None, data: Any) -> None:
        self.core = EngineCore(config)
        self.core.rates = rates
        self.oracle = Oracle(
            self.core,
            ends=data.draw(st.booleans()),
            overrun=data.draw(st.sampled_from([0, 0, 3])),
            hashed=data.draw(st.booleans()),
        )
        self.plan: Plan | None = None
        self.now = 0
        self.number = 0
        self.flying: set[str] = set()

    def observe(self, effects: Any) -> None:
        self.oracle.observe(effects)
        self.flying -= {finished.request for finished in effects.finished}

    @rule(
        start=st.integers(0, 1),
        length=st.integers(1, 9),
        tail=st.lists(st.integers(1, 3), max_size=2),
        most=st.integers(1, 20),
        priority=st.integers(-1, 2),
        deadline=st.integers(0, 9),
        remote=st.sampled_from([0, 0, 0, 3, 8, 20]),
        hold=st.sampled_from([False, False, True]),
    )
    def add(
        self, start: int, length: int, tail: list[int], most: int, remote: int, **fields: Any
    ) -> None:
        config = self.core.config
        room = min(config.blocks * config.block_size + 1, config.max_model_len)
        tokens = ([start] * length + tail)[: room - 1]
        most = min(most, room - len(tokens))
        name = f"r{self.number}"
        self.number += 1
        request = self.oracle.request(name, tokens, most, remote=min(remote, len(tokens)), **fields)
        self.oracle.add(request, tokens)
        self.flying.add(name)

    @rule()
    @precondition(lambda self: self.plan is None and self.flying)
    def schedule(self) -> None:
        drafts = None
        if self.core.drafts is not None:  # some rows offer drafts, as many as they like
            offers = np.random.default_rng(self.core.drafts.draft_tokens + self.number)
            drafts = offers.integers(0, 7, self.core.config.max_seqs).astype(np.int32)
        plan = self.core.schedule(self.now, drafts=drafts)
        assert not len(plan.drafts) or plan.repeat == 1
        result = self.oracle.execute(plan)
        self.plan = plan if plan else None
        self.result = result

    @rule()
    @precondition(lambda self: self.plan is not None)
    def apply(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        self.observe(self.core.apply(plan, self.result))

    @rule(steps=st.integers(1, 8))
    @precondition(lambda self: self.plan is None and self.flying)
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.lawful()

    def step(self) -> None:
        self.schedule()
        if self.plan is not None:
            self.apply()

    @rule(data=st.data())
    @precondition(lambda self: self.flying)
    def abort(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.flying)))
        effects = self.core.abort(name)
        assert [finished.request for finished in effects.finished] == [name]
        self.observe(effects)

    @rule(data=st.data())
    @precondition(lambda self: self.oracle.loads)
    def answer(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.oracle.loads)))
        size = self.core.config.block_size
        most = len(self.oracle.loads[name].blocks) * size
        tokens = data.draw(st.sampled_from([0, most, most // 2]))
        self.observe(self.oracle.answer(name, tokens))

    @rule(data=st.data(), by_abort=st.booleans())
    @precondition(lambda self: self.oracle.held)
    def release(self, data: Any, by_abort: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.oracle.held)))
        del self.oracle.held[name]
        call = self.core.abort if by_abort else self.core.release
        effects = call(name)
        assert not effects.finished
        self.observe(effects)

    @rule(start=st.integers(0, 1), length=st.integers(1, 12), tail=st.integers(0, 3))
    def hold_cached(self, start: int, length: int, tail: int) -> None:
        """Hold what is cached of a prompt that nobody need have asked for, for another worker."""
        tokens = [start] * length + [1] * tail
        name = f"h{self.number}"
        self.number += 1
        request = self.oracle.request(name, tokens, 1)
        held = self.core.hold_cached(request, self.now)
        assert len(held) <= len(tokens) // self.core.config.block_size
        if len(held):
            self.oracle.keep(request, tokens, held)

    @rule()
    @precondition(lambda self: self.number % 8 == 7)
    def clear(self) -> None:
        self.observe(self.core.clear_cache())
        assert self.core.cached_blocks == 0

    @invariant()
    def lawful(self) -> None:
        if not hasattr(self, "oracle"):
            return
        # Between schedule and apply, blocks are written that are cached until the apply.
        if self.plan is None:
            self.oracle.check()
        else:
            self.core.check_integrity()

    def settle(self) -> None:
        """End all loads, in full."""
        for name in list(self.oracle.loads):
            size = self.core.config.block_size
            self.observe(self.oracle.answer(name, len(self.oracle.loads[name].blocks) * size))

    def teardown(self) -> None:
        """Everybody finishes, in bounded time, and everything is free again."""
        if not hasattr(self, "oracle"):
            return
        if self.plan is not None:
            self.apply()
        tokens = sum(s.request.prompt + s.request.max_tokens for s in self.oracle.streams.values())
        for _ in range(20 * tokens + 100):
            if not self.flying:
                break
            self.step()
            self.lawful()
            self.settle()
            for name in list(self.oracle.held):
                del self.oracle.held[name]
                self.observe(self.core.release(name))
        assert not self.flying, "somebody never finishes"
        self.settle()
        for name in list(self.oracle.held):
            del self.oracle.held[name]
            self.observe(self.core.release(name))
        self.oracle.check()
        assert self.core.free_blocks == self.core.config.blocks
        assert self.core.running == self.core.waiting == self.core.held == 0


Seam.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestSeam = Seam.TestCase
