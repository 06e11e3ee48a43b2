"""Laws of the deaths that count against a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pigou.lifecycle.suspicion import MAX_DEATHS, Suspicion, WorkerEnd
from pigou.request import SECOND

A, B, NOBODY = frozenset({"a"}), frozenset({"b"}), frozenset[str]()


def test_workers_that_are_killed_within_two_seconds_are_one_death() -> None:
    suspicion = Suspicion()
    assert suspicion.count(A, WorkerEnd.KILLED, progressed=False, now_ns=0)
    near = 2 * SECOND - 1
    assert not suspicion.count(B, WorkerEnd.KILLED, progressed=False, now_ns=near)
    assert not suspicion.suspect
    assert suspicion.count(B, WorkerEnd.KILLED, progressed=False, now_ns=near + 2 * SECOND)
    assert suspicion.deaths == ("a", "b")


def test_a_death_from_outside_says_nothing_against_a_request_that_got_tokens() -> None:
    suspicion = Suspicion()
    for end in (WorkerEnd.KILLED, WorkerEnd.LOST, WorkerEnd.LIVES):
        assert not suspicion.count(A, end, progressed=True, now_ns=0)
    assert suspicion.count(A, WorkerEnd.CRASHED, progressed=True, now_ns=0)


def test_a_death_of_nobody_known_counts() -> None:
    suspicion = Suspicion()
    assert suspicion.count(NOBODY, WorkerEnd.LOST, progressed=False, now_ns=0)
    assert suspicion.deaths == ("a worker",)


@given(st.lists(st.tuples(st.sampled_from(WorkerEnd), st.booleans(), st.integers(0, 10 * SECOND))))
def test_a_request_is_suspect_from_the_second_death_on(
    deaths: list[tuple[WorkerEnd, bool, int]],
) -> None:
    suspicion, counted = Suspicion(), 0
    for end, progressed, now_ns in deaths:
        counted += suspicion.count(A, end, progressed=progressed, now_ns=now_ns)
        assert suspicion.suspect == (counted >= 2 == MAX_DEATHS)
        assert len(suspicion.deaths) == counted
