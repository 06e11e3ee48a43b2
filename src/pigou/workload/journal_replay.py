"""Journal replay: the calls of a journal, made again to a fresh ControlPlane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pigou.config import ControlConfig
from pigou.control.journal import JournalEntry, JournalHead, PlannerReplay, replay_call
from pigou.control.messages import Ended, FirstToken, Submit, Tokens
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason
from pigou.workload.counterfactual import PolicyComparison, Rival, rival
from pigou.workload.journal_file import JournalLine


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay went another way, at the entry of this line."""

    line: int
    entry: JournalEntry
    recorded: Any  # decisions, or the error, of the journal
    now: Any


@dataclass(slots=True)
class JournalReplay:
    """Result of a journal's replay."""

    runs: int = 0  # gateway starts in the journal
    versions: set[str] = field(default_factory=set)
    entries: int = 0
    requests: int = 0
    decisions: int = 0
    windows: int = 0
    seconds: float = 0.0  # recorded seconds over all runs
    took: float = 0.0  # seconds of the replay
    # lines that were cut off, when the gateway was killed.
    cut: list[int] = field(default_factory=list)
    difference: Difference | None = None  # the first difference; None if all calls agree
    comparison: PolicyComparison | None = None  # comparison with another policy; None without one


def replay_journal(
    lines: Iterable[JournalLine],
    other: Rival | None = None,
    watch: Callable[[JournalReplay], None] | None = None,
    make_plane: Callable[[ControlConfig], ControlPlane] = ControlPlane,
) -> JournalReplay:
    """Replay a journal's calls up to the first difference; `other` is asked each time.

    ConfigError.
    """
    replay = JournalReplay(comparison=None if other is None else PolicyComparison())
    began = time.perf_counter()
    plane: ControlPlane | None = None
    planner = PlannerReplay()
    before = 0
    answered: set[str] = set()
    for line in lines:
        entry = line.entry
        if entry is None:
            replay.cut.append(line.number)
        elif isinstance(entry, JournalHead):
            plane, planner, before = make_plane(entry.config), PlannerReplay(), 0
            replay.runs += 1
            replay.versions.add(entry.pigou)
            if other is not None and replay.comparison is not None:
                replay.comparison.settle_all()
                plane.router = rival(plane, entry.config, other, replay.comparison)
        else:
            assert plane is not None
            if planner.takes(entry):
                out, error = planner.replay(entry)
                replay.windows += len(entry.out)
            else:
                out, error = replay_call(plane, entry)
            replay.entries += 1
            replay.requests += isinstance(entry.message, Submit)
            replay.decisions += len(entry.out)
            replay.seconds += (entry.now - before) / SECOND if before else 0.0
            before = entry.now
            if (out, error) != (entry.out, entry.error):
                recorded, now = entry.error or entry.out, error or out
                replay.difference = Difference(line.number, entry, recorded, now)
                break
            if replay.comparison is not None:
                _settle(replay.comparison, entry, answered)
            if watch is not None and replay.entries % 1000 == 0:
                watch(replay)
    if replay.comparison is not None:
        replay.comparison.settle_all()
    replay.took = time.perf_counter() - began
    return replay


def _settle(comparison: PolicyComparison, entry: JournalEntry, answered: set[str]) -> None:
    """Count a request's choices when it ends, unless that was an error before a token."""
    match entry.message:
        case FirstToken(id):
            answered.add(id)
        case Tokens(counts):
            answered.update(id for id, _ in counts)
        case Ended(id, FinishReason.ERROR) if id not in answered:
            comparison.drop(id)
        case Ended(id):
            answered.discard(id)
            comparison.settle(id)
        case _:
            pass
