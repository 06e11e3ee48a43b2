"""The client: pools, turns, barriers, phases, timeouts and retries."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.request import SECOND
from pigou.sim.client import ClientConfig, SimulatedClient
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.workload import (
    ClosedLoop,
    OpenLoop,
    RequestLengths,
    RequestSession,
    RequestSpec,
    renewal,
)


class Server:
    """Takes one second for each call, or fails the first attempts."""

    def __init__(self, clock: Clock, seconds: float = 1.0, fails: int = 0) -> None:
        self.clock, self.seconds, self.fails = clock, seconds, fails
        self.inflight = self.most = 0
        self.order: list[int] = []

    def send(self, call: RequestRun, now: int) -> None:
        call.sent_ns = now
        call.attempts += 1
        self.order.append(call.number)
        self.inflight += 1
        self.most = max(self.most, self.inflight)
        attempt = call.attempts

        def end(at: int) -> None:
            if call.outcome is RunOutcome.PENDING and call.attempts == attempt:
                self._end(call, RunOutcome.FAILED if attempt <= self.fails else RunOutcome.DONE, at)

        self.clock.at(now + round(self.seconds * SECOND), Phase.STEP, call.number, end)

    def time_out(self, call: RequestRun, now: int) -> None:
        self._end(call, RunOutcome.TIMED_OUT, now)

    def _end(self, call: RequestRun, outcome: RunOutcome, now: int) -> None:
        self.inflight -= 1
        call.outcome, call.ended_ns = outcome, now
        call.on_end(call, now)


def drive(
    workload: OpenLoop | ClosedLoop, config: ClientConfig, seconds: float = 1.0, fails: int = 0
) -> tuple[SimulatedClient, Server]:
    clock = Clock()
    server = Server(clock, seconds, fails)
    client = SimulatedClient(workload, config, server, clock, seed=1)
    while not client.done:
        assert clock.step()
    return client, server


def loop(users: int, seconds: float, **rest: object) -> ClosedLoop:
    return ClosedLoop(lengths=RequestLengths(), phases=((users, seconds),), **rest)  # type: ignore[arg-type]


def test_an_open_loop_sends_at_its_times_whatever_comes_back() -> None:
    workload = renewal(RequestLengths(), 10.0, 1.0, 50, 0.0, 3)
    client, server = drive(workload, ClientConfig(), seconds=100.0)
    assert [call.intended_ns - EPOCH for call in client.runs] == [
        session.start_ns for session in workload.sessions
    ]
    assert server.most == 50


def test_gaps_have_their_rate_and_variation() -> None:
    starts = [
        each.start_ns for each in renewal(RequestLengths(), 10.0, 2.0, 20_000, 0.0, 3).sessions
    ]
    gaps = np.diff(starts) / SECOND
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.05)
    within = renewal(RequestLengths(), 10.0, 0.0, 0, 2.05, 3).sessions
    assert len(within) == 20


def test_a_closed_loop_keeps_its_users_busy() -> None:
    client, server = drive(loop(4, 10.0), ClientConfig())
    assert server.most == 4
    assert len(client.runs) == 40


def test_users_start_evenly_in_the_ramp() -> None:
    client, _ = drive(loop(4, 1.0, ramp=2.0), ClientConfig())
    first = [call.intended_ns - EPOCH for call in client.runs[:2]]
    assert first == [0, SECOND // 2]


def test_phases_change_the_number_of_users() -> None:
    lengths = RequestLengths()
    workload = ClosedLoop(lengths=lengths, phases=((2, 4.0), (5, 4.0), (1, 4.0)))
    client, server = drive(workload, ClientConfig())
    at = [(call.intended_ns - EPOCH) // SECOND for call in client.runs]
    assert [at.count(second) for second in (1, 5, 10)] == [2, 5, 1]
    assert server.most == 5


def test_a_pool_bounds_requests_and_the_wait_is_the_clients() -> None:
    client, server = drive(loop(6, 9.5), ClientConfig(pool=2))
    assert server.most == 2
    waits = [call.sent_ns - call.intended_ns for call in client.runs]
    assert max(waits) == 2 * SECOND  # six users take turns by two


def test_who_barges_starves_the_others() -> None:
    def longest(barging: float) -> int:
        client, _ = drive(loop(12, 200.0), ClientConfig(pool=10, barging=barging))
        return max(call.sent_ns - call.intended_ns for call in client.runs)

    assert longest(0.9) > 3 * longest(0.0)


def test_the_last_that_came_is_the_first_to_go_by_lifo() -> None:
    jobs = tuple(RequestSession(n, (RequestSpec(1, 1),)) for n in range(4))
    _, server = drive(OpenLoop(jobs), ClientConfig(pool=1, take="lifo"))
    assert server.order == [0, 3, 2, 1]
    _, server = drive(OpenLoop(jobs), ClientConfig(pool=1))
    assert server.order == [0, 1, 2, 3]


def test_at_a_barrier_all_wait_for_all() -> None:
    client, _ = drive(loop(3, 20.0, barrier=2.5), ClientConfig(pool=2))
    starts = sorted({call.intended_ns - EPOCH for call in client.runs})
    ends = max(
        call.ended_ns - EPOCH for call in client.runs if call.intended_ns - EPOCH < 3 * SECOND
    )
    assert ends in starts  # the next chunk begins when the last of the one before has ended
    assert not [at for at in starts if 2.5 * SECOND <= at < ends]


def test_turns_of_a_session_follow_one_another_after_thinking() -> None:
    jobs = tuple(RequestSpec(10, 10, think_ns=think * SECOND) for think in (5, 2, 3))
    client, _ = drive(OpenLoop((RequestSession(SECOND, jobs),)), ClientConfig())
    assert [(call.intended_ns - EPOCH) // SECOND for call in client.runs] == [1, 4, 8]


def test_sessions_can_take_turns_instead() -> None:
    sessions = tuple(RequestSession(0, (RequestSpec(1, 1), RequestSpec(1, 1))) for _ in range(4))
    client, server = drive(OpenLoop(sessions, concurrency=2), ClientConfig())
    assert server.most == 2
    assert len(client.runs) == 8


def test_a_failed_request_is_sent_again_after_a_growing_time() -> None:
    one = OpenLoop((RequestSession(0, (RequestSpec(1, 1),)),))
    client, server = drive(one, ClientConfig(retries=3, backoff=4.0), fails=2)
    (call,) = client.runs
    assert call.outcome is RunOutcome.DONE
    assert call.attempts == 3
    # Three attempts of a second each, and waits of 2 to 4 and of 4 to 8.
    assert 9 <= (call.ended_ns - call.intended_ns) / SECOND <= 15
    assert server.order == [0, 0, 0]


def test_a_timeout_gives_up_and_frees_the_connection() -> None:
    workload = OpenLoop(tuple(RequestSession(n, (RequestSpec(1, 1),)) for n in range(2)))
    client, _ = drive(workload, ClientConfig(pool=1, timeout=0.5), seconds=10.0)
    assert [call.outcome for call in client.runs] == [RunOutcome.TIMED_OUT] * 2
    assert [call.ended_ns - EPOCH for call in client.runs] == [SECOND // 2, SECOND]


def test_waits_between_attempts_double_up_to_their_longest() -> None:
    config = ClientConfig(retries=10_000, backoff=0.1, max_backoff=0.4)
    assert [config.wait_s(failed) for failed in (1, 2, 3, 4, 10_000)] == [0.1, 0.2, 0.4, 0.4, 0.4]
