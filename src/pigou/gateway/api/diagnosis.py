"""Diagnosis of the fleet from the gateway's metrics of the last half hour."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
from aiohttp import web
from prometheus_client.registry import Collector

from pigou.diagnosis.diagnose import diagnose
from pigou.diagnosis.metric_pages import MetricPage
from pigou.gateway.api.metrics import WorkerFederation, gateway_metrics
from pigou.gateway.api.page import Access, APIPage, APIPages, json_response
from pigou.gateway.gateway import Gateway
from pigou.windows.observations import FleetObservation
from pigou.windows.scrape import FleetScrape, WorkersTable, scraped_window, with_knees

#: Metric pages of workers, by id.
WorkerPages: TypeAlias = Mapping[str, MetricPage]
#: Seconds of a window, and windows that are remembered: half an hour.
WINDOW_S, MAX_WINDOWS = 10.0, 180


def pages(gateway: Gateway) -> APIPages:
    """Return `/diagnosis`: failure modes of the last half hour."""

    def page() -> MetricPage:
        return metric_page([gateway_metrics(gateway)])

    federation = WorkerFederation(gateway.routing)

    async def workers() -> WorkerPages:
        pages = [(page.labels["worker"], page.text) for page in await federation.pages()]
        return await asyncio.to_thread(lambda: {w: MetricPage.read(t) for w, t in pages if t})

    diagnosis = GatewayDiagnosis(page, gateway.routing.view, workers=workers)

    async def show(_: web.Request) -> web.Response:
        return json_response(diagnosis.view())

    return APIPages(
        [APIPage("/diagnosis", show, Access.ADMIN)], {"diagnosis of the fleet": diagnosis.run}
    )


def metric_page(collectors: Iterable[Collector]) -> MetricPage:
    """Return the present samples of metrics."""
    families = (family for collector in collectors for family in collector.collect())
    return MetricPage(
        (sample.name, sample.labels, sample.value)
        for family in families
        for sample in family.samples
    )


class GatewayDiagnosis:
    """Samples and diagnoses the gateway's page, its table of workers, and their pages."""

    def __init__(
        self, page: Callable[[], MetricPage], table: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.time,
        workers: Callable[[], Awaitable[WorkerPages]] | None = None,
    ) -> None:  # fmt: skip
        self._page, self._table, self._clock, self._workers = page, table, clock, workers
        self._windows: deque[FleetObservation] = deque(maxlen=MAX_WINDOWS)
        self._begin = clock()
        self._before: FleetScrape | None = None

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample({} if self._workers is None else await self._workers())
            await asyncio.sleep(WINDOW_S)

    def sample(self, workers: WorkerPages = MappingProxyType({})) -> None:
        """Close a window and open the next; `workers` are their pages by id."""
        table = msgspec.convert(self._table(), WorkersTable)
        now, before = FleetScrape(self._clock(), self._page(), workers, table), self._before
        if before is not None and now.at_s > before.at_s:
            self._windows.append(scraped_window(before, now, before.at_s - self._begin))
        self._before = now

    def view(self) -> dict[str, Any]:
        """Return the diagnosis of the windows so far, as JSON; `since` is Unix time."""
        if not self._windows:
            return {"since": self._begin, "windows": 0, "findings": [], "healthy": None}
        series = with_knees(self._windows)
        since = self._begin + series[0].start_s
        view: dict[str, Any] = msgspec.to_builtins(diagnose(series))
        return {"since": since, **view}
