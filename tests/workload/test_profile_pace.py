"""Laws of a profile's time: it is told, it has a budget, and what was measured is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pigou.workload.endpoint import EndpointError
from pigou.workload.profiling import measure as module
from pigou.workload.profiling import profile as profiles
from pigou.workload.profiling.measure import Pace


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def test_what_is_left_follows_from_what_was_measured(clock: Clock) -> None:
    pace = Pace(0.0, 100.0, 5)
    assert pace.left_s is None
    clock.now = 10.0
    pace.measured(50.0)
    assert pace.left_s == pytest.approx(90.0)
    clock.now = 20.0
    pace.round_over()
    assert pace.left_s == pytest.approx(80.0)


def test_no_more_is_told_to_be_left_than_the_budget_has(clock: Clock) -> None:
    pace = Pace(30.0, 100.0, 5)
    clock.now = 10.0
    pace.measured(50.0)
    assert pace.left_s == pytest.approx(20.0)


def test_a_round_that_does_not_fit_is_not_begun_but_the_first_one_is(clock: Clock) -> None:
    pace = Pace(25.0, 100.0, 5)
    clock.now = 12.0
    assert pace.allows_round
    pace.round_over()
    assert pace.allows_round
    clock.now = 24.0
    pace.round_over()
    assert not pace.allows_round


def test_the_first_round_leaves_out_streams_that_take_too_long(clock: Clock) -> None:
    pace = Pace(20.0, 100.0, 5)
    clock.now = 9.0
    assert pace.allows_decodes
    clock.now = 11.0
    assert not pace.allows_decodes
    assert Pace(0.0, 100.0, 5).allows_decodes


class Measurements:
    """Stands for those of a worker: `rounds` are whole, then it waits, or fails."""

    def __init__(self, rounds: int, error: Exception | None = None) -> None:
        self.rounds, self.error, self.notes = rounds, error, list[str]()
        self.waits = asyncio.Event()

    async def run(self) -> Any:
        if self.error is not None:
            raise self.error
        self.waits.set()
        await asyncio.Event().wait()

    def so_far(self) -> Any:
        return "seen" if self.rounds else None


async def test_what_was_measured_before_it_was_broken_off_is_kept() -> None:
    for rounds in (0, 2):
        measuring, stop = Measurements(rounds), asyncio.Event()
        task = asyncio.create_task(profiles._measured(measuring, stop))  # type: ignore[arg-type]
        await measuring.waits.wait()
        stop.set()
        if rounds:
            assert await task == "seen"  # type: ignore[comparison-overlap]
        else:
            with pytest.raises(EndpointError, match="before the first round"):
                await task


async def test_what_was_measured_before_a_request_failed_is_kept_and_the_reason_told() -> None:
    for rounds in (0, 2):
        measuring = Measurements(rounds, EndpointError("the worker is gone"))
        if rounds:
            found: Any = await profiles._measured(measuring, None)  # type: ignore[arg-type]
            assert found == "seen"
            assert measuring.notes == ["the worker is gone"]
        else:
            with pytest.raises(EndpointError, match="the worker is gone"):
                await profiles._measured(measuring, None)  # type: ignore[arg-type]
