"""Windows of a gateway's journal, for a diagnosis: what its control plane took in and decided."""

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
from pigou.windows.observations import FleetObservation, TenantObservation, WorkerObservation
from pigou.windows.prompts import PromptLengths, RepeatedPrompts, percentile, prompt_key

#: Seconds of a window, and windows that a journal may span (a month).
_WINDOW_S, _MAX_WINDOWS = 10, 260_000


@dataclass(slots=True)
class _OpenRequest:
    request: Request
    since: int
    routed: int = 0
    first: int = 0
    decode: str = ""


@dataclass(slots=True)
class _WorkerWindow:
    """Load reports of a worker in one window, and what was routed there."""

    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class _JournalWindows:
    """Takes the entries of one run after another, and makes windows of them."""

    def __init__(self) -> None:
        self.windows: list[FleetObservation] = []
        self._begin = self._zero = self._now = 0
        self._open: dict[str, _OpenRequest] = {}
        self._workers: dict[str, Worker] = {}
        self._lengths, self._repeated = PromptLengths(), RepeatedPrompts()
        self._weights: dict[str, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._ttft: list[float] = []
        self._began: list[tuple[int, float]] = []
        self._loads: defaultdict[str, _WorkerWindow] = defaultdict(_WorkerWindow)

    def begin_run(self, head: JournalHead) -> None:
        """Begin with a gateway's start: nothing is open, and its clock is another one."""
        shift = head.unix - head.now
        self._zero, self._begin = self._zero or head.unix, 0
        self._shift = shift
        self._open.clear()
        self._weights = dict(head.config.tenant_weights)

    def take(self, entry: JournalEntry) -> None:
        """Take in a call."""
        now = entry.now + self._shift
        if not self._begin:
            self._begin = now
            self._zero = min(self._zero, now)
        while now - self._begin >= _WINDOW_S * SECOND:
            self.end_window(self._begin + _WINDOW_S * SECOND)
        self._now = now
        match entry.message:
            case Submit(request):
                self._submit(request, now)
            case FirstToken(id):
                self._first_token(id, now)
            case Tokens(counts):
                for id, count in counts:
                    self._count_tokens(id, count)
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

    def _submit(self, request: Request, now: int) -> None:
        if request.id in self._open:  # it goes on at another worker
            return
        self._open[request.id] = _OpenRequest(request, now)
        self._lengths.add(request.prompt)
        self._counts["arrived"] += 1
        self._counts["repeated"] += self._repeated.arrive(
            request.id, prompt_key(request), now / SECOND
        )

    def _first_token(self, id: str, now: int) -> None:
        opened = self._open.get(id)
        if opened is not None and not opened.first:
            opened.first = now
            self._ttft.append((now - opened.since) / SECOND)

    def _count_tokens(self, id: str, count: int) -> None:
        opened = self._open.get(id)
        if opened is not None:
            self._tokens[opened.request.tenant] += count
            self._loads[opened.decode].counts["output"] += count

    def _decide(self, decision: dict[str, Any], now: int) -> None:
        opened = self._open.get(decision.get("request", ""))
        if opened is None:
            return
        if decision["kind"] == "shed":
            self._counts["refused"] += 1
            self._repeated.end(opened.request.id, now / SECOND, served=False)
            del self._open[opened.request.id]
        elif decision["kind"] == "route" and not opened.routed:
            opened.routed = now
            choice = decision.get("choice") or {}
            opened.decode = choice.get("decode", "")
            worker = self._loads[choice.get("prefill") or opened.decode]
            worker.counts["queried"] += opened.request.prompt
            worker.counts["hit"] += choice.get("cached", 0)
            self._tokens[opened.request.tenant] += opened.request.prompt
            self._began.append((opened.request.prompt, (now - opened.since) / SECOND))

    def _end(self, id: str, reason: FinishReason, now: int) -> None:
        served = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._repeated.end(id, now / SECOND, served=served)
        if self._open.pop(id, None) is None:
            return
        self._counts["completed"] += served
        self._counts["failed"] += reason is FinishReason.ERROR

    def end_window(self, until: int) -> None:
        """End the window under way."""
        if len(self.windows) >= _MAX_WINDOWS:
            raise ConfigError(f"diagnose: the journal spans over {_MAX_WINDOWS} windows; cut it")
        seconds = (until - self._begin) / SECOND
        late = [(opened.request.prompt, (until - opened.since) / SECOND, opened.request.tenant)
                for opened in self._open.values() if not opened.routed]  # fmt: skip
        known = [*self._began, *((prompt, wait) for prompt, wait, _ in late)]
        computed = [opened.request.prompt for opened in self._open.values()
                    if opened.routed and not 0 < opened.first <= self._begin]  # fmt: skip
        queues = Counter(tenant for *_, tenant in late)
        self.windows.append(FleetObservation(
            start_s=(self._begin - self._zero) / SECOND, seconds=seconds,
            arrived=self._counts["arrived"], completed=self._counts["completed"],
            failed=self._counts["failed"], refused=self._counts["refused"],
            repeated=self._counts["repeated"], queued=float(len(late)),
            ttft_p50_s=percentile(self._ttft, 50),
            wait_p50_s=percentile([wait for _, wait in self._began], 50),
            **self._lengths.wait_figures(known), longest_prompt_tokens=max(computed, default=0),
            workers=tuple(self._worker(worker) for worker in self._workers.values()),
            tenants=tuple(
                TenantObservation(
                    tenant=name, weight=float(self._weights.get(name, 1.0)),
                    tokens=float(self._tokens[name]), waiting=float(queues[name]),
                )
                for name in sorted({*self._tokens, *queues})
            ),
        ))  # fmt: skip
        self._begin = until
        self._clear()

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
        """End the last window, if it has half a window's length."""
        if self._begin and self._now - self._begin >= _WINDOW_S * SECOND // 2:
            self.end_window(self._now)


def journal_windows(
    entries: Iterable[JournalHead | JournalEntry], journal: str
) -> tuple[FleetObservation, ...]:
    """Return windows of ten seconds of a gateway's journal.

    A journal has the load reports that the gateway was sent. It lacks gaps between tokens,
    preemptions and the memory of workers: failure modes that need them are not judged.

    Args:
        journal: its name, for messages.

    Raises:
        ConfigError: it is shorter than a window.
    """
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
            f"diagnose: the journal {journal} spans less than {_WINDOW_S // 2} s; "
            "nothing can be told"
        )
    return tuple(made.windows)


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
