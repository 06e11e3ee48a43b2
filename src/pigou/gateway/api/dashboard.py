"""History for the page's charts, sampled by the gateway, and the fleet's events."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from pigou.diagnosis.metric_pages import MetricPage, quantile
from pigou.gateway.api.diagnosis import metric_page
from pigou.gateway.api.page import Access, APIPage, APIPages, json_response
from pigou.gateway.fleet_status import FleetStatus
from pigou.gateway.gateway import Gateway
from pigou.gateway.metrics import Metrics
from pigou.gateway.model_routing import ModelRouting
from pigou.windows.scrape import ITL, TTFT, requests_by_status
from pigou.wire.errors import bad_request

#: Seconds between samples, and how many of them, and of events, are kept: half an hour.
STEP_S, MAX_SAMPLES, MAX_EVENTS = 2.0, 900, 200
_REGIMES = ("below", "transition", "saturated")
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
#: Files by path.
ASSETS = {"/": "page.html"} | {
    f"/static/{name}": name
    for name in ("page.css", "page.js", "plan.js", "costs.js", "traces.js", "diagnosis.js",
                 "chat.js", "charts.js", "uplot.js", "uplot.css")
}  # fmt: skip
#: The page needs nothing from elsewhere, runs no script within itself, and nobody frames it.
_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Event(msgspec.Struct, frozen=True):
    """An event of a worker."""

    time: float  # Unix time in seconds
    worker: str
    kind: str  # up, draining, down or restart
    text: str  # why, in words; may be empty


class History:
    """Samples and events of the last half hour, in ring buffers."""

    def __init__(
        self, fleet: FleetStatus | ModelRouting, metrics: Metrics, models: Sequence[Metrics],
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._fleet, self._clock = fleet, clock
        sources = [*models, *([] if metrics in models else [metrics])]
        self._collectors = [
            collector
            for source in sources
            for collector in (source.requests, source.first_token, source.itl)
        ]
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._states: dict[str, tuple[str, int]] = {}
        self._page = MetricPage()
        self._refused = 0.0
        self._last = 0.0

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(STEP_S)

    def sample(self) -> None:
        """Take one sample, and record events since the last."""
        now = round(self._clock(), 3)
        self._note_events(now)
        view = self._fleet.view()
        workers = view["workers"]
        poa = view["game"]["poa"]
        elapsed = now - self._last if self._last else 0.0
        before, self._page = self._page, metric_page(self._collectors)
        ttft, itl = ((before.buckets(name), self._page.buckets(name)) for name in (TTFT, ITL))
        answered = requests_by_status(before, self._page)
        refused, self._refused = view["shed"] - self._refused, view["shed"]
        self._samples.append(
            {
                "time": now,
                "ttft_p50_s": quantile(*ttft, 0.5),
                "ttft_p95_s": quantile(*ttft, 0.95),
                "itl_p50_s": quantile(*itl, 0.5),
                "itl_p95_s": quantile(*itl, 0.95),
                "requests_per_s": _rate(sum(answered.values()), elapsed),
                "errors_per_s": _rate(_failed(answered), elapsed),
                "refused_per_s": _rate(refused, elapsed),
                "tokens_per_s": view["tokens_per_second"],
                "queued": view["queued"],
                "streams": sum(worker["decode_requests"] for worker in workers),
                "workers_up": sum(worker["state"] == "up" for worker in workers),
                "kv_usage": max((worker["kv_usage"] for worker in workers), default=None),
                "toll_s": max((w["toll"] for w in workers if w["toll"] is not None), default=None),
                "regime": _REGIMES.index(view["game"]["regime"]),
                "poa": None if poa is None else poa["whole"]["value"],
                "poa_low": None if poa is None else poa["whole"]["low"],
                "poa_high": None if poa is None else poa["whole"]["high"],
            }
        )
        self._last = now

    def view(self, since: float = 0.0) -> dict[str, Any]:
        """Return samples and events after `since` (Unix seconds), as columns."""
        samples = [sample for sample in self._samples if sample["time"] > since]
        names = self._samples[-1].keys() if self._samples else ()
        answered = requests_by_status(MetricPage(), self._page)
        return {
            "step_s": STEP_S,
            "kept_s": STEP_S * MAX_SAMPLES,
            "series": {name: [sample[name] for sample in samples] for name in names},
            "totals": {
                "requests": sum(answered.values(), 0.0),
                "errors": _failed(answered),
                "refused": self._refused,
                "restarts": sum(row.restarts for row in self._fleet.rows()),
            },
            "events": [msgspec.to_builtins(event) for event in self._events if event.time > since],
        }

    def _note_events(self, now: float) -> None:
        rows = self._fleet.rows()
        for row in rows:
            state, restarts = self._states.get(row.id, ("", row.restarts))
            if row.restarts > restarts:
                self._events.append(Event(now, row.id, "restart", row.note))
            if row.state != state and "up" in (row.state, state):
                kind = row.state if row.state in ("up", "draining") else "down"
                self._events.append(Event(now, row.id, kind, row.note))
            self._states[row.id] = (row.state, row.restarts)
        for gone in self._states.keys() - {row.id for row in rows}:
            del self._states[gone]


def _failed(answered: Mapping[str, float]) -> float:
    """Return requests that failed by the fleet's fault."""
    return sum((count for status, count in answered.items() if status >= "500"), 0.0)


def _rate(count: float, elapsed: float) -> float | None:
    return round(max(0.0, count) / elapsed, 3) if elapsed > 0 else None


def pages(gateway: Gateway) -> APIPages:
    """Return the page's static files, and the data of its charts."""
    models = [model.metrics for model in gateway.routing]
    history = History(gateway.routing, gateway.metrics, models)

    async def show_history(request: web.Request) -> web.Response:
        """Show samples and events after `since`, Unix time in seconds."""
        text = request.query.get("since", "0")
        try:
            since = float(text)
        except ValueError:
            since = math.nan
        if not math.isfinite(since):
            raise bad_request(f"since is {text[:40]!r}; it must be seconds.", "since")
        return json_response(history.view(since))

    for name in ASSETS.values():
        _text(name)  # read now, so that no request needs a file descriptor
    return APIPages(
        [
            APIPage("/history", show_history, Access.ADMIN, ("since",)),
            *(APIPage(path, asset, Access.OPEN, None) for path in ASSETS),
        ],
        {"history of the page": history.run},
    )


async def asset(request: web.Request) -> web.Response:
    """Return one of the page's files."""
    name = ASSETS[request.path]
    kind = _MEDIA_TYPES[name.rpartition(".")[2]]
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return web.Response(text=_text(name), content_type=kind, charset="utf-8", headers=headers)


@lru_cache
def _text(name: str) -> str:
    return files("pigou.gateway").joinpath("web", name).read_text(encoding="utf-8")
