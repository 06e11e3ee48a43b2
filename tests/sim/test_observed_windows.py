"""Laws of observed windows: they change nothing, and add up to the run."""

from __future__ import annotations

import pytest
from setups import LAW, FleetConfig, Outage, WorkerGroup, differences, open_loop, simulation

from pigou.sim.observed_windows import WindowObserver, knee_of
from pigou.sim.timing_models import build_timing

FLEET = FleetConfig(workers=(WorkerGroup(count=2, fails=(Outage(start=1.5, end=2.2),)),))


def test_a_run_is_the_same_with_and_without_an_observer() -> None:
    plain, watched = (simulation(open_loop(), FLEET) for _ in range(2))
    WindowObserver(watched, window_s=1)
    assert not differences(plain.run(), watched.run())


def test_windows_add_up_to_the_run() -> None:
    sim = simulation(open_loop(count=120), FLEET)
    observer = WindowObserver(sim, window_s=1)
    result = sim.run()
    windows = list(observer.windows)
    until = sum(run.ended_ns <= sim.clock.now // 10**9 * 10**9 for run in result.done)
    assert sum(window.completed for window in windows) == pytest.approx(until, abs=2)
    assert sum(window.arrived for window in windows) == pytest.approx(120, abs=6)
    assert sum(worker.restarts for window in windows for worker in window.workers) == 2
    tokens = sum(window.total("output_tokens") or 0 for window in windows)
    last = 10**9 + len(windows) * 10**9
    done = sum(run.output_tokens for run in result.done if run.ended_ns <= last)
    assert done <= tokens <= sum(run.output_tokens for run in result.done)


def test_the_knee_is_where_a_step_takes_twice_as_long_as_alone() -> None:
    timing = build_timing(LAW, "", "", 1).timing  # 8 ms + 0.3 ms a sequence
    assert knee_of(timing, 64) == 29.0
