"""Scrapes a live fleet, or one server, again and again: windows for a diagnosis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pigou.config import ConfigError
from pigou.diagnosis.metric_pages import MetricPage
from pigou.windows.observations import FleetObservation
from pigou.windows.scrape import FleetScrape, WorkersTable, scraped_window, with_knees
from pigou.workload.endpoint import open_session

#: Seconds that a page may take, and windows of a scrape.
_TIMEOUT_S, _WINDOWS = 10.0, 12
_MIN_WINDOW_S, _MAX_WINDOW_S = 0.5, 7200.0


class FleetScraper:
    """Reads the pages of one gateway, or of one server without a gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url.rstrip("/")
        try:
            self._name = urlsplit(url).netloc
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL ({error}); write http://HOST:8000") from None

    async def scrape(self) -> FleetScrape:
        """Return the fleet's present figures."""
        status, text = await self._get("/metrics")
        if status in (401, 403):
            raise ConfigError(
                f"{self._url}/metrics answered {status}; give an administrator's --api-key"
            )
        page = MetricPage.read(text)
        if status != 200 or not (
            "pigou_requests_inflight" in page or "vllm:num_requests_running" in page
        ):
            raise ConfigError(
                f"{self._url}/metrics answered {status}, and has neither Pigou's nor "
                "vLLM's metrics of all requests; give the URL of a gateway or a worker, without a "
                "path, and an administrator's --api-key where the gateway has keys"
            )
        if "pigou_requests_inflight" not in page:
            return FleetScrape(time.monotonic(), MetricPage(), {self._name: page})
        table = await self._table("/workers")
        return FleetScrape(time.monotonic(), page, await self._workers(), table)

    async def _workers(self) -> dict[str, MetricPage]:
        status, text = await self._get("/metrics/workers")
        return MetricPage.read(text).by_label("worker") if status == 200 else {}

    async def _table(self, path: str) -> WorkersTable:
        status, text = await self._get(path)
        if status in (401, 403):
            raise ConfigError(
                f"{self._url}{path} answered {status}; give an administrator's --api-key"
            )
        try:
            return msgspec.json.decode(text if status == 200 else "{}", type=WorkersTable)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(
                f"{self._url}{path} has no table of workers ({error}); give the URL of "
                "a gateway or a worker of Pigou, or of a vLLM server"
            ) from None

    async def _get(self, path: str) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._session.get(self._url + path, timeout=timeout) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ConfigError(
                f"{self._url}{path} did not answer ({error or type(error).__name__}); is "
                "it up, and the address right?"
            ) from None


async def scraped_windows(
    url: str, key: str, seconds: float, watch: Callable[[float], None] = lambda _: None
) -> tuple[FleetObservation, ...]:
    """Scrape a fleet for 6 seconds to a day; return twelve windows."""
    every = seconds / _WINDOWS
    if not _MIN_WINDOW_S <= every <= _MAX_WINDOW_S:
        raise ConfigError(
            f"--duration is {seconds:g}; give at least {_WINDOWS * _MIN_WINDOW_S:g}, at most "
            f"{_WINDOWS * _MAX_WINDOW_S:.0f}"
        )
    async with open_session(key) as session:
        scraper = FleetScraper(session, url)
        before = await scraper.scrape()
        begin, windows = before.at_s, []
        for number in range(1, _WINDOWS + 1):
            await asyncio.sleep(max(0.0, begin + number * every - time.monotonic()))
            now = await scraper.scrape()
            windows.append(scraped_window(before, now, before.at_s - begin))
            before = now
            watch(now.at_s - begin)
    return with_knees(windows)
