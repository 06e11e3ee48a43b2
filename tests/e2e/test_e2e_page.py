"""The page in a real browser: regime, tolls and Price of Anarchy move as load comes and goes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.harness import Client, running
from tests.gateway.browser import Page, browsing

from pigou.config import ControlConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: 10 ms a step, and 1 ms more for every stream, so that streams are in one another's way.
SLEEP = ("--executor", "sleep", "--sleep-base", "10000000", "--sleep-per-seq", "1000000",
         "--sleep-prefill-rate", "20000", "--repeat", "1")  # fmt: skip
TOLLS = "[...document.querySelectorAll('[data-toll]')].map((card) => Number(card.dataset.toll))"
STREAMS = "Number(document.querySelector('#figures b').textContent)"
#: Every file that the page asked for.
ASKED = "performance.getEntriesByType('resource').map((entry) => entry.name)"


async def load(client: Client, waves: int, width: int) -> None:
    async def ask(number: int) -> None:
        await client.reply(prompt=f"{number % 8} " + "tell me of the toll " * 20, max_tokens=60)

    for wave in range(waves):
        await asyncio.gather(*(ask(wave * width + i) for i in range(width)))


async def shown(page: Page) -> dict[str, Any]:
    """Return what the page shows of the game."""
    return dict(await page.value(
        "({regime: document.getElementById('regime').textContent,"
        " temperature: document.getElementById('temperature').textContent,"
        " poa: document.getElementById('poa').textContent,"
        f" tolls: {TOLLS}, streams: {STREAMS}}})"
    ))  # fmt: skip


async def test_prices_move_on_the_page_and_decisions_explain_themselves(tmp_path: Path) -> None:
    control = ControlConfig(policy="toll")
    async with (
        running(1, 2, 0, arguments=SLEEP, control=control) as (_, client),
        browsing(tmp_path / "profile") as page,
    ):
        await page.open(client.url + "/")
        await page.until("document.querySelectorAll('[data-toll]').length === 3")
        before = await shown(page)
        assert (before["regime"], before["temperature"], before["streams"]) == ("below", "0", 0)
        assert before["tolls"] == [0, 0, 0]
        assert before["poa"] == "–"

        running_load = asyncio.create_task(load(client, waves=8, width=24))
        await page.until(f"{STREAMS} > 10 && Math.max(...{TOLLS}) > 0")
        busy = await shown(page)
        await page.until("parseFloat(document.getElementById('poa').textContent) > 0", 60)
        await page.until("parseFloat(document.getElementById('memory').textContent) >= 1", 60)
        note = await page.value("document.getElementById('memory-note').textContent")
        assert "blocks evicted" in note, "how much memory is in use, and what left it"
        assert "prefixes" in note
        await explained(page, client)
        if folder := os.environ.get("PIGOU_PAGE_PICTURES"):
            await page.picture(Path(folder) / "page.png")
        await page.picture(tmp_path / "page.png")
        await running_load

        await page.until(f"{STREAMS} === 0 && Math.max(...{TOLLS}) === 0")
        after = await shown(page)
        assert float(after["poa"].split()[0]) > 0.5
        assert max(busy["tolls"]) > 0.01, "seconds that one more stream costs the others"
        assert (tmp_path / "page.png").stat().st_size > 20_000
        assert page.faults == []
        assert all(name.startswith(client.url) for name in await page.value(ASKED))


async def test_history_events_and_chat_are_on_the_page(tmp_path: Path) -> None:
    async with (
        running(0, 0, 1, arguments=SLEEP, prices="default") as (serving, client),
        browsing(tmp_path / "profile") as page,
    ):
        await load(client, waves=1, width=4)
        await page.open(client.url + "/")
        await page.until("document.querySelectorAll('.uplot').length >= 6")
        await page.until("document.querySelector('#ttft-card b').textContent.includes('s')")
        await page.value(
            "document.getElementById('words').value = 'Where is the market?';"
            "document.getElementById('ask').requestSubmit()"
        )
        await page.until("document.getElementById('measured').textContent.includes('TTFT')")
        assert await page.value("document.querySelector('.said.failed')") is None
        await page.until("document.querySelector('#bills td:last-child').textContent > '0'")
        await page.until("document.getElementById('diagnosis-note').textContent.length > 1")
        await page.until("!!document.querySelector('#decisions tr')")
        await page.value("document.querySelector('#decisions tr').click()")
        await page.until("document.getElementById('trace').textContent.includes('not traced')")
        assert await page.value("document.body.innerText.match(/NaN|undefined|null/)") is None
        os.kill(serving.supervisor.rows()[0].pid, signal.SIGKILL)
        await page.until("!!document.querySelector('#events .restart')", 90)
        assert "1" in await page.value("document.querySelector('.figure.bad b').textContent")
        await page.send("Emulation.setDeviceMetricsOverride", width=390, height=800,
                        deviceScaleFactor=1, mobile=True)  # fmt: skip
        wide = "document.documentElement.scrollWidth"
        await page.until(f"innerWidth === 390 && {wide} <= 390")
        async with client.session.get(client.url + "/") as reply:
            policy = reply.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert page.faults == []


#: The paper's detector, looking ten times as often, at a fleet that answers within 0.2 s at rest.
QUICK = {"detector": "paper", "theta1": 0.4, "theta2": 1.2, "margin": 0.05, "alpha": 0.7,
         "interval": 500_000_000, "consecutive": 2, "idle": 3_000_000_000}  # fmt: skip


async def test_the_regime_and_its_temperature_rise_and_fall_with_load(tmp_path: Path) -> None:
    control = ControlConfig(
        policy="dynamo-paper", saturation=QUICK, controller={"controller": "regime"}
    )
    slow = (*SLEEP, "--sleep-prefill-rate", "1500")
    async with (
        running(1, 2, 0, arguments=slow, control=control) as (_, client),
        browsing(tmp_path / "profile") as page,
    ):
        await page.open(client.url + "/")
        await page.until("document.querySelectorAll('[data-toll]').length === 3")
        before = await shown(page)
        assert (before["regime"], before["temperature"]) == ("below", "0")
        loading = asyncio.create_task(load(client, waves=5, width=96))
        await page.until("document.getElementById('regime').textContent !== 'below'")
        busy = await shown(page)
        assert busy["regime"] in ("transition", "saturated")
        await page.until("Number(document.getElementById('temperature').textContent) >= 0.7")
        await loading
        await page.until("document.getElementById('regime').textContent === 'below'", 40)
        assert (await shown(page))["temperature"] == "0"
        assert page.faults == []


async def explained(page: Page, client: Client) -> None:
    """Click on a decision, and check the table against the numbers themselves."""
    await page.until("document.querySelectorAll('#decisions tr').length === 12")
    id = await page.value(
        "(() => { const row = document.querySelector('#decisions tr');"
        " row.click(); return row.dataset.id; })()"
    )
    await page.until(f"document.querySelector('#why code')?.textContent === '{id}'")
    async with client.session.get(f"{client.url}/decisions/{id}") as response:
        why = await response.json()
    rows = await page.value(
        "[...document.querySelectorAll('#why tbody tr')].map((row) => [row.className,"
        " ...[...row.cells].slice(0, 2).map((cell) => cell.textContent)])"
    )
    assert len(rows) == len(why["candidates"]) == 4
    [chosen] = [row for row in rows if row[0] == "chosen"]
    assert chosen[1:] == [why["prefill"] or "local", f"{why['decode']} ✓"]
    heads = await page.value(
        "[...document.querySelectorAll('#why th')].map((cell) => cell.textContent)"
    )
    assert {name.replace("_", " ") for name in why["candidates"][0]["parts"]} <= set(heads)
    if folder := os.environ.get("PIGOU_PAGE_PICTURES"):
        await page.picture(Path(folder) / "why.png")
    await page.value("document.getElementById('why-close').click()")


async def test_the_page_asks_for_a_key_and_says_when_it_is_wrong(tmp_path: Path) -> None:
    from tests.lib.local_workers import local_workers

    from pigou.config import ControlConfig as Control
    from pigou.fleet.serve import Serving
    from pigou.fleet.supervisor import FleetSetup
    from pigou.gateway.auth.keys import make_key
    from pigou.gateway.config import GatewayConfig

    secret, line = make_key("ann", admin=True)
    tenant, other = make_key("bob")
    keys = tmp_path / "keys"
    keys.write_text(f"{line}\n{other}\n")
    serving = Serving(
        GatewayConfig(port=0, api_keys_file=str(keys)), Control(),
        FleetSetup(workers=local_workers(0, 0, 1, ("--executor", "sleep"), ["cpu"])),
    )  # fmt: skip
    try:
        await serving.start()
        url = f"http://127.0.0.1:{serving.port}/"
        async with browsing(tmp_path / "profile") as page:
            for given, sign in (
                ("wrong", "document.getElementById('status').textContent.includes('API key')"),
                (tenant, "document.getElementById('model').textContent === 'tenant bob'"),
                (secret, "document.querySelectorAll('[data-toll]').length === 1"),
            ):
                await page.open(url)
                await page.until("document.readyState === 'complete'")
                await page.value("sessionStorage.clear()")
                await page.open(url)
                await page.until("document.getElementById('key').open")
                await page.value(
                    f"document.getElementById('key-value').value = {json.dumps(given)};"
                    "document.getElementById('key-form').requestSubmit()"
                )
                await page.until(sign)
    finally:
        await serving.stop()
