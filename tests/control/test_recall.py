"""Laws of what waits inside workers, and of the queue when workers come back."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from pigou.config import ControlConfig
from pigou.control.journal import report_tokens
from pigou.control.messages import (
    Decision,
    Ended,
    FirstToken,
    LoadReport,
    PrefillDone,
    Queue,
    Recall,
    Route,
    Shed,
    WorkerDown,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Role, Worker


class Driver:
    """Does what the gateway does with decisions."""

    def __init__(self, workers: int = 3, max_seqs: int = 256, **options: object) -> None:
        self.plane = ControlPlane(ControlConfig(**({"policy": "least-loaded"} | options)))  # type: ignore[arg-type]
        self.workers = [Worker(f"w{n}", "u", max_seqs=max_seqs) for n in range(workers)]
        self.at: dict[str, str] = {}
        self.began: set[str] = set()
        self.shed: set[str] = set()
        self.recalled = 0
        self.requests: dict[str, Request] = {}

    def submit(self, number: int, now: int, streamed: bool = True) -> None:
        request = Request(f"r{number}", 64, 400, arrival=now, streamed=streamed)
        self.requests[request.id] = request
        self.take([self.plane.submit(request, now)], now)

    def up(self, number: int, now: int) -> None:
        self.take(self.plane.observe(WorkerUp(self.workers[number]), now), now)

    def down(self, number: int, now: int) -> None:
        """A worker dies; its requests are submitted again."""
        name = self.workers[number].id
        lost = [request for request, worker in self.at.items() if worker == name]
        self.take(self.plane.observe(WorkerDown(name), now), now)
        for request in lost:
            del self.at[request]
            self.began.discard(request)
            again = self.plane.submit(self.requests[request], now, frozenset({name}))
            self.take([again], now)

    def tick(self, now: int) -> None:
        self.take([each for each in self.plane.tick(now) if isinstance(each, Decision)], now)

    def begin(self, request: str, now: int) -> None:
        """A request has its first token."""
        self.began.add(request)
        self.take(self.plane.observe(FirstToken(request), now), now)
        report_tokens(self.plane, [(request, 1)], now)

    def take(self, decisions: object, now: int) -> None:
        for each in decisions:  # type: ignore[attr-defined]
            if isinstance(each, Route):
                self.at[each.request] = each.choice.decode
            elif isinstance(each, Recall):
                assert each.request not in self.began
                assert self.at.pop(each.request) == each.worker
                self.recalled += 1
                again = self.plane.submit(
                    self.requests[each.request], now, frozenset({each.worker})
                )
                self.take([again], now)
            elif isinstance(each, Shed):
                self.shed.add(each.request)
                self.at.pop(each.request, None)
                self.plane.observe(Ended(each.request, FinishReason.ERROR), now)
            else:
                assert isinstance(each, Queue)

    def shares(self) -> Counter[str]:
        return Counter(self.at.values())


def all_down(workers: int, requests: int, **options: object) -> Driver:
    """Return a driver whose workers have all died, and then requests came, at 2 s."""
    driver = Driver(workers, **options)  # type: ignore[arg-type]
    for number in range(workers):
        driver.up(number, 0)
    for number in range(workers):
        driver.down(number, SECOND)
    for number in range(requests):
        driver.submit(number, 2 * SECOND)
    return driver


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("gap_s", [0.5, 5.0, 12.0])
def test_workers_that_come_back_one_after_another_share_the_queue(
    order: tuple[int, ...], gap_s: float
) -> None:
    driver = all_down(workers=3, requests=120)
    assert not driver.at
    now = 4 * SECOND
    for number in order:
        driver.up(number, now)
        end = now + int(gap_s * SECOND)
        while now < end:  # what was sent gets its tokens, and runs on
            for request in set(driver.at) - driver.began:
                driver.begin(request, now)
            now += SECOND // 10
            driver.tick(now)
    assert sorted(driver.shares().values()) == [40, 40, 40]
    assert not driver.shed


@pytest.mark.parametrize("workers", [3, 8, 16])
def test_workers_without_a_limit_of_streams_share_as_others_do(workers: int) -> None:
    """Their limit is 2^60, of which the sum over eight is beyond 64 bits."""
    driver = all_down(workers, requests=10 * workers, max_inflight=2**60)
    driver.up(0, 3 * SECOND)
    assert driver.shares() == {"w0": 10}
    for number in range(1, workers):
        driver.up(number, 3 * SECOND)
    assert sorted(driver.shares().values()) == [10] * workers
    driver.up(0, 4 * SECOND)
    assert sorted(driver.shares().values()) == [10] * workers


def test_a_worker_that_never_comes_back_keeps_nobody_waiting_for_long() -> None:
    driver = all_down(workers=2, requests=40)
    driver.up(0, 3 * SECOND)
    assert driver.shares() == {"w0": 20}
    for tenth in range(31, 500):
        driver.tick(tenth * SECOND // 10)
    assert driver.shares() == {"w0": 40}
    assert not driver.shed


def test_what_has_waited_for_nearly_all_of_its_time_waits_for_no_share() -> None:
    driver = all_down(workers=2, requests=40)
    driver.up(0, 60 * SECOND)
    assert driver.shares() == {"w0": 40}


def test_what_waits_at_a_worker_goes_to_one_that_comes_up() -> None:
    driver = Driver(workers=2)
    driver.up(0, 0)
    for number in range(30):
        driver.submit(number, SECOND)
    for number in range(10):
        driver.begin(f"r{number}", 2 * SECOND)
    driver.up(1, 3 * SECOND)
    assert driver.shares() == {"w0": 15, "w1": 15}
    assert {driver.at[f"r{number}"] for number in range(11)} == {"w0"}, "the oldest stay"
    assert driver.recalled == 15


def test_what_has_tokens_is_left_where_it_is() -> None:
    driver = Driver(workers=2)
    driver.up(0, 0)
    for number in range(30):
        driver.submit(number, SECOND)
        driver.begin(f"r{number}", SECOND)
    driver.up(1, 3 * SECOND)
    assert driver.shares() == {"w0": 30}


def test_replies_that_are_not_streamed_move_only_where_the_worker_says_that_they_wait() -> None:
    driver = Driver(workers=2)
    driver.up(0, 0)
    for number in range(20):
        driver.submit(number, SECOND, streamed=False)
    for tenth in range(11, 200):  # long enough that all prompts count as computed
        driver.tick(tenth * SECOND // 10)
    driver.plane.observe(LoadReport("w0", 16, 4, 0.5), 20 * SECOND)
    driver.up(1, 21 * SECOND)
    assert driver.shares() == {"w0": 16, "w1": 4}
    assert {driver.at[f"r{number}"] for number in range(16, 20)} == {"w1"}


def test_a_prefill_worker_that_comes_up_takes_prompts_over() -> None:
    plane = ControlPlane(ControlConfig())
    plane.observe(WorkerUp(Worker("d", "u", Role.DECODE)), 0)
    plane.observe(WorkerUp(Worker("p0", "u", Role.PREFILL)), 0)
    choices = [plane.submit(Request(f"r{n}", 4096, 8), SECOND) for n in range(8)]
    remote = [each for each in choices if isinstance(each, Route) and each.choice.prefill]
    assert len(remote) > 2
    found = plane.observe(WorkerUp(Worker("p1", "u", Role.PREFILL)), 2 * SECOND)
    recalled = [each for each in found if isinstance(each, Recall)]
    assert len(recalled) == len(remote) // 2
    assert {each.worker for each in recalled} == {"p0"}
    plane.observe(PrefillDone(recalled[0].request, False), 2 * SECOND)


def inside(timeout_s: int = 60) -> Driver:
    """Return a driver of one worker that runs four requests, and holds four that wait."""
    driver = Driver(workers=1, max_seqs=0, queue_timeout=timeout_s * SECOND)
    driver.up(0, 0)
    for number in range(8):
        driver.submit(number, SECOND)
    for number in range(4):
        driver.begin(f"r{number}", 2 * SECOND)
    return driver


def test_a_request_that_waits_inside_a_worker_is_shed_when_its_time_is_over() -> None:
    driver = inside()
    for second in range(2, 60):
        driver.plane.observe(LoadReport("w0", 4, 4, 0.9), second * SECOND)
        driver.tick(second * SECOND)
        assert not driver.shed
    driver.tick(61 * SECOND)
    assert driver.shed == {"r4", "r5", "r6", "r7"}
    driver.tick(62 * SECOND)
    assert len(driver.plane.state.requests) == 4


def test_a_prompt_that_takes_long_is_not_shed() -> None:
    driver = inside()
    driver.plane.observe(LoadReport("w0", 5, 3, 0.9), 299 * SECOND)
    driver.tick(300 * SECOND)
    assert driver.shed == {"r5", "r6", "r7"}, "the worker is at the prompt of the oldest"
    driver.plane.observe(LoadReport("w0", 5, 0, 0.9), 301 * SECOND)
    driver.tick(900 * SECOND)
    assert len(driver.shed) == 3


def test_a_reply_that_runs_long_is_not_shed_for_what_others_have_waiting() -> None:
    driver = Driver(workers=1, max_seqs=0)
    driver.up(0, 0)
    for number in range(6):
        driver.submit(number, SECOND, streamed=False)
    driver.plane.observe(LoadReport("w0", 6, 50, 0.9), 199 * SECOND)
    driver.tick(200 * SECOND)
    assert not driver.shed


def test_what_a_worker_said_long_ago_sheds_nobody() -> None:
    driver = inside()
    driver.plane.observe(LoadReport("w0", 4, 4, 0.9), 30 * SECOND)
    driver.tick(100 * SECOND)
    assert not driver.shed
    driver.plane.observe(LoadReport("w0", 4, 4, 0.9), 101 * SECOND)
    driver.tick(101 * SECOND)
    assert len(driver.shed) == 4
