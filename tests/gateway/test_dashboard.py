"""The dashboard against a real Prometheus that scrapes a live fleet; the docs against both."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fleet.harness import Client, running

from pigou.config import ControlConfig
from pigou.control.planner.config import PlannerConfig

ROOT = Path(__file__).parents[2]
DASHBOARDS = {"pigou": "pigou.json", "pigou-workers": "pigou-workers.json"}
SLEEP = ("--executor", "sleep", "--sleep-base", "3000000", "--sleep-per-seq", "200000",
         "--repeat", "1")  # fmt: skip
#: Prompts take long enough beside streams that prefill workers are worth their transfers.
LAW = ("--timing", "law:itl_a=0.004,itl_b=0.001,prefill=0.005,prefill_token=0.0005")
VALUES = {"$worker": ".*", "$__rate_interval": "15s"}


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (title, query) of every panel, and of every variable."""
    for job, name in DASHBOARDS.items():
        dashboard = json.loads((ROOT / "deploy" / "grafana" / name).read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], _filled(target["expr"], job)
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                assert found, variable
                yield variable["name"], _filled(f"group by ({found[2]}) ({found[1]})", job)


def _filled(text: str, job: str) -> str:
    text = text.replace("$job", job)
    for name, value in VALUES.items():
        text = text.replace(name, value)
    assert "$" not in text, text
    return text


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    """Run a Prometheus that scrapes a gateway every second; yield its address."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    config = (ROOT / "deploy" / "prometheus.yml").read_text()
    assert "127.0.0.1:8000" in config
    made = config.replace("127.0.0.1:8000", target).replace("scrape_interval: 5s",
                                                            "scrape_interval: 1s")  # fmt: skip
    (folder / "prometheus.yml").write_text(made)
    with (folder / "log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def query(session: aiohttp.ClientSession, url: str, text: str) -> list[float]:
    """Return the values of a query's result; none while there is no answer."""
    try:
        async with session.get(url + "/api/v1/query", params={"query": text}) as response:
            answer = await response.json()
    except aiohttp.ClientError:
        return []
    if answer["status"] != "success":
        assert response.status == 503, (text, answer)
        return []
    return [float(each["value"][1]) for each in answer["data"]["result"]]


async def load(client: Client) -> None:
    """Keep six streams going, whose prompts are in part the same as before."""

    async def follow(number: int) -> None:
        for turn in itertools.count():
            words = f"{number} tell me of the toll " * 10 + f"{turn} and of the rest " * 20
            await client.reply(prompt=words, max_tokens=20)

    await asyncio.gather(*(follow(number) for number in range(6)))


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_every_query_of_the_dashboard_has_data(tmp_path: Path) -> None:
    # Sleeping workers have no GPU.
    wanted = [each for each in expressions() if "pigou_gpu_peak" not in each[1]]
    assert len(wanted) > 50
    control = ControlConfig(policy="toll")
    async with running(1, 2, 0, arguments=LAW, control=control) as (serving, client):
        loading = asyncio.create_task(load(client))
        try:
            async with prometheus(tmp_path, f"127.0.0.1:{serving.port}") as url:
                left: list[Any] = wanted
                for _ in range(60):
                    await asyncio.sleep(1)
                    assert not loading.done(), loading
                    found = [(each, await query(client.session, url, each[1])) for each in left]
                    left = [each for each, values in found
                            if not any(math.isfinite(value) for value in values)]  # fmt: skip
                    if not left:
                        break
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
    assert not left, "no data for:\n" + "\n".join(f"{title}: {expr}" for title, expr in left)


async def test_every_metric_is_documented() -> None:
    docs = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    gateway, heading, _ = docs.partition("## A worker's own")
    assert heading
    named = set(re.findall(r"`((?:pigou|gen_ai_server)_\w+)`", gateway))
    planner = PlannerConfig(slo="ttft=1,itl=1", planner={"planner": "static"}, interval_s=0.2)
    points = {"light": {"max_seqs": 8}, "heavy": {"max_seqs": 8}}
    control = ControlConfig(policy="toll", operating_points=points)
    async with running(
        0, 0, 1, arguments=SLEEP, control=control, planner=planner, prices="default"
    ) as (_, client):  # fmt: skip
        await asyncio.gather(*(client.reply(prompt=f"{i} " * 40, max_tokens=4) for i in range(30)))
        await client.post("/v1/completions", prompt="x", max_tokens=2)
        for _ in range(100):
            async with client.session.get(client.url + "/metrics") as response:
                page = await response.text()
            if "pigou_game_poa{" in page and "pigou_game_poa_caching " in page:
                break
            await asyncio.sleep(0.2)
        async with client.session.get(client.url + "/metrics/workers") as response:
            federated = list(text_string_to_metric_families(await response.text()))
    families = list(text_string_to_metric_families(page))
    families += [each for each in federated if each.name.startswith("pigou_worker_page")]
    exported = {
        each.name + "_total" * (each.type == "counter")
        for each in families if not each.name.endswith("_created")
    }  # fmt: skip
    assert exported - set(re.findall(r"`(pigou_\w+|gen_ai_server_\w+)`", docs)) == set()
    rare = (
        "pigou_trace_",
        "pigou_length_",
        "pigou_budget_",
        "pigou_class_",
        "pigou_lane_",
        "pigou_degraded_",
        "pigou_worker_kv_quotas",
    )  # only with their options
    missing = {name for name in named - exported if not name.startswith(rare)}
    assert missing <= {"pigou_requests_failed_total", "pigou_migrations_total"}
    assert all(each.documentation for each in families)
