"""A planner's entries of a journal: they come back as they were, and decide the same again."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import msgspec
import pytest

from pigou.config import ConfigError
from pigou.control.journal import JournalEntry, PlannerReplay, decode, encode, planner_entry
from pigou.control.planner.messages import PlannerDecision
from pigou.control.planner.planner import PlannerStarted, PoolProfile, decide
from pigou.objectives import Budget, Slo, WorkloadClass
from pigou.request import SECOND, Role
from pigou.windows.planner_window import (
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerState,
    WorkerWindow,
)

STARTED = PlannerStarted(
    planner="price",
    params={"hold_s": 15},
    slo=Slo(ttft_s=0.5),
    classes=(WorkloadClass(name="gold", slo=Slo(itl_s=0.1)),),
    budget=Budget(max_gpus=6),
    profiles={
        "both": PoolProfile(
            prefill=((128.0, 0.03), (512.0, 0.13)), decode=((1.0, 256.0, 0.01), (16.0, 256.0, 0.03))
        )
    },
)


def window(second: int, arrivals: int | None, workers: int) -> PlannerWindow:
    ready = tuple(
        WorkerWindow(id=f"both-{n}", running=2, mean_running=2.0, held_tokens=400.0,
                     mean_held_tokens=400.0, computed_prompts=3, computed_tokens=600.0,
                     prefill_s=0.2, itl_s=0.02)
        for n in range(workers)
    )  # fmt: skip
    starting = WorkerWindow(id="both-9", state=WorkerState.STARTING)
    load = LoadWindow(model="m", arrivals=arrivals, isl=200.0, osl=60.0, hit_rate=0.0)
    pool = PoolWindow(name="both", role=Role.BOTH, model="m", workers=(*ready, starting))
    return PlannerWindow(now_ns=second * SECOND, seconds=5.0, loads=(load,), pools=(pool,))


def lines(windows: list[PlannerWindow]) -> list[bytes]:
    planner = STARTED.make()
    written = [encode(planner_entry(STARTED, 1))]
    for seen in windows:
        written.append(encode(planner_entry(seen, seen.now_ns, decide(planner, seen))))
    return written


def entries(written: list[bytes]) -> list[JournalEntry]:
    decoded = [decode(line) for line in written]
    assert all(isinstance(entry, JournalEntry) for entry in decoded)
    return decoded  # type: ignore[return-value]


WINDOWS = [window(5 * n, 20 if n < 6 else 90, 2) for n in range(1, 24)]


def test_infinite_objectives_and_times_come_back_as_they_were() -> None:
    (entry,) = entries([encode(planner_entry(STARTED, 1))])
    assert entry.message == STARTED
    assert entry.message.times.flip_s == math.inf


def test_a_hole_comes_back_as_a_hole() -> None:
    (entry,) = entries([encode(planner_entry(window(5, None, 1), 1))])
    assert entry.message == window(5, None, 1)


def test_a_replay_decides_the_same_of_every_window() -> None:
    replay = PlannerReplay()
    moves = 0
    for entry in entries(lines(WINDOWS)):
        assert replay.takes(entry)
        assert replay.replay(entry) == (entry.out, entry.error)
        moves += sum(len(decision["actions"]) for decision in entry.out)
    assert moves  # else there is nothing to compare


def test_another_parameter_decides_otherwise() -> None:
    started, *rest = entries(lines(WINDOWS))
    other = msgspec.structs.replace(STARTED, budget=Budget(max_gpus=2))
    replay = PlannerReplay()
    replay.replay(msgspec.structs.replace(started, message=other))
    assert any(replay.replay(entry) != (entry.out, entry.error) for entry in rest)


class RaisingPlanner:
    name: ClassVar[str] = "raising"

    def observe(self, window: PlannerWindow) -> None:
        raise ZeroDivisionError

    def tick(self, now_ns: int) -> PlannerDecision:
        return PlannerDecision(now_ns=now_ns, planner=self.name)


def test_what_a_planner_raised_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlannerStarted, "make", lambda _: RaisingPlanner())
    replay = PlannerReplay()
    written = [planner_entry(STARTED, 1), planner_entry(WINDOWS[0], 5, error="ZeroDivisionError")]
    for entry in entries([encode(line) for line in written]):
        assert replay.replay(entry) == (entry.out, entry.error)


def test_a_window_without_a_start_is_refused() -> None:
    entry: Any = planner_entry(WINDOWS[0], 5)
    (read,) = entries([encode(entry)])
    with pytest.raises(ConfigError, match="before the planner's start"):
        PlannerReplay().replay(read)
