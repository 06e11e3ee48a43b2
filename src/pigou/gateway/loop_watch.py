"""Watches the gateway's event loop: how late it is, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import time

from pigou.metric_rows import MetricSet

_log = logging.getLogger("pigou.gateway")

#: Seconds between two looks, and from which on a lag is logged, once a minute.
LOOK_S, _LONG_S, _WARN_EVERY_S = 0.1, 1.0, 60.0
#: Seconds between two collections of the oldest generation, and times what one takes.
COLLECT_EVERY_S, _COLLECT_RATIO = 30.0, 100.0
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class LoopWatch:
    """Measures the lag of the event loop, and collects cycles of the oldest generation by time.

    A process that allocates little beyond what it frees collects that generation once in hours;
    until then a failed request's error can keep what its frames refer to. What lives on was frozen
    at the start, so that a collection looks at what came since.

    Example:
        background.start("event loop", LoopWatch(metrics).run)
    """

    def __init__(self, metrics: MetricSet, collect_every_s: float = COLLECT_EVERY_S) -> None:
        self._lag = metrics.histogram(
            "pigou_event_loop_lag_seconds",
            "How late the gateway's event loop came to a timer, by ten looks a second.", _SECONDS,
        )  # fmt: skip
        self._collect_every_s = collect_every_s
        self._warned_s = -_WARN_EVERY_S

    async def run(self) -> None:
        """Look until cancelled."""
        before_s = time.monotonic()
        next_s = before_s + self._collect_every_s
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            self._observe(max(0.0, now_s - before_s - LOOK_S), now_s)
            before_s = now_s
            if now_s >= next_s:
                gc.collect()
                took_s = time.monotonic() - now_s
                next_s = now_s + max(self._collect_every_s, _COLLECT_RATIO * took_s)

    def _observe(self, lag_s: float, now_s: float) -> None:
        self._lag.observe(lag_s)
        if lag_s > _LONG_S and now_s - self._warned_s > _WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning(
                "the event loop was %.1f s late: the machine gives the gateway too little time, or "
                "something here takes long (pigou_event_loop_lag_seconds)",
                lag_s,
            )
