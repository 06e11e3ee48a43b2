"""Laws of the control plane, driven by random mixes of everything that can happen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ConfigError, ControlConfig
from pigou.control.journal import report_tokens
from pigou.control.messages import (
    Action,
    Decision,
    Ended,
    FirstToken,
    LoadReport,
    PrefillDone,
    Queue,
    Route,
    Shed,
    WorkerDown,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.control.routing.policy import load
from pigou.control.routing.selection import select
from pigou.control.routing.view import Candidates, FleetView
from pigou.control.state import FleetState
from pigou.request import SECOND, FinishReason, Request, Role, Worker

ROLES = [Role.PREFILL, Role.DECODE, Role.BOTH]
LIMIT = 3
COUNTS = (
    "prefill_requests", "prefill_tokens", "prefill_pairs", "decode_requests", "decode_tokens",
    "decoding", "pending_prefill_tokens",
)  # fmt: skip


@dataclass
class Driver:
    """Does what a gateway does, and remembers what the laws speak of."""

    plane: ControlPlane
    now: int = 0
    serial: int = 0
    waiting: list[str] = field(default_factory=list)
    running: dict[str, Route] = field(default_factory=dict)
    lost: dict[str, tuple[Request, str]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    up: dict[str, Role] = field(default_factory=dict)

    def submit(self, prompt: int) -> None:
        request = Request(f"r{self.serial}", prompt, 8, arrival=self.now)
        self.serial += 1
        self.requests[request.id] = request
        decision = self.plane.submit(request, self.now)
        assert isinstance(decision, Route | Queue | Shed)
        self.take([decision])

    def resubmit(self) -> None:
        if self.lost:
            key = next(iter(self.lost))
            request, worker = self.lost.pop(key)
            decision = self.plane.submit(request, self.now, frozenset({worker}))
            assert not isinstance(decision, Shed), "a request that lost its worker was shed"
            self.take([decision], returned=True)

    def take(self, decisions: list[Decision] | list[Action], returned: bool = False) -> None:
        for decision in decisions:
            if isinstance(decision, Route):
                assert self.up[decision.choice.decode].decodes
                if decision.choice.prefill is not None:
                    assert self.up[decision.choice.prefill].prefills
                    assert decision.choice.prefill != decision.choice.decode
                if decision.request in self.waiting:
                    self.waiting.remove(decision.request)
                self.running[decision.request] = decision
            elif isinstance(decision, Queue):
                self.waiting.append(decision.request)
            else:
                if decision.request in self.waiting:
                    self.waiting.remove(decision.request)
                assert SECOND <= decision.retry_after <= 60 * SECOND

    def down(self, worker: str) -> None:
        self.up.pop(worker, None)
        self.take(list(self.plane.observe(WorkerDown(worker), self.now)))
        for key, route in list(self.running.items()):
            if worker in (route.choice.decode, route.choice.prefill):
                del self.running[key]
                self.lost[key] = (self.requests[key], worker)

    def check(self) -> None:
        state = self.plane.state
        for name in COUNTS:
            assert (getattr(state.columns, name) >= 0).all(), f"{name} fell below zero"
        for worker, row in state.row.items():
            streams = [load for load in state.requests.values() if load.decode == worker]
            assert state.columns.decode_requests[row] == len(streams)
            assert state.columns.decode_tokens[row] == sum(load.tokens for load in streams)
            assert state.columns.decoding[row] == sum(load.decoding for load in streams)
            coming = sum(load.request.prompt for load in streams if not load.decoding)
            assert state.columns.pending_prefill_tokens[row] == coming
            assert len(streams) <= LIMIT
            prompts = [load for load in state.requests.values() if load.prefill == worker]
            first = min(prompts, key=lambda load: load.routed_at, default=None)
            assert state.backlog.tokens[row] == (first.uncached if first else 0)
            assert state.backlog.since[row] >= (first.routed_at if first else 0)
        queued = [waiting.request.id for waiting in self.plane.queue]
        assert sorted(queued) == sorted(self.waiting), "the queue lost or invented a request"


STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 100)),
    st.tuples(st.just("up"), st.integers(0, 4)),
    st.tuples(st.just("down"), st.integers(0, 4)),
    st.tuples(st.just("end"), st.integers(0, 50)),
    st.tuples(st.just("prefilled"), st.integers(0, 50)),
    st.tuples(st.just("first"), st.integers(0, 50)),
    st.tuples(st.just("tokens"), st.integers(0, 50)),
    st.tuples(st.just("resubmit"), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 50)),
    st.tuples(st.just("wait"), st.integers(0, 3 * SECOND)),
)


def step(driver: Driver, kind: str, value: int) -> None:
    plane, running = driver.plane, list(driver.running)
    chosen = running[value % len(running)] if running else "nobody"
    if kind == "submit":
        driver.submit(value)
    elif kind == "up":
        role = ROLES[value % 3]
        driver.up[f"w{value}"] = role
        worker = Worker(f"w{value}", "http://x", role)
        driver.take(list(plane.observe(WorkerUp(worker), driver.now)))
    elif kind == "down":
        driver.down(f"w{value}")
    elif kind == "end":
        driver.running.pop(chosen, None)
        driver.take(list(plane.observe(Ended(chosen, FinishReason.STOP), driver.now)))
    elif kind == "prefilled":
        plane.observe(PrefillDone(chosen), driver.now)
    elif kind == "first":
        plane.observe(FirstToken(chosen), driver.now)
    elif kind == "tokens":
        report_tokens(plane, [(chosen, value)], driver.now)
    elif kind == "resubmit":
        driver.resubmit()
    elif kind == "cancel" and driver.waiting:
        gone = driver.waiting.pop(value % len(driver.waiting))
        plane.observe(Ended(gone, FinishReason.ABORT), driver.now)
    elif kind == "wait":
        driver.now += value
        driver.take(list(plane.tick(driver.now)))


@settings(max_examples=examples(150))
@given(st.lists(STEPS, max_size=60), st.integers(0, 3))
def test_load_is_never_negative_and_no_request_is_lost(
    steps: list[tuple[str, int]], seed: int
) -> None:
    config = ControlConfig(max_queued=4, max_inflight=LIMIT, queue_timeout=5 * SECOND, seed=seed)
    driver = Driver(ControlPlane(config))
    for kind, value in steps:
        step(driver, kind, value)
        driver.check()
    for key in list(driver.running):
        driver.plane.observe(Ended(key, FinishReason.STOP), driver.now)
        driver.running.pop(key)
    for key in list(driver.lost):
        driver.plane.observe(Ended(key, FinishReason.ERROR), driver.now)
    driver.now += 60 * SECOND
    driver.plane.tick(driver.now)
    assert not driver.plane.state.requests or driver.plane.state.workers
    assert len(driver.plane.queue) == 0


def test_the_queue_is_first_come_first_served() -> None:
    plane = ControlPlane(ControlConfig(max_inflight=1))
    for i in range(5):
        assert plane.submit(Request(f"r{i}", 4, 4), i) == Queue(f"r{i}", i)
    routed = [r.request for r in plane.observe(WorkerUp(Worker("w", "u")), 9)]  # type: ignore[union-attr]
    while len(routed) < 5:
        decisions = plane.observe(Ended(routed[-1], FinishReason.STOP), 10)
        routed += [decision.request for decision in decisions]
    assert routed == [f"r{i}" for i in range(5)]


def test_a_full_queue_sheds_with_a_wait_from_the_measured_drain_rate() -> None:
    plane = ControlPlane(ControlConfig(max_inflight=1, max_queued=2))
    plane.observe(WorkerUp(Worker("w", "u")), 0)
    for i in range(4):  # one leaves every two seconds
        plane.submit(Request(f"a{i}", 4, 4), 2 * i * SECOND)
        plane.observe(Ended(f"a{i}", FinishReason.STOP), 2 * (i + 1) * SECOND)
    now = 8 * SECOND
    for i in range(3):
        plane.submit(Request(f"b{i}", 4, 4), now)
    shed = plane.submit(Request("c", 4, 4), now)
    assert isinstance(shed, Shed)
    assert shed.retry_after == 3 * 2 * SECOND


def test_a_request_that_lost_its_worker_goes_first() -> None:
    plane = ControlPlane(ControlConfig(max_inflight=1, max_queued=1))
    plane.observe(WorkerUp(Worker("a", "u")), 0)
    plane.submit(Request("old", 4, 4), 0)
    plane.submit(Request("new", 4, 4), 0)
    plane.observe(WorkerDown("a"), 1)
    assert plane.submit(Request("old", 4, 4), 1, frozenset({"a"})) == Queue("old", 0)
    (route,) = plane.observe(WorkerUp(Worker("b", "u")), 2)
    assert route.request == "old"


def test_an_excluded_worker_is_tried_again_when_nobody_else_can() -> None:
    plane = ControlPlane(ControlConfig())
    plane.observe(WorkerUp(Worker("a", "u")), 0)
    assert isinstance(plane.submit(Request("r", 4, 4), 0, frozenset({"a"})), Queue)
    assert plane.tick(SECOND // 2) == []
    (route,) = plane.tick(SECOND)
    assert isinstance(route, Route)
    assert route.choice.decode == "a"


def test_a_request_that_waits_too_long_is_shed() -> None:
    plane = ControlPlane(ControlConfig(queue_timeout=SECOND))
    plane.submit(Request("r", 4, 4), 0)
    assert plane.tick(SECOND - 1) == []
    (shed,) = plane.tick(SECOND)
    assert isinstance(shed, Shed)
    assert len(plane.queue) == 0


def fleet(*roles: Role) -> ControlPlane:
    plane = ControlPlane(ControlConfig(policy="least-loaded"))
    for i, role in enumerate(roles):
        plane.observe(WorkerUp(Worker(f"{role}{i}", "u", role)), 0)
    return plane


def choices(plane: ControlPlane, prompt: int, count: int) -> list[tuple[str | None, str]]:
    found = []
    for i in range(count):
        decision = plane.submit(Request(f"{prompt}-{i}", prompt, 4), 0)
        assert isinstance(decision, Route)
        found.append((decision.choice.prefill, decision.choice.decode))
    return found


def test_workers_of_different_versions_exchange_no_kv() -> None:
    plane = ControlPlane(ControlConfig(policy="random"))
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        for i, version in enumerate(("", "a", "b", *"aaaaa")):
            worker = Worker(f"{name}{i}", "u", role, version=version)
            plane.observe(WorkerUp(worker), 0)
    versions = {worker.id: worker.version for worker in plane.state.workers}
    pairs = {pair for pair in choices(plane, 100, 300) if pair[0]}
    assert {versions[str(prefill)] for prefill, _ in pairs} == {"", "a", "b"}
    assert all(versions[str(prefill)] == versions[decode] for prefill, decode in pairs)
    plane.observe(WorkerUp(Worker("d2", "u", Role.DECODE, version="c")), 0)
    assert "d2" not in {decode for prefill, decode in choices(plane, 101, 100) if prefill}


def test_caches_are_read_within_one_version_alone() -> None:
    state = FleetState()
    for name, version in (("a", "1"), ("b", "2"), ("c", "1")):
        state.up(Worker(name, "u", layout="tcp:x", version=version))
    layout = state.columns.layout
    assert layout[0] == layout[2] != layout[1]


def test_a_long_prompt_is_computed_by_a_prefill_worker() -> None:
    plane = fleet(Role.PREFILL, Role.DECODE, Role.DECODE)
    found = choices(plane, 64, 4)
    assert all(prefill == "prefill0" for prefill, _ in found)
    assert sorted(decode for _, decode in found) == ["decode1"] * 2 + ["decode2"] * 2


def test_a_prompt_below_one_block_is_computed_where_it_is_decoded() -> None:
    plane = fleet(Role.PREFILL, Role.DECODE)
    assert choices(plane, 15, 1) == [(None, "decode1")]


def test_without_prefill_workers_prompts_are_computed_locally() -> None:
    assert choices(fleet(Role.BOTH), 64, 2) == [(None, "both0")] * 2
    assert choices(fleet(Role.DECODE), 64, 1) == [(None, "decode0")]


def test_the_prompt_goes_to_the_prefill_worker_with_fewest_tokens() -> None:
    plane = fleet(Role.PREFILL, Role.PREFILL, Role.DECODE)
    plane.submit(Request("long", 1000, 4), 0)
    busy = int(np.argmax(plane.state.columns.prefill_tokens))
    assert choices(plane, 32, 3) == [(f"prefill{1 - busy}", "decode2")] * 3


def test_a_prefill_worker_that_died_is_not_used_again() -> None:
    plane = fleet(Role.PREFILL, Role.DECODE)
    plane.observe(WorkerDown("prefill0"), 1)
    assert choices(plane, 64, 1) == [(None, "decode1")]


def test_reports_of_a_worker_reach_the_policies() -> None:
    plane = fleet(Role.BOTH)
    plane.observe(LoadReport("both0", running=3, waiting=2, kv_usage=0.5), 0)
    view = plane.view(Request("r", 4, 4), 0)
    assert (view.running[0], view.waiting[0], view.kv_usage[0]) == (3, 2, 0.5)


def test_ties_are_broken_at_random_and_by_the_seed_alone() -> None:
    def picks(seed: int) -> list[int]:
        generator = np.random.default_rng(seed)
        costs = np.array([2.0, 1.0, 1.0, 1.0])
        found = [select(costs, generator) for _ in range(60)]
        return [pick.index for pick in found if pick is not None]

    assert picks(1) == picks(1)
    assert set(picks(1)) == {1, 2, 3}


def test_a_policy_may_forbid_candidates() -> None:
    generator = np.random.default_rng(0)
    assert select(np.array([np.inf, np.inf]), generator) is None
    assert select(np.empty(0), generator) is None
    with pytest.raises(ValueError, match="not a number"):
        select(np.array([np.nan]), generator)


def test_an_unknown_policy_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'nope'.*least-loaded"):
        load("nope")


def test_a_policy_of_ones_own_decides() -> None:
    class Last:
        def costs(
            self, request: Request, fleet: FleetView, candidates: Candidates
        ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return -candidates.decode.astype(np.float64)

    plane = ControlPlane(ControlConfig(), policy=Last())
    for name in "abc":
        plane.observe(WorkerUp(Worker(name, "u")), 0)
    assert choices(plane, 4, 3) == [(None, "c")] * 3


def test_a_worker_without_events_is_expected_to_hold_what_was_sent_there() -> None:
    plane = ControlPlane(ControlConfig())
    plane.observe(WorkerUp(Worker("silent", "u", events=False)), 0)
    plane.observe(WorkerUp(Worker("telling", "u")), 0)
    keys = {16: np.arange(1, 5, dtype=np.uint64)}
    for i in range(4):
        plane.submit(Request(f"r{i}", 70, 4, keys=keys), 0)
    view = plane.view(Request("r", 70, 4, keys=keys), 1)
    assert view.overlap.tolist() == [4, 0]
    plane.tick(1000 * SECOND)
    assert plane.view(Request("r", 70, 4, keys=keys), 1000 * SECOND).overlap.tolist() == [0, 0]


def test_overlap_is_counted_in_each_workers_own_blocks() -> None:
    plane = ControlPlane(ControlConfig())
    for size in (16, 32):
        plane.observe(WorkerUp(Worker(f"w{size}", "u", block_size=size, events=False)), 0)
    keys = {size: np.arange(1, 1 + 128 // size, dtype=np.uint64) for size in (16, 32)}
    for i in range(6):
        plane.submit(Request(f"r{i}", 130, 4, keys=keys), 0)
    assert plane.view(Request("r", 130, 4, keys=keys), 1).overlap.tolist() == [8, 4]


@pytest.mark.parametrize(
    ("policy", "parameter"), [("dynamo-paper", "overlap_weight"), ("dynamo", "prefill_load_scale")]
)
def test_the_papers_controller_sets_temperature_and_overlap_weight_by_regime(
    policy: str, parameter: str
) -> None:
    plane = ControlPlane(
        ControlConfig(
            policy=policy,
            controller={"controller": "regime"},
            saturation={"detector": "paper", "theta1": 0.5, "theta2": 5.0, "consecutive": 2},
        )
    )
    plane.observe(WorkerUp(Worker("w", "u")), 0)
    seen = []
    for second in range(300):
        now, ttft = second * SECOND, (1, 20, 1)[min(second // 50, 2)]
        name = f"r{second}"
        plane.submit(Request(name, 8, 4, arrival=max(1, now - ttft * SECOND // 10)), now)
        plane.observe(FirstToken(name), now + ttft * SECOND)
        plane.observe(Ended(name, FinishReason.STOP), now + ttft * SECOND)
        plane.tick(now + ttft * SECOND)
        status = plane.status(now + ttft * SECOND)
        state = (status.regime, status.temperature, status.parameters[parameter])
        if not seen or seen[-1] != state:
            seen.append(state)
    assert seen == [
        ("below", 0.0, 1.0),
        ("transition", 0.7, 1.0),
        ("saturated", 0.8, 0.1),
        ("transition", 0.7, 1.0),
    ]
