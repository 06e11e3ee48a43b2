"""Requests of LoRA adapters share the device's slots: law by law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.config import EngineConfig
from pigou.engine.adapters import AdapterSlots
from pigou.engine.core import EngineCore
from pigou.engine.plan import AdapterLoad, Plan, Result
from pigou.kv.memory_price import held_value
from pigou.kv.offload import RecomputeCost
from pigou.kv.tier_eviction.policy import TierSetting
from pigou.kv.tier_eviction.price import PriceEviction, PriceParams
from pigou.kv.tier_eviction.reuse import age_bin, use_class
from pigou.request import FinishReason, Request

CONFIG = {"block_size": 4, "max_batched_tokens": 64, "max_model_len": 64}


class Driver:
    """Runs a core, and checks that rows compute with loaded adapters alone."""

    def __init__(self, core: EngineCore, delay: int = 0) -> None:
        self.core, self.delay, self.now = core, delay, 0
        self.slots: dict[int, str] = {}
        self.due: list[tuple[int, AdapterLoad]] = []
        self.loads: list[str] = []
        self.admitted: list[str] = []
        self.finished: dict[str, FinishReason] = {}
        self.broken: set[str] = set()

    def step(self) -> Plan:
        """Plan and apply a step, after the loads that are due."""
        self.now += 1
        for at, load in [due for due in self.due if due[0] <= self.now]:
            self.due.remove((at, load))
            good = load.adapter not in self.broken
            if good:
                self.slots[load.slot] = load.adapter
            for end in self.core.adapter_loaded(load.adapter, good).finished:
                self.finished[end.request] = end.reason
        plan = self.core.schedule(self.now)
        self.admitted += [started.request for started in plan.started]
        owners = [self.core.rows.owner[row] for row in plan.rows.tolist()]
        used = {seq.request.model for seq in owners if seq is not None} - {""}
        assert used <= set(self.slots.values())
        for load in plan.adapters:
            assert self.slots.get(load.slot, "") not in used, "a slot in use was taken"
            self.slots.pop(load.slot, None)
            self.due.append((self.now + 1 + self.delay, load))
            self.loads.append(load.adapter)
        for end in self.core.apply(plan, Result(steps=1)).finished:
            self.finished[end.request] = end.reason
        self.core.check_integrity()
        return plan

    def run(self, steps: int) -> None:
        """Run until nobody is left, within `steps`."""
        for _ in range(steps):
            if not (self.core.running or self.core.waiting):
                return
            self.step()
        raise AssertionError(f"{self.core.running} run and {self.core.waiting} wait")


def core_of(max_loras: int, **options: int) -> EngineCore:
    """Build a core of few blocks."""
    return EngineCore(EngineConfig(**{"blocks": 24, "max_seqs": 4, "max_loras": max_loras,
                                      **CONFIG, **options}))  # fmt: skip


def request(id: str, model: str, max_tokens: int = 4, arrival: int = 0) -> Request:
    """Build a request for an adapter."""
    return Request(id, prompt=5, max_tokens=max_tokens, arrival=arrival, model=model)


def test_others_pass_a_request_whose_adapter_has_no_slot() -> None:
    driver = Driver(core_of(1))
    for at, (id, model) in enumerate([("a", "x"), ("b", "y"), ("c", ""), ("d", "x")]):
        driver.core.add(request(id, model, arrival=at))
    driver.run(40)
    assert driver.admitted == ["c", "a", "d", "b"]
    assert driver.loads == ["x", "y"]


def test_no_adapter_starves_beside_one_that_is_always_in_use() -> None:
    driver = Driver(core_of(1))
    driver.core.add(request("first", "hot", 8))
    for _ in range(3):
        driver.step()
    driver.core.add(request("cold", "cold", arrival=1))
    for at in range(2, 60):
        driver.core.add(request(f"hot{at}", "hot", 8, arrival=at))
        driver.step()
    # Overtaken by its slot's share of the rows, and by those that ran already.
    assert driver.admitted.index("cold") <= 1 + 4
    driver.run(2000)


def test_a_failed_load_ends_the_requests_that_wait_for_it_and_no_others() -> None:
    driver = Driver(core_of(1))
    driver.broken = {"bad"}
    for at, model in enumerate(["bad", "good", "bad", ""]):
        driver.core.add(request(f"{at}", model, arrival=at))
    driver.run(40)
    assert driver.finished == {
        "0": FinishReason.ERROR, "1": FinishReason.LENGTH,
        "2": FinishReason.ERROR, "3": FinishReason.LENGTH,
    }  # fmt: skip


def test_a_slot_whose_requests_were_aborted_while_it_loaded_goes_to_the_next() -> None:
    driver = Driver(core_of(1), delay=2)
    driver.core.add(request("a", "x"))
    driver.step()
    driver.core.add(request("b", "y", arrival=1))
    driver.step()
    driver.core.abort("a")
    driver.run(20)
    assert driver.admitted == ["b"]


def test_the_idle_adapter_of_least_value_leaves_whatever_was_used_last() -> None:
    driver = Driver(core_of(2))
    for at, model in enumerate(["hot", "hot", "hot", "once", "new"]):
        driver.core.add(request(f"{at}", model, 1, arrival=at))
        driver.run(10)
    driver.core.add(request("last", "hot", 1, arrival=9))
    driver.run(10)
    assert driver.loads == ["hot", "once", "new"], "the least recently used would be loaded again"


def test_value_is_use_times_reload_seconds_over_bytes_as_for_kv_in_a_tier() -> None:
    slots = AdapterSlots(2, 4, lambda name: True)
    for name, seconds in (("slow", 0.9), ("quick", 0.1)):
        slots.admits(name)
        slots.loaded(name, True, seconds)
    for name in ["quick"] * 3 + ["slow"]:
        slots.enter(name)
        slots.leave(name)
    # one use in four of 0.9 s is worth more than three of 0.1 s
    assert slots.value("slow") == pytest.approx(3 * slots.value("quick"), rel=0.05)
    setting = TierSetting(1, recompute_cost=RecomputeCost(base=0.9, slope=0.0, restore=0.0))
    tier = PriceEviction(setting, PriceParams())
    rate = tier.reuse.rates[use_class(1)][age_bin(0)]
    assert tier.value(1, 0, 0, 100) == pytest.approx(held_value(rate, 0.9, 100))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from(["", "u", "v", "w", "x", "y"]), st.integers(1, 12),
                  st.integers(0, 3), st.booleans()),
        min_size=1, max_size=24,
    ),
    st.integers(0, 3),
)  # fmt: skip
def test_every_request_ends_and_rows_use_loaded_adapters(
    max_loras: int, work: list[tuple[str, int, int, bool]], delay: int
) -> None:
    driver = Driver(core_of(max_loras, blocks=9), delay)
    driver.broken = {"y"}
    aborted = set()
    for at, (model, tokens, wait, gone) in enumerate(work):
        driver.core.add(request(f"{at}", model, tokens, arrival=at))
        for _ in range(wait):
            driver.step()
        if gone and f"{at}" in driver.core:
            driver.core.abort(f"{at}")
            aborted.add(f"{at}")
    driver.run(4000)
    wanted = {
        f"{at}": FinishReason.ERROR if model == "y" else FinishReason.LENGTH
        for at, (model, *_) in enumerate(work)
    }
    for id, reason in driver.finished.items():
        assert reason is wanted[id] or id in aborted
    assert driver.finished.keys() | aborted == wanted.keys()
    assert np.array_equal(driver.core.rows.used, 0)
