"""Attainment of offered requests, by class: who counts, and who is inside."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from tests.gateway.stub import Fleet, Script, Stub, serving

from pigou.objectives import Objectives, Slo, WorkloadClass

TEXT = "/v1/completions"
OBJECTIVES = Objectives(
    Slo(ttft_s=10.0, itl_s=1.0),
    (
        WorkloadClass(name="gold", slo=Slo(ttft_s=10.0), header="x-class=gold"),
        WorkloadClass(name="strict", slo=Slo(ttft_s=1e-9), header="x-class=strict"),
    ),
)


async def post(fleet: Fleet, class_: str = "", **body: Any) -> int:
    headers = {"X-Class": class_} if class_ else {}
    body = {"prompt": "x" * 40, "max_tokens": 4, "stream": True} | body
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(fleet.url + TEXT, json=body) as response,
    ):
        await response.read()
        return response.status


def counts(fleet: Fleet, name: str) -> tuple[int, int]:
    attainment = fleet.plane_driver.meter.attainment
    return attainment.requests[name], attainment.inside[name]


async def test_requests_count_in_the_first_class_that_fits_and_for_its_objective() -> None:
    async with serving(Stub("a"), objectives=OBJECTIVES) as fleet:
        for class_ in ("gold", "gold", "strict", "lead", ""):
            assert await post(fleet, class_) == 200
        assert counts(fleet, "gold") == (2, 2)
        assert counts(fleet, "strict") == (1, 0)
        assert counts(fleet, "") == (2, 2)


async def test_failed_requests_are_outside_and_bad_ones_were_never_offered() -> None:
    script = Script(status=500)
    async with serving(Stub("a", script=script), objectives=OBJECTIVES) as fleet:
        assert await post(fleet) == 502
        assert counts(fleet, "") == (1, 0)
        script.status = 400
        assert await post(fleet) == 400
        assert counts(fleet, "") == (1, 0)


async def test_a_stream_that_breaks_off_is_outside() -> None:
    script = Script(error_after=2)
    async with serving(Stub("a", script=script), objectives=OBJECTIVES) as fleet:
        assert await post(fleet, max_tokens=200) == 200
        assert counts(fleet, "") == (1, 0)


@pytest.mark.parametrize(("limit_s", "inside"), [(5.0, 1), (1e-9, 0)])
async def test_a_reply_in_one_piece_is_inside_where_a_stream_could_have_been(
    limit_s: float, inside: int
) -> None:
    objectives = Objectives(Slo(ttft_s=limit_s, itl_s=limit_s))
    async with serving(Stub("a"), objectives=objectives) as fleet:
        assert await post(fleet, stream=False) == 200
        assert counts(fleet, "") == (1, inside)


async def test_without_objectives_nothing_is_counted_or_shown() -> None:
    async with serving(Stub("a")) as fleet:
        assert await post(fleet) == 200
        assert not fleet.plane_driver.meter.attainment.requests
        assert fleet.plane_driver.meter.view() is None
        async with aiohttp.ClientSession() as session:
            page = await (await session.get(fleet.url + "/metrics")).text()
        assert "pigou_slo" not in page


async def test_metrics_and_workers_show_attainment_by_class() -> None:
    async with serving(Stub("a"), objectives=OBJECTIVES) as fleet:
        await post(fleet, "gold")
        await post(fleet, "strict")
        async with aiohttp.ClientSession() as session:
            page = await (await session.get(fleet.url + "/metrics")).text()
            view = await (await session.get(fleet.url + "/workers")).json()
        lines = [line for line in page.splitlines() if 'class="strict"' in line]
        values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
        assert values["pigou_slo_requests_total"] == 1.0
        assert values["pigou_slo_attained_total"] == 0.0
        assert values["pigou_slo_attained_ratio"] == 0.0
        slo = view["slo"]
        assert slo["attained"] == 0.5
        assert slo["classes"]["gold"] == {
            "ttft_s": 10.0, "itl_s": None, "percentile": 95.0, "offered": 1, "attained": 1.0
        }  # fmt: skip
        assert slo["recent"]["default"] == {"offered": 0, "attained": None}


async def test_a_window_has_the_requests_since_the_one_before() -> None:
    async with serving(Stub("a"), objectives=OBJECTIVES) as fleet:
        meter = fleet.plane_driver.meter
        meter.is_windowed = True
        await post(fleet, "gold")
        await post(fleet, stream=False)
        window = meter.take(())
        assert [request.workload for request in window.arrived] == ["gold", ""]
        assert {request.workload for request in window.first} == {"gold", ""}
        streamed, whole = window.ended
        assert streamed.ttft_ns is not None
        assert streamed.output_tokens == 4
        assert streamed.itl_ns is not None
        assert streamed.computed is not None
        assert streamed.computed.worker == "a"
        assert streamed.is_attained
        assert whole.ttft_ns is None  # its client cannot see it
        assert window.generated["gold"] == 4
        assert not window.in_flight["gold"]
        again = meter.take(())
        assert (again.arrived, again.first, again.ended) == ([], [], [])
        work = meter.work_by_tenant()
        tokens = sum(request.prompt_tokens + request.output_tokens for request in window.ended)
        assert work == {"": pytest.approx(tokens)}
