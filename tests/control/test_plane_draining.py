"""A draining worker: it gets nothing new, ends what it has, and is not expected back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ControlConfig
from pigou.control.messages import (
    Ended,
    FirstToken,
    LoadReport,
    PrefillDone,
    Queue,
    Recall,
    Route,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Role, Worker

POLICIES = ["toll", "least-loaded", "round-robin", "dynamo", "lmetric"]


def plane(*roles: Role, policy: str = "toll") -> ControlPlane:
    """Return a plane with workers w0, w1, ... of these roles."""
    made = ControlPlane(ControlConfig(policy=policy))
    for number, role in enumerate(roles):
        made.observe(WorkerUp(Worker(f"w{number}", "", role, max_seqs=64)), 0)
    return made


def submit(made: ControlPlane, number: int, now: int = 1) -> Route:
    """Submit a request; it must be routed at once."""
    route = made.submit(Request(f"r{number}", 100, 50, arrival=now), now)
    assert isinstance(route, Route)
    return route


@pytest.mark.parametrize("policy", POLICIES)
def test_a_draining_worker_gets_nothing_and_keeps_what_it_has(policy: str) -> None:
    made = plane(Role.BOTH, Role.BOTH, policy=policy)
    routes = [submit(made, number) for number in range(20)]
    before = sum(route.choice.decode == "w0" for route in routes)
    assert before
    made.observe(WorkerDraining("w0"), 2)
    assert {submit(made, number, 3).choice.decode for number in range(20, 60)} == {"w1"}
    assert made.state.figures("w0")["decode_requests"] == before
    assert not made.state.is_drained("w0")
    for number in range(20):
        made.observe(Ended(f"r{number}", FinishReason.STOP), 4)
    assert made.state.is_drained("w0")
    assert not made.state.is_drained("w1")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_draining_prefill_worker_leaves_prompts_to_the_others(policy: str) -> None:
    made = plane(Role.PREFILL, Role.PREFILL, Role.DECODE, policy=policy)
    made.observe(WorkerDraining("w1"), 1)
    routes = [submit(made, number, 2) for number in range(20)]
    assert {route.choice.prefill for route in routes} <= {"w0", None}
    made.observe(WorkerDraining("w0"), 3)
    assert submit(made, 20, 4).choice.prefill is None  # where the stream runs, then


def test_a_prompt_under_way_comes_to_its_draining_decode_worker() -> None:
    made = plane(Role.PREFILL, Role.DECODE, policy="round-robin")
    route = submit(made, 0)
    made.observe(WorkerDraining("w1"), 2)
    assert not made.state.is_drained("w1")
    if route.choice.prefill:
        made.observe(PrefillDone("r0"), 3)
    made.observe(FirstToken("r0"), 4)
    assert not made.state.is_drained("w1")
    made.observe(Ended("r0", FinishReason.STOP), 5)
    assert made.state.is_drained("w1")


def test_requests_queue_while_all_workers_drain_and_a_worker_that_is_up_takes_them() -> None:
    made = plane(Role.BOTH)
    made.observe(WorkerDraining("w0"), 1)
    assert isinstance(made.submit(Request("r0", 100, 50), 2), Queue)
    (route,) = made.observe(WorkerUp(Worker("w1", "", max_seqs=64)), 3)
    assert isinstance(route, Route)
    assert route.choice.decode == "w1"


@pytest.mark.parametrize("role", list(Role))
def test_a_worker_that_is_up_again_has_its_new_role_and_its_cache(role: Role) -> None:
    made = plane(Role.BOTH, Role.BOTH)
    made.observe(WorkerDraining("w0"), 1)
    made.observe(WorkerUp(Worker("w0", "", role, max_seqs=64)), 2)
    row = made.state.row["w0"]
    assert bool(made.state.columns.prefills[row]) == role.prefills
    assert bool(made.state.columns.decodes[row]) == role.decodes
    assert not made.state.draining


def test_what_waits_inside_a_draining_worker_is_recalled_and_streams_are_not() -> None:
    made = plane(Role.BOTH, Role.BOTH, policy="round-robin")
    for number in range(20):
        submit(made, number)
    own = [r.request.id for r in made.state.requests.values() if r.decode == "w0"]
    for request in own[:4]:
        made.observe(FirstToken(request), 2)
    made.observe(LoadReport("w0", 4, len(own) - 4, 0.5), 3)
    recalled = made.observe(WorkerDraining("w0"), 4)
    assert [type(each) for each in recalled] == [Recall] * (len(own) - 5)
    assert {each.request for each in recalled}.isdisjoint(own[:5])


def test_nothing_is_recalled_where_nobody_else_decodes() -> None:
    made = plane(Role.BOTH)
    for number in range(5):
        submit(made, number)
    made.observe(LoadReport("w0", 1, 4, 0.5), 2)
    assert not made.observe(WorkerDraining("w0"), 3)


def test_a_drained_worker_is_not_expected_back_and_a_lost_one_is() -> None:
    made = plane(Role.BOTH, Role.BOTH, Role.BOTH)
    made.observe(WorkerDraining("w0"), 1)
    made.observe(WorkerDown("w0"), 2)
    assert not made.returning.away(3)
    made.observe(WorkerDown("w1"), 3)
    assert set(made.returning.away(4)) == {"w1"}


def test_draining_an_unknown_worker_is_no_error() -> None:
    made = plane(Role.BOTH)
    assert not made.observe(WorkerDraining("nobody"), 1)
    assert not made.state.draining
    assert made.state.is_drained("nobody")


@given(st.lists(st.sampled_from(["drain", "up", "down", "submit", "end"]), max_size=60))
def test_whatever_happens_nothing_is_sent_to_a_draining_worker(events: list[str]) -> None:
    made = plane(Role.BOTH, Role.BOTH, policy="least-loaded")
    now, count, routed = SECOND, 0, list[str]()
    for event in events:
        now += 1
        decisions: list[object] = []
        if event == "submit":
            decisions = [made.submit(Request(f"r{count}", 64, 8), now)]
            count += 1
        elif event == "end" and routed:
            decisions = list(made.observe(Ended(routed.pop(), FinishReason.STOP), now))
        elif event == "drain":
            made.observe(WorkerDraining("w0"), now)
        elif event == "up":
            decisions = list(made.observe(WorkerUp(Worker("w0", "", max_seqs=64)), now))
        elif event == "down":
            made.observe(WorkerDown("w0"), now)
        for decision in decisions:
            if isinstance(decision, Route):
                routed.append(decision.request)
                assert decision.choice.decode not in made.state.draining
    assert made.state.draining <= {"w0"}
