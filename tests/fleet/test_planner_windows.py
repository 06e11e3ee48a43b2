"""Windows of a live fleet: holes are None, counters that began again are no negative work."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pigou.config import ControlConfig
from pigou.control.messages import Route, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.fleet.planner_windows import PlannerWindows
from pigou.fleet.provider import ProvidedPool
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import WorkerReport
from pigou.request import SECOND, Request, Role, Worker
from pigou.windows.builder import ComputedPrompt, MeteredRequest, MeteredWindow
from pigou.windows.planner_window import PlannerWindow, WorkerState, WorkerWindow


class FakeFleet:
    """Members of one pool, as many as are given."""

    def __init__(self, *members: Any) -> None:
        self.members = members
        self.provided = {"both": ProvidedPool(name="both", role=Role.BOTH)}
        self.refusal = ""

    def start_refusal(self, pool: str) -> str:
        return self.refusal


def member(id: str, state: WorkerState = WorkerState.READY, leaving: bool = False) -> Any:
    return SimpleNamespace(
        id=id, pool="both", state=state, since_ns=5, unplaceable=False, leaving=leaving,
        row=lambda: SimpleNamespace(pid=0),
    )  # fmt: skip


def fleet(*members: Any) -> tuple[FakeFleet, PlaneDriver, PlannerWindows]:
    driver = PlaneDriver(ControlPlane(ControlConfig()))
    live = FakeFleet(*members)
    for one in members:
        if one.state is WorkerState.READY:
            worker = Worker(one.id, "", Role.BOTH, 16, 100)
            driver.plane.observe(WorkerUp(worker), time.monotonic_ns())
            driver.upstreams[one.id] = SimpleNamespace(  # type: ignore[assignment]
                worker=worker, report=None, engine=SimpleNamespace(model="m", stock=True)
            )
    return live, driver, PlannerWindows(live, driver)  # type: ignore[arg-type]


def report(driver: PlaneDriver, id: str, **values: Any) -> None:
    upstream: Any = driver.upstreams[id]
    upstream.report = WorkerReport(time.monotonic_ns(), **values)


def only(window: PlannerWindow) -> WorkerWindow:
    (pool,) = window.pools
    (worker,) = pool.workers
    return worker


async def test_a_worker_without_a_report_is_a_hole_and_never_idle() -> None:
    _, driver, windows = fleet(member("w"))
    worker = only(windows.window(time.monotonic_ns()))
    assert worker.running is worker.waiting is worker.kv_usage is None
    assert worker.prefill_s is worker.itl_s is None
    assert worker.kv_tokens == 1600
    assert worker.computed_prompts == 0  # that the gateway knows by itself
    report(driver, "w", running=0, waiting=2)
    worker = only(windows.window(time.monotonic_ns()))
    assert (worker.running, worker.waiting) == (0, 2)


async def test_an_old_report_says_nothing_of_the_present() -> None:
    _, driver, windows = fleet(member("w"))
    report(driver, "w", running=3)
    assert only(windows.window(time.monotonic_ns() + 60 * SECOND)).running is None


async def test_seconds_are_those_between_two_reports() -> None:
    _, driver, windows = fleet(member("w"))
    start_ns = time.monotonic_ns()
    report(driver, "w", itl_s=10.0, itl_count=1000.0, prefill_s=7.0)
    assert only(windows.window(start_ns + SECOND)).itl_s is None  # since when is not known
    report(driver, "w", itl_s=11.0, itl_count=1050.0, prefill_s=7.5)
    worker = only(windows.window(start_ns + 2 * SECOND))
    assert (worker.itl_s, worker.prefill_s) == (0.02, 0.5)
    report(driver, "w", itl_s=11.0, itl_count=1050.0, prefill_s=99.0)
    worker = only(windows.window(start_ns + 3 * SECOND))
    assert worker.itl_s is None  # no token came
    assert worker.prefill_s == 1.0  # prompts side by side take no longer than the window


async def test_steps_longer_than_a_window_count_whole() -> None:
    """A full step of an overloaded worker; to be cut to one second, it would look quicker."""
    for stock, seconds in ((False, [3.3, 0.0, 0.0, 3.3]), (True, [1.0, 0.0, 0.0, 3.0])):
        _, driver, windows = fleet(member("w"))
        driver.upstreams["w"].engine.stock = stock  # type: ignore[misc]
        start_ns = time.monotonic_ns()
        shown: list[float | None] = []
        for number, total in enumerate((0.0, 3.3, 3.3, 3.3, 6.6)):
            report(driver, "w", prefill_s=total)
            shown.append(only(windows.window(start_ns + number * SECOND)).prefill_s)
        assert shown[1:] == pytest.approx(seconds)


async def test_a_worker_that_began_again_has_no_negative_work() -> None:
    _, driver, windows = fleet(member("w"))
    report(driver, "w", itl_s=10.0, itl_count=1000.0, prefill_s=7.0)
    windows.window(time.monotonic_ns())
    report(driver, "w", itl_s=0.5, itl_count=10.0, prefill_s=0.1)
    worker = only(windows.window(time.monotonic_ns()))
    assert worker.itl_s is worker.prefill_s is None


async def test_workers_that_start_are_in_the_window_and_pools_say_whether_they_can_grow() -> None:
    stuck = member("w", WorkerState.STARTING)
    stuck.unplaceable = True
    live, _, windows = fleet(stuck)
    window = windows.window(time.monotonic_ns())
    assert only(window) == WorkerWindow(
        id="w", state=WorkerState.STARTING, since_ns=5, unplaceable=True
    )
    assert window.pools[0].can_start
    live.refusal = "no device is free"
    assert not windows.window(time.monotonic_ns()).pools[0].can_start


async def test_means_are_over_the_looks_at_what_the_gateway_sent_there() -> None:
    _, driver, windows = fleet(member("w"))
    now = time.monotonic_ns()
    assert isinstance(driver.plane.submit(Request("r", 40, 10), now), Route)
    windows.sample()
    worker = only(windows.window(now))
    assert worker.mean_held_tokens is not None
    assert worker.mean_held_tokens >= 40
    assert only(windows.window(now + SECOND)).mean_running is None  # nobody looked


async def test_the_model_is_the_one_that_was_served_also_while_no_worker_is_up() -> None:
    _, driver, windows = fleet(member("w"))
    assert windows.window(time.monotonic_ns()).loads[0].model == "m"
    driver.upstreams.clear()
    window = windows.window(time.monotonic_ns())
    assert (window.loads[0].model, window.pools[0].model) == ("m", "m")


async def test_prompts_count_with_the_report_that_has_their_seconds() -> None:
    _, driver, windows = fleet(member("w"))
    start_ns = time.monotonic_ns()
    upstream: Any = driver.upstreams["w"]
    upstream.report = WorkerReport(start_ns, prefill_s=1.0)
    windows.window(start_ns)
    metered = [
        MeteredRequest("", 100, 0, 0, computed=ComputedPrompt("w", 100, 100, start_ns + at))
        for at in (SECOND // 2, 3 * SECOND // 2)
    ]
    taken = iter([metered, []])
    empty: dict[str, Any] = {}
    driver.meter.take = lambda _: MeteredWindow([], next(taken), [], empty, empty, empty)  # type: ignore[method-assign]
    upstream.report = WorkerReport(start_ns + SECOND, prefill_s=1.25)
    worker = only(windows.window(start_ns + 2 * SECOND))
    assert (worker.computed_prompts, worker.prefill_s) == (1, 0.25)
    upstream.report = WorkerReport(start_ns + 3 * SECOND, prefill_s=1.5)
    worker = only(windows.window(start_ns + 4 * SECOND))
    assert (worker.computed_prompts, worker.prefill_s) == (1, 0.25)


async def test_a_worker_that_left_between_two_windows_drained_and_one_that_vanished_did_not() -> (
    None
):
    live, _, windows = fleet(member("stays"), member("left", leaving=True), member("lost"))
    windows.window(time.monotonic_ns())
    live.members = live.members[:1]
    seen = [windows.window(time.monotonic_ns()).pools[0].workers for _ in range(2)]
    assert [(worker.id, worker.state.value) for worker in seen[0]] == [
        ("stays", "ready"), ("left", "draining"),
    ]  # fmt: skip
    assert [worker.id for worker in seen[1]] == ["stays"]
