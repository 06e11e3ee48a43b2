"""The board: what the gateway shows of itself and of the fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pigou.gateway.pilot import Pilot
from pigou.request import SECOND


class Row(msgspec.Struct, kw_only=True):
    """What whoever runs the fleet says of a worker.

    Attributes:
        id: name in the fleet.
        url: base address; empty while it has none.
        role: prefill, decode or both.
        state: starting, up, down, backoff or stopped.
        kind: local (started here) or attached.
        pid: of its process, 0 when it is not ours.
        restarts: times that it was started anew.
        note: why it is not up.
        gaps: times that KV events were missed for good.
    """

    id: str
    url: str
    role: str
    state: str
    kind: str
    pid: int = 0
    restarts: int = 0
    note: str = ""
    gaps: int = 0


Rows = Callable[[], list[Row]]


class Board:
    """Joins what the fleet's keeper, the control plane and the upstreams know.

    `tokens_per_second` is measured between two looks at least half a second apart.
    """

    def __init__(self, pilot: Pilot, rows: Rows) -> None:
        self._pilot = pilot
        self._rows = rows
        self._last: dict[str, tuple[int, int, float]] = {}

    def view(self) -> dict[str, Any]:
        """Return the fleet's table, for `/workers`."""
        workers = [msgspec.to_builtins(row) | self._load(row.id) for row in self._rows()]
        return {
            "workers": workers,
            "queued": self._pilot.queued,
            "shed": self._pilot.shed,
            "tokens_per_second": round(sum(w["tokens_per_second"] for w in workers), 1),
        }

    def gauges(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """Return the numbers of the table, for `/metrics`."""
        for row in self._rows():
            load = self._load(row.id)
            load.pop("tokens_per_second")
            load.pop("model")
            up = float(row.state == "up")
            yield row.id, row.role, {"up": up, "restarts": row.restarts, **load}

    def _load(self, worker: str) -> dict[str, Any]:
        state, upstream = self._pilot.plane.state, self._pilot.upstreams.get(worker)
        cache = self._pilot.plane.index.cache(worker)
        row = state.row.get(worker)
        counts = {name: 0 if row is None else int(v[row]) for name, v in state.counts.items()}
        reports = {name: 0.0 if row is None else float(v[row]) for name, v in state.reports.items()}
        return {
            **counts,
            **reports,
            "model": "" if upstream is None else upstream.engine.model,
            "cached_blocks": len(cache.blocks),
            "kv_events": cache.events,
            "tokens": 0 if upstream is None else upstream.tokens,
            "tokens_per_second": self._speed(worker, 0 if upstream is None else upstream.tokens),
        }

    def _speed(self, worker: str, tokens: int) -> float:
        now = time.monotonic_ns()
        then, before, speed = self._last.get(worker, (now, tokens, 0.0))
        if now - then >= SECOND // 2:
            speed = max(0, tokens - before) * SECOND / (now - then)
            then, before = now, tokens
        self._last[worker] = (then, before, round(speed, 1))
        return round(speed, 1)
