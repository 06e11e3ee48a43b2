"""`/diagnosis` and `pigou diagnose URL`: what a gateway's own figures show, to an administrator."""

from __future__ import annotations

import time

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.gateway.stub import Stub, serving

from pigou.config import ConfigError
from pigou.diagnosis.diagnose import diagnose
from pigou.diagnosis.metric_pages import MetricPage
from pigou.gateway.api.diagnosis import GatewayDiagnosis
from pigou.gateway.auth.keys import Key, Keys, make_key
from pigou.windows.scrape import FleetScrape, scraped_window
from pigou.workload.fleet_scraper import scraped_windows


def test_windows_of_the_gateway_are_diagnosed() -> None:
    clock, queued = [0.0], [0]

    def page() -> MetricPage:
        lines = [
            f'pigou_requests_total{{route="other",status="200"}} {clock[0]}',
            f"pigou_requests_inflight {queued[0]}", f"pigou_requests_queued {queued[0]}",
        ]  # fmt: skip
        return MetricPage.read("\n".join(lines))

    diagnosis = GatewayDiagnosis(page, lambda: {"workers": []}, lambda: clock[0])
    diagnosis.sample()
    assert diagnosis.view()["healthy"] is None
    for _ in range(6):
        clock[0] += 10.0
        queued[0] += 30
        diagnosis.sample()
    view = diagnosis.view()
    assert view["windows"] == 6
    assert [finding["mode"] for finding in view["findings"]] == ["queue build-up"]


async def test_a_url_is_diagnosed_and_a_key_is_asked_for() -> None:
    secret, line = make_key("boss")
    other, tenant = make_key("one")
    digests = [bytes.fromhex(text.rpartition(":")[2]) for text in (line, tenant)]
    keys = Keys([Key("boss", digests[0], admin=True), Key("one", digests[1])])
    async with serving(Stub("d"), keys=keys) as fleet:
        for key in ("", other):
            with pytest.raises(ConfigError, match="--api-key"):
                await scraped_windows(fleet.url, key, 6.0)
        windows = await scraped_windows(fleet.url, secret, 6.0)
        async with aiohttp.ClientSession() as session:
            headers = {"authorization": f"Bearer {other}"}
            async with session.get(f"{fleet.url}/diagnosis", headers=headers) as refused:
                assert refused.status == 403
            headers = {"authorization": f"Bearer {secret}"}
            async with session.get(f"{fleet.url}/diagnosis", headers=headers) as answer:
                assert (await answer.json())["findings"] == []
    assert len(windows) == 12
    assert diagnose(windows).findings == ()


async def test_what_is_no_fleet_is_refused() -> None:
    with pytest.raises(ConfigError, match="did not answer"):
        await scraped_windows("http://127.0.0.1:9", "", 6.0)
    with pytest.raises(ConfigError, match="at least 6"):
        await scraped_windows("http://127.0.0.1:9", "", 1.0)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (b'{"workers": [1]}', "no table of workers"),
        (b'{"workers": [{"id": "d", "out_of_memory": "x"}]}', "no table of workers"),
        (b"<html>", "no table"),
    ],
)
async def test_what_only_looks_like_a_fleet_is_refused(table: bytes, words: str) -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="pigou_requests_inflight 0\nx_bucket 3\n")

    async def workers(_: web.Request) -> web.Response:
        return web.Response(body=table)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/workers", workers)
    async with TestServer(app) as server:
        with pytest.raises(ConfigError, match=words):
            await scraped_windows(str(server.make_url("/")), "", 6.0)


def test_bounds_that_are_no_numbers_are_left_out() -> None:
    page = MetricPage.read('x_bucket 3\nx_bucket{le="abc"} 3\nx_bucket{le="2.5e-05"} 1\n')
    assert page.buckets("x") == {2.5e-05: 1.0}


async def test_advice_on_the_prefix_comes_only_to_who_asks() -> None:
    rules = "These are the rules of the house, and they are long. " * 20
    async with serving(Stub("d")) as fleet, aiohttp.ClientSession() as session:

        async def advice(prompt: str, **headers: str) -> str:
            body = {"prompt": prompt, "max_tokens": 2}
            url = f"{fleet.url}/v1/completions"
            async with session.post(url, json=body, headers=headers) as reply:
                assert reply.status == 200
                return reply.headers.get("x-pigou-prefix-advice", "")

        asks = {"x-pigou-prefix-advice": "1"}
        assert await advice(f"000000001 {rules}") == ""
        assert (await advice(f"000000001 {rules}", **asks)).startswith("unknown")
        assert (await advice(f"000000002 {rules}", **asks)).startswith("move; ")


@pytest.mark.parametrize("stale", [False, True])
async def test_answers_that_outlived_their_source_are_diagnosed_live(stale: bool) -> None:
    async with (
        serving(Stub("d"), caches=("answer=1MiB",)) as fleet,
        aiohttp.ClientSession(headers={"X-Pigou-Tenure-Corpus": "handbook"}) as session,
    ):

        async def page() -> MetricPage:
            async with session.get(f"{fleet.url}/metrics") as reply:
                return MetricPage.read(await reply.text())

        async def ask() -> None:
            body = {"prompt": "Hi", "max_tokens": 2, "temperature": 0}
            async with session.post(f"{fleet.url}/v1/completions", json=body) as reply:
                assert reply.status == 200

        await ask()
        before, changed_at = await page(), time.time()
        for _ in range(25):
            await ask()
        change = {"field": "corpus", "value": "handbook", "version": "2"}
        change |= {"changed_at": changed_at} if stale else {}
        async with session.post(f"{fleet.url}/v1/manifest", json=change) as reply:
            assert (await reply.json())["voided"] == 1
        scrapes = [FleetScrape(10.0 * n, one, {}) for n, one in enumerate((before, await page()))]
        findings = diagnose([scraped_window(*scrapes, 0.0)]).findings
        assert [one.number for one in findings] == ([5] if stale else [])
        for _ in range(2):  # the manifest ended it
            await ask()
        later = FleetScrape(20.0, await page(), {})
        assert diagnose([scraped_window(scrapes[1], later, 10.0)]).findings == ()


async def test_a_streams_waits_and_tenants_are_on_the_gateways_pages() -> None:
    async with serving(Stub("d")) as fleet, aiohttp.ClientSession() as session:
        for stream in (False, True):
            body = {"prompt": "Hi", "max_tokens": 2, "stream": stream}
            async with session.post(f"{fleet.url}/v1/completions", json=body) as reply:
                await reply.read()
        async with session.get(f"{fleet.url}/metrics") as reply:
            page = MetricPage.read(await reply.text())
        async with session.get(f"{fleet.url}/workers") as reply:
            table = await reply.json()
        assert page.total("pigou_prompt_wait_seconds_count", length="short") == 2
        assert page.total("pigou_prompt_begun_tokens_count") == 2
        assert table["waiting_by_tenant"] == table["held_tokens_by_tenant"] == {}
