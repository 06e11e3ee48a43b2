"""Laws of `Returns`: pauses are learned, and sessions are due when they mostly come back."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.kv.session_returns import SessionReturns
from pigou.request import NEVER, SECOND, BlockHashes


def chain(session: int, blocks: int) -> BlockHashes:
    pairs = [(session + 1, i + 1) for i in range(blocks)]
    return np.array(pairs, dtype=np.uint64)


def play(returns: SessionReturns, pause: float, times: int, now: int = 0) -> int:
    """A session that pauses so many times, so many seconds each."""
    for i in range(times):
        returns.on_turn_end(chain(0, i + 1), NEVER, now)
        now += round(pause * SECOND)
        returns.on_request(chain(0, i + 2), now)
    return now


def test_nobody_is_due_before_enough_pauses_were_seen() -> None:
    returns = SessionReturns()
    now = play(returns, 1.0, 7)
    returns.on_turn_end(chain(1, 3), NEVER, now)
    assert returns.next() is None
    assert returns.due(NEVER - 1) == []


def test_a_session_is_due_shortly_before_most_pauses_are_over() -> None:
    returns = SessionReturns()
    now = play(returns, 1.0, 20)
    returns.on_turn_end(chain(1, 3), NEVER, now)
    due = returns.next()
    assert due is not None
    assert 0.5 <= (due - now) / SECOND <= 1.0
    assert returns.due(due - 1) == []
    (pause,) = returns.due(due)
    assert (pause.hashes == chain(1, 3)).all()
    assert returns.due(due) == []  # once


def test_who_has_come_back_is_not_due() -> None:
    returns = SessionReturns()
    now = play(returns, 1.0, 20)
    returns.on_turn_end(chain(1, 3), NEVER, now)
    returns.on_request(chain(1, 5), now + SECOND // 10)
    assert returns.due(now + SECOND) == []
    assert returns.away == 0


def test_another_session_with_the_same_beginning_is_not_it() -> None:
    returns = SessionReturns()
    returns.on_turn_end(chain(1, 3), NEVER, 0)
    returns.on_request(chain(1, 2), SECOND)
    assert returns.away == 1


def test_what_has_expired_is_not_brought_back() -> None:
    returns = SessionReturns()
    now = play(returns, 1.0, 20)
    returns.on_turn_end(chain(1, 3), now + SECOND // 2, now)
    assert returns.due(now + SECOND) == []


def test_who_is_late_is_given_up() -> None:
    returns = SessionReturns()
    now = play(returns, 1.0, 20)
    returns.on_turn_end(chain(1, 3), NEVER, now)
    assert returns.due(now + 100 * SECOND) == []


def test_where_few_come_back_nobody_is_due() -> None:
    returns = SessionReturns()
    now = play(returns, 1.0, 20)
    for session in range(5000):
        returns.on_turn_end(chain(2 + session, 1), NEVER, now)
    assert returns.away <= 4096
    returns.on_turn_end(chain(9999, 1), NEVER, now)
    assert all(pause.hashes[0, 0] != 10_000 for pause in returns.due(now + SECOND))


@pytest.mark.parametrize("pause", [0.001, 0.3, 60.0, 1e7])
def test_pauses_of_any_length_are_counted(pause: float) -> None:
    returns = SessionReturns()
    now = play(returns, pause, 12)
    returns.on_turn_end(chain(1, 1), NEVER, now)
    assert returns.next() is not None
