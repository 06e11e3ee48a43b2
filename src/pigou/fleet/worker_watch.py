"""Watches one worker that is up: health, load, hangs, KV events."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import aiohttp

from pigou.background import cancel
from pigou.control.messages import CacheChanged, CacheLost
from pigou.fleet.config import WatchConfig
from pigou.fleet.hang_detection import EngineProgress, HangArbiter, HangDetector, read_health
from pigou.fleet.kv_event_subscriber import EventPoller, EventSubscriber, read_pushed_load
from pigou.fleet.probe import POLL, EventSource, read_served
from pigou.fleet.worker_process import ProcessState
from pigou.fleet.worker_report import metrics_progress, read_adapters, read_load, read_report
from pigou.gateway.api.costs import note_report
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import GONE, Upstream
from pigou.wire import metrics_text
from pigou.wire.kv_event_decoding import WireEvent

_log = logging.getLogger("pigou.fleet")

#: Times the pause between two looks that count as passed, however late the watcher is.
_LATE = 1.5
#: Seconds between two looks at a server's list of models, at least.
_MODELS_EVERY_S = 2.0
#: State that a draining Pigou worker reports; its streams may finish.
_CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer of `/health`: why the worker is unwell, if it is, and its engine's progress."""

    why: str = ""
    silent: bool = False
    progress: EngineProgress | None = None


class WorkerWatch:
    """Watches a worker until it is down: `/health` is refused or fails several times in a row.

    It is hung if its engine has work and no progress. A fleet that is slow as a whole is not hung,
    and `HangArbiter` judges one worker at a time. Slow clients do not matter.
    """

    def __init__(
        self,
        plane_driver: PlaneDriver,
        upstream: Upstream,
        config: WatchConfig,
        arbiter: HangArbiter | None = None,
        process_state: ProcessState | None = None,
        heard: Callable[[], EngineProgress | None] | None = None,
    ) -> None:
        self._plane_driver = plane_driver
        self._upstream = upstream
        self._config = config
        self._arbiter = arbiter or HangArbiter(config.hang)
        self._process_state = process_state
        self._heard = heard  # returns the last heartbeat not sent over HTTP
        self._last_heard: EngineProgress | None = None
        self._detector = HangDetector(config.hang, config.failures)
        self.gaps = 0  # count of lost KV event gaps
        self.hung = False  # why `until_down` returned
        self.stopped = False
        self._listed_at = 0.0
        self._pushed_at = -math.inf  # when its load was pushed last

    async def until_down(
        self, sources: Sequence[EventSource], load: EventSource | None = None
    ) -> str:
        """Return why the worker counts as down, once it does; `load` replaces polled loads."""
        worker, background = self._upstream.worker.id, self._plane_driver.background
        subscribers = [
            background.start(
                f"{worker} KV events",
                EventPoller(self._upstream, self._apply, self._lose).run
                if source.endpoint == POLL
                else EventSubscriber(source, self._apply, self._lose).run,
            )
            for source in sources
        ]
        if load is not None:
            read = partial(read_pushed_load, load, self._take_load)
            subscribers.append(background.start(f"{worker} load", read))
        self._arbiter.add(worker, self._detector)
        try:
            return await self._look()
        finally:
            self._arbiter.remove(worker)
            await cancel(*subscribers)

    def _take_load(self, page: bytes) -> None:
        """Report a pushed load, a metrics page of few lines; one without a count is ignored."""
        if metrics_text.totals(page, (metrics_text.RUNNING,)):
            self._pushed_at = time.monotonic()
            self._plane_driver.observe(read_load(page, self._upstream.worker.id))

    def _apply(self, events: tuple[WireEvent, ...]) -> None:
        self._plane_driver.observe(CacheChanged(self._upstream.worker.id, events))

    def _lose(self) -> None:
        self.gaps += 1
        self._plane_driver.observe(CacheLost(self._upstream.worker.id))

    async def _look(self) -> str:
        config, failures = self._config, 0
        self._listed_at = time.monotonic()
        while True:
            began = time.monotonic()
            await asyncio.sleep(config.every)
            passed_s = min(time.monotonic() - began, _LATE * config.every)
            answer = await self._ask()
            if answer.silent:
                self._miss(passed_s + config.timeout)
            elif not answer.why:
                page = await self._report()
                await self._list_models()
                self._detector.observe(answer.progress or self._stock_progress(page), passed_s)
            failures = failures + 1 if answer.why else 0
            if failures >= config.failures:
                return answer.why
            if hung := self._judge():
                self.hung = True
                return hung

    def _miss(self, passed_s: float) -> None:
        heard = self._heard() if self._heard is not None else None
        fresh = heard is not self._last_heard
        self._last_heard = heard
        self._detector.miss(passed_s, heard if fresh else None)

    def _judge(self) -> str:
        worker = self._upstream.worker.id
        stopped, computes = False, False
        if self._detector.silent_looks and self._process_state is not None:
            stopped, computes = self._process_state.look()
        is_outlier = self._arbiter.is_outlier(worker)
        why = self._detector.verdict(stopped=stopped, computes=computes, is_outlier=is_outlier)
        if why and not self._arbiter.declare_hung(worker, time.monotonic()):
            _log.warning("%s: %s; it is left alone until another is back", worker, why)
            return ""
        self.stopped = stopped
        return why

    async def _ask(self) -> _Answer:
        try:
            status, body = await self._upstream.get("/health", self._config.timeout)
        except TimeoutError:
            return _Answer(silent=True)
        except (aiohttp.ClientError, OSError) as error:
            number = getattr(error, "errno", None)
            if number is not None and number not in GONE:
                _log.warning("%s: /health cannot be asked: %s", self._upstream.worker.id, error)
                return _Answer()
            return _Answer(f"/health: {error or type(error).__name__}")
        health = read_health(body)
        if status == 200 or health.status == _CLOSING:
            return _Answer(progress=health.progress)
        return _Answer(f"/health answered {status}")

    async def _report(self) -> bytes:
        """Report the load of the metrics page; return the page or b""."""
        page = await self._upstream.page("/metrics", self._config.timeout)
        if page is None:
            return b""
        # While the engine steps it pushes; an idle one's page says what it pushed last.
        if time.monotonic() - self._pushed_at > self._config.every:
            self._plane_driver.observe(read_load(page, self._upstream.worker.id))
        if (adapters := read_adapters(page, self._upstream.worker.id)) is not None:
            self._plane_driver.observe(adapters)
        before, report = self._upstream.report, read_report(page, time.monotonic_ns())
        self._upstream.report = report
        note_report(self._plane_driver, self._upstream.worker.id, before, report)
        return page

    async def _list_models(self) -> None:
        """Refresh a server's model names: adapters come and go."""
        upstream, now = self._upstream, time.monotonic()
        if now - self._listed_at < _MODELS_EVERY_S:
            return
        self._listed_at = now
        served = await read_served(upstream, self._config.timeout)
        if served is not None:
            upstream.engine = replace(upstream.engine, served=served)

    def _stock_progress(self, page: bytes) -> EngineProgress | None:
        upstream = self._upstream
        tokens = self._plane_driver.plane.state.figures(upstream.worker.id)["prefill_tokens"]
        return metrics_progress(
            page, owed=upstream.owed, planned_tokens=int(tokens),
            unstreamed=upstream.unstreamed, bytes_read=upstream.bytes_read,
        )  # fmt: skip
