"""Diagnosis windows from a gateway's journal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pigou.config import ConfigError
from pigou.control.journal import JournalEntry, JournalHead
from pigou.control.messages import (
    Ended,
    FirstToken,
    LoadReport,
    Submit,
    Tokens,
    WorkerDown,
    WorkerUp,
)
from pigou.request import SECOND, FinishReason, Request, Worker
from pigou.windows.builder import ObservationBuilder
from pigou.windows.observations import FleetObservation, WorkerObservation
from pigou.windows.prompts import RepeatedPrompts, prompt_key

#: Seconds of a window, and most windows of a journal (a month).
_WINDOW_S, _MAX_WINDOWS = 10, 260_000


@dataclass(slots=True)
class _OpenRequest:
    request: Request
    since: int
    routed: int = 0
    first: int = 0
    decode: str = ""


@dataclass(slots=True)
class _WorkerLoad:
    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class _JournalWindows:
    """Builds windows from the entries of consecutive runs."""

    def __init__(self) -> None:
        self.windows: list[FleetObservation] = []
        self._made = ObservationBuilder()
        self._begin = self._zero = self._now = self._shift = 0
        self._open: dict[str, _OpenRequest] = {}
        self._workers: dict[str, Worker] = {}
        self._repeated = RepeatedPrompts()
        self._loads: defaultdict[str, _WorkerLoad] = defaultdict(_WorkerLoad)

    def begin_run(self, head: JournalHead) -> None:
        self._zero, self._begin = self._zero or head.unix, 0
        self._shift = head.unix - head.now
        self._open.clear()
        self._made.weights = dict(head.config.tenant_weights)

    def take(self, entry: JournalEntry) -> None:
        now = entry.now + self._shift
        if not self._begin:
            self._begin = now
            self._zero = min(self._zero, now)
        while now - self._begin >= _WINDOW_S * SECOND:
            self._end_window(self._begin + _WINDOW_S * SECOND)
        self._now = now
        match entry.message:
            case Submit(request):
                self._submit(request, now)
            case FirstToken(id) if (opened := self._open.get(id)) and not opened.first:
                opened.first = now
                self._made.ttft_s.append((now - opened.since) / SECOND)
            case Tokens(counts):
                self._count_tokens(counts)
            case Ended(id, reason):
                self._end(id, reason, now)
            case LoadReport(worker, running, waiting, usage):
                load = self._loads[worker]
                load.running.append(running)
                load.waiting.append(waiting)
                load.usage.append(usage)
            case WorkerUp(worker):
                self._workers[worker.id] = worker
            case WorkerDown(name):
                self._loads[name].counts["restarts"] += name in self._workers
            case _:
                pass
        for decision in entry.out:
            self._decide(decision, now)

    def _count_tokens(self, counts: Iterable[tuple[str, int]]) -> None:
        for id, count in counts:
            if (opened := self._open.get(id)) is not None:
                self._made.tokens[opened.request.tenant] += count
                self._loads[opened.decode].counts["output"] += count

    def _submit(self, request: Request, now: int) -> None:
        if request.id in self._open:  # a migration
            return
        self._open[request.id] = _OpenRequest(request, now)
        self._made.lengths.add(request.prompt)
        again = self._repeated.arrive(request.id, prompt_key(request), now / SECOND)
        self._made.counts.update(arrived=1, repeated=int(again))

    def _decide(self, decision: dict[str, Any], now: int) -> None:
        opened = self._open.get(decision.get("request", ""))
        if opened is None:
            return
        request = opened.request
        if decision["kind"] == "shed":
            self._made.counts["refused"] += 1
            self._repeated.end(request.id, now / SECOND, served=False)
            del self._open[request.id]
        elif decision["kind"] == "route" and not opened.routed:
            opened.routed = now
            choice = decision.get("choice") or {}
            opened.decode = choice.get("decode", "")
            worker = self._loads[choice.get("prefill") or opened.decode]
            worker.counts.update(queried=request.prompt, hit=choice.get("cached", 0))
            self._made.tokens[request.tenant] += request.prompt
            self._made.wait_s.append((request.prompt, (now - opened.since) / SECOND))

    def _end(self, id: str, reason: FinishReason, now: int) -> None:
        served = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._repeated.end(id, now / SECOND, served=served)
        if self._open.pop(id, None) is not None:
            failed = int(reason is FinishReason.ERROR)
            self._made.counts.update(completed=int(served), failed=failed)

    def _end_window(self, until: int) -> None:
        if len(self.windows) >= _MAX_WINDOWS:
            raise ConfigError(f"the journal spans over {_MAX_WINDOWS} windows; cut it")
        late = [opened for opened in self._open.values() if not opened.routed]
        self.windows.append(self._made.window(
            (self._begin - self._zero) / SECOND, (until - self._begin) / SECOND,
            [(opened.request.prompt, (until - opened.since) / SECOND) for opened in late],
            (opened.request.prompt for opened in self._open.values()
             if opened.routed and not 0 < opened.first <= self._begin),
            Counter(opened.request.tenant for opened in late),
            queued=float(len(late)),
            workers=tuple(self._worker(worker) for worker in self._workers.values()),
        ))  # fmt: skip
        self._begin = until
        self._loads.clear()

    def _worker(self, worker: Worker) -> WorkerObservation:
        load = self._loads[worker.id]
        return WorkerObservation(
            worker=worker.id, role=worker.role.value, restarts=load.counts["restarts"],
            running=_mean(load.running) or 0.0, waiting=_mean(load.waiting) or 0.0,
            busy=_mean([float(running > 0) for running in load.running]),
            kv_tokens=worker.blocks * worker.block_size, kv_usage=_mean(load.usage),
            queried_tokens=load.counts["queried"], hit_tokens=load.counts["hit"],
            prefill_tokens=load.counts["queried"] - load.counts["hit"],
            output_tokens=load.counts["output"],
        )  # fmt: skip

    def close(self) -> None:
        if self._begin and self._now - self._begin >= _WINDOW_S * SECOND // 2:
            self._end_window(self._now)


def journal_windows(
    entries: Iterable[JournalHead | JournalEntry], journal: str
) -> tuple[FleetObservation, ...]:
    """Return a journal's ten-second windows; raises ConfigError for less than one."""
    made = _JournalWindows()
    for entry in entries:
        if isinstance(entry, JournalHead):
            made.close()
            made.begin_run(entry)
        else:
            made.take(entry)
    made.close()
    if not made.windows:
        raise ConfigError(
            f"the journal {journal} spans less than {_WINDOW_S // 2} s; nothing can be told"
        )
    return tuple(made.windows)


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
