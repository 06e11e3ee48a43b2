"""Laws of the page that joins all workers' metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.metric_rules import promtool_complaints
from tests.gateway.stub import Stub, serving
from tests.gateway.test_views import Caller

from pigou.gateway.api import metrics as worker_federation
from pigou.gateway.api.metrics import WorkerPage, federated
from pigou.request import Role
from pigou.worker.metrics import WorkerMetrics

STOCK = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="stub"} 2.0
# HELP vllm:ttft_seconds Time to first token.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="0.5",model_name="other"} 1.0
vllm:ttft_seconds_bucket{le="+Inf",model_name="other"} 3 1700000000000
vllm:ttft_seconds_sum{model_name="other"} 4.5
vllm:ttft_seconds_count{model_name="other"} 3
# TYPE vllm:done_total counter
vllm:done_total{reason="a \\"b\\" \\\\ {c},",worker="mine"} 1e3
up 1
"""


def labels(worker: str, **more: str) -> dict[str, str]:
    return {"worker": worker, "role": "both", "pool": "p", "model_name": "stub", **more}


def families(page: bytes) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(page.decode()))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def test_each_family_is_headed_once_and_has_the_samples_of_all_workers() -> None:
    own = WorkerMetrics("stub", 2048, {"block_size": "16"}, 64).page().decode()
    pages = [WorkerPage(labels(f"w{i}"), text) for i, text in enumerate([own, own, STOCK])]
    page = federated(pages)
    heads = [line for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    running = families(page)["vllm:num_requests_running"].samples
    assert [(s.labels["worker"], s.value) for s in running] == [("w0", 0), ("w1", 0), ("w2", 2)]
    for family in families(page).values():
        assert all(name in s.labels for s in family.samples for name in labels("x")) or (
            family.name == "pigou_worker_pages_stale"
        )
    if (told := promtool_complaints(page.decode())) is not None:
        assert [each for each in told if "error" in each] == []


def test_labels_of_a_workers_own_stay_beside_those_of_the_fleet() -> None:
    found = families(federated([WorkerPage(labels('w"\\'), STOCK)]))
    (done,) = found["vllm:done"].samples
    assert done.labels == labels('w"\\', reason='a "b" \\ {c},', exported_worker="mine")
    assert done.value == 1000
    buckets = found["vllm:ttft_seconds"].samples
    assert {s.labels["exported_model_name"] for s in buckets} == {"other"}
    (running,) = found["vllm:num_requests_running"].samples
    assert running.labels == labels('w"\\', engine="0")  # its own model_name says the same
    assert found["up"].type == "unknown"


@pytest.mark.parametrize(
    "line", ["no metric", 'x{a="b} 1', "x{a=b} 1", "x 1_0", "x", 'x{a="b"}', "x 1 2 3", "9x 1",
             "x " + "1" * 20_000],
)  # fmt: skip
def test_a_malformed_line_is_left_out_and_counted(line: str) -> None:
    page = federated([WorkerPage(labels("w"), f"{line}\ngood 1\n")])
    found = families(page)
    assert "good" in found
    assert "x" not in found
    assert [s.value for s in found["pigou_worker_page_malformed_lines"].samples] == [1]


def test_families_of_one_name_and_other_types_are_left_out_and_counted() -> None:
    texts = ["# TYPE x gauge\nx 1\n", "# TYPE x counter\nx 2\n"]
    page = federated([WorkerPage(labels(f"w{i}"), text) for i, text in enumerate(texts)])
    found = families(page)
    assert [s.value for s in found["x"].samples] == [1]
    assert [s.value for s in found["pigou_worker_page_malformed_lines"].samples] == [0, 1]


async def test_a_slow_worker_is_left_out_in_bounded_time_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        raise AssertionError

    monkeypatch.setattr(worker_federation.WorkerFederation.__init__, "__defaults__", (0.2,))
    quick, stuck = Stub("a", Role.PREFILL), Stub("b", Role.DECODE)
    async with serving(quick, stuck, Stub("c", stock=True)) as fleet:
        (upstream,) = (up for up in fleet.plane_driver.upstreams.values() if up.worker.id == "b")
        monkeypatch.setattr(upstream, "get", lambda path, timeout_s: slow(None))  # type: ignore[arg-type]
        async with (
            aiohttp.ClientSession() as session,
            asyncio.timeout(60),
            session.get(fleet.url + "/metrics/workers") as response,
        ):
            found = families(await response.read())
    up = {s.labels["worker"]: s.value for s in found["pigou_worker_page_up"].samples}
    assert up == {"a": 1, "b": 0, "c": 1}
    assert found["pigou_worker_pages_stale"].samples[0].value == 1
    usage = found["vllm:kv_cache_usage_perc"].samples
    assert {(s.labels["worker"], s.labels["role"]) for s in usage} == {("a", "prefill"),
                                                                       ("c", "both")}  # fmt: skip


async def test_the_workers_metrics_are_for_whom_metrics_has_all(tmp_path: Path) -> None:
    caller = Caller(tmp_path)
    for open_metrics in (False, True):
        async with serving(Stub("a"), keys=caller.keys, open_metrics=open_metrics) as fleet:
            status = {who: (await caller.call(fleet, who, "/metrics/workers"))[0]
                      for who in ("", "ann", "root")}  # fmt: skip
            assert status == {"": 200 if open_metrics else 401, "ann": 403, "root": 200}
            _, page, _ = await caller.call(fleet, "root", "/metrics")
            assert json.dumps("/metrics/workers")[1:-1] in page  # counted as its own route
            assert "pigou_requests_inflight 0.0" in page.replace('{model_name="stub"}', "")
