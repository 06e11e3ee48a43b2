"""How a planner changed a fleet: moves that it took back, and the time until it rested."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from pigou.request import SECOND
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.client import SimulatedClient
from pigou.sim.membership import MembershipChange
from pigou.sim.request_run import RequestRun
from pigou.sim.virtual_clock import EPOCH
from pigou.windows.planner_window import WorkerState

#: A move may undo the one before where the arrival rate has changed by more than this share.
DEADBAND = 0.1
#: Nanoseconds over which arrivals are counted where their rate is not known.
_COUNTED_NS = 60 * SECOND


class ScalingMove(NamedTuple):
    """A worker that joins (+1) or leaves (-1) a pool by a decision; a flip is both."""

    at_ns: int
    worker: str
    pool: str
    sign: int


class OfferedRate:
    """The arrival rate of a workload: those of its schedules, or as counted in the last minute."""

    def __init__(self, schedules: Sequence[RateSchedule], client: SimulatedClient) -> None:
        """Take the schedule of each part; none counts the client's requests instead."""
        self._schedules, self._client = tuple(schedules), client

    @property
    def changes_ns(self) -> tuple[int, ...]:
        """Times at which a rate changes, the beginning included."""
        times = {
            EPOCH + round(second * SECOND)
            for schedule in self._schedules
            for second in schedule.changes
        }
        return tuple(sorted(times | {EPOCH}))

    def at(self, now: int) -> tuple[float, ...]:
        """Return the requests a second of each part at a time that has passed."""
        if self._schedules:
            return tuple(schedule.at((now - EPOCH) / SECOND) for schedule in self._schedules)
        begin = max(EPOCH, now - _COUNTED_NS)
        runs = self._client.runs  # in the order of their intentions
        end, start = (bisect_right(runs, at, key=_intended_ns) for at in (now, begin))
        count = end - start
        return (count * SECOND / max(now - begin, 1),)


def _intended_ns(run: RequestRun) -> int:
    return run.intended_ns


def reversals(moves: Sequence[ScalingMove], arrivals: OfferedRate) -> int:
    """Return how often a move undid the last one of its pool though the load had not changed.

    A worker less after a worker more counts unless the arrival rate has fallen by more than
    `DEADBAND` in between; a worker more after one less, unless it has risen by so much. Where a
    workload has several parts, any change of one by so much is a change of the load.
    """
    count = 0
    last: dict[str, ScalingMove] = {}
    for move in moves:
        before = last.get(move.pool)
        last[move.pool] = move
        if before is None or before.sign == move.sign:
            continue
        count += not _follows(arrivals.at(before.at_ns), arrivals.at(move.at_ns), move.sign)
    return count


def _follows(old: Sequence[float], new: Sequence[float], sign: int) -> bool:
    """Whether a change of rates explains a move in this direction."""
    risen = any(after > before * (1 + DEADBAND) for before, after in zip(old, new, strict=True))
    fallen = any(after < before * (1 - DEADBAND) for before, after in zip(old, new, strict=True))
    if len(new) > 1:
        return risen or fallen
    return risen if sign > 0 else fallen


def settle_seconds(
    moves: Sequence[ScalingMove], changes: Sequence[MembershipChange], load_ns: Sequence[int],
    end_ns: int,
) -> float:  # fmt: skip
    """Return the longest time from a change of the load until the fleet rests.

    A fleet rests after the last move that was decided before the next change of the load, once
    the worker serves, or is gone.

    Args:
        load_ns: times at which the load changed, ascending.
    """
    final = (WorkerState.READY, None)
    settled_ns = {
        move: next(
            (c.at_ns for c in changes
             if c.worker == move.worker and c.at_ns >= move.at_ns and c.state in final),
            end_ns,
        )
        for move in moves
    }  # fmt: skip
    max_ns = 0
    for move, at_ns in settled_ns.items():
        before = [time for time in load_ns if time <= move.at_ns]
        max_ns = max(max_ns, at_ns - before[-1])
    return max_ns / SECOND
