"""History for the page's charts, sampled by the gateway, and the fleet's events."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pigou.diagnosis.metric_pages import quantile_of
from pigou.gateway.api.page import Access, APIPage, APIPages, json_response
from pigou.gateway.fleet_status import FleetStatus
from pigou.gateway.gateway import Gateway
from pigou.gateway.metrics import Metrics
from pigou.gateway.model_routing import ModelRouting
from pigou.wire.errors import bad_request

#: Seconds between samples, and how many of them, and of events, are kept: half an hour.
STEP_S, MAX_SAMPLES, MAX_EVENTS = 2.0, 900, 200
_REGIMES = ("below", "transition", "saturated")
_WORK = ("/v1/completions", "/v1/chat/completions", "other")
#: By path: file and media type.
ASSETS = {
    "/": ("page.html", "text/html"),
    "/static/page.css": ("page.css", "text/css"),
    "/static/page.js": ("page.js", "text/javascript"),
    "/static/plan.js": ("plan.js", "text/javascript"),
    "/static/costs.js": ("costs.js", "text/javascript"),
    "/static/traces.js": ("traces.js", "text/javascript"),
    "/static/diagnosis.js": ("diagnosis.js", "text/javascript"),
    "/static/chat.js": ("chat.js", "text/javascript"),
    "/static/charts.js": ("charts.js", "text/javascript"),
    "/static/uplot.js": ("uplot.js", "text/javascript"),
    "/static/uplot.css": ("uplot.css", "text/css"),
}
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
        self._fleet, self._models, self._clock = fleet, models, clock
        self._metrics = [*models, *([] if metrics in models else [metrics])]
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._states: dict[str, tuple[str, int]] = {}
        self._counts: dict[str, float] = {}
        self._buckets: dict[str, dict[float, float]] = {}
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
        requests, errors = self._requests()
        first = self._since("ttft", [metrics.first_token for metrics in self._models])
        itl = self._since("itl", [metrics.itl for metrics in self._models])
        self._samples.append(
            {
                "time": now,
                "ttft_p50_s": quantile_of(first, 0.5),
                "ttft_p95_s": quantile_of(first, 0.95),
                "itl_p50_s": quantile_of(itl, 0.5),
                "itl_p95_s": quantile_of(itl, 0.95),
                "requests_per_s": self._rate("requests", requests, elapsed),
                "errors_per_s": self._rate("errors", errors, elapsed),
                "refused_per_s": self._rate("refused", view["shed"], elapsed),
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
        return {
            "step_s": STEP_S,
            "kept_s": STEP_S * MAX_SAMPLES,
            "series": {name: [sample[name] for sample in samples] for name in names},
            "totals": {
                "requests": self._counts.get("requests", 0.0),
                "errors": self._counts.get("errors", 0.0),
                "refused": self._counts.get("refused", 0.0),
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

    def _requests(self) -> tuple[float, float]:
        """Return requests so far, and those that failed by the fleet's fault."""
        requests = errors = 0.0
        for family in (one for metrics in self._metrics for one in metrics.requests.collect()):
            for sample in family.samples:
                if not sample.name.endswith("_total") or sample.labels["route"] not in _WORK:
                    continue
                requests += sample.value
                errors += sample.value * (sample.labels["status"] >= "500")
        return requests, errors

    def _rate(self, name: str, total: float, elapsed: float) -> float | None:
        before = self._counts.get(name, total)
        self._counts[name] = total
        return round(max(0.0, total - before) / elapsed, 3) if elapsed > 0 else None

    def _since(self, name: str, histograms: Sequence[Collector]) -> dict[float, float]:
        """Return the histogram counts since the last sample, summed."""
        now: dict[float, float] = {}
        for histogram in histograms:
            for bound, count in buckets(histogram.collect()).items():
                now[bound] = now.get(bound, 0.0) + count
        before = self._buckets.get(name, {})
        self._buckets[name] = now
        return {bound: count - before.get(bound, 0.0) for bound, count in now.items()}


def buckets(families: Iterable[Metric]) -> dict[float, float]:
    """Return a histogram's cumulative counts by upper bound."""
    return {
        float(sample.labels["le"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name.endswith("_bucket")
    }


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

    for name, _ in ASSETS.values():
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
    name, kind = ASSETS[request.path]
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
