"""What a metrics page says of a worker's speed."""

from __future__ import annotations

import pytest

from pigou.config import ControlConfig
from pigou.control.messages import AdapterReport, WorkerUp
from pigou.fleet.costs import make_plane
from pigou.fleet.worker_report import read_adapters, read_report
from pigou.gateway.api.costs import cost_meter, note_report
from pigou.gateway.config import GatewayConfig
from pigou.gateway.plane_driver import PlaneDriver
from pigou.request import SECOND, Role, Worker

STOCK = b"""# HELP vllm:inter_token_latency_seconds x
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01"} 3.0
vllm:inter_token_latency_seconds_sum{engine="0"} 1.5
vllm:inter_token_latency_seconds_sum{engine="1"} 0.5
vllm:inter_token_latency_seconds_count{engine="0"} 10
vllm:request_prefill_time_seconds_sum{engine="0"} 4
"""


def test_sums_are_over_all_engines_of_a_server() -> None:
    report = read_report(STOCK, 7)
    assert report == (7, None, None, None, 2.0, 10.0, 4.0, None, None, (), None)


def test_own_seconds_of_prefill_go_before_those_of_requests_that_overlap() -> None:
    page = STOCK + b'pigou_prefill_seconds_total{engine="0"} 2.5\n'
    page += b'pigou_prefill_tokens_total{engine="0"} 900\n'
    report = read_report(page, 0)
    assert (report.prefill_s, report.prefill_tokens) == (2.5, 900.0)


def test_what_a_page_does_not_say_is_unknown_and_never_zero() -> None:
    assert read_report(b"", 0) == (0, *[None] * 8, (), None)


def test_a_tier_costs_what_its_capacity_does_on_a_live_bill() -> None:
    page = b'pigou_tier_cap_bytes{engine="0",tier="host"} 1e9\n'
    page += b'pigou_tier_cap_bytes{engine="0",tier="disk"} 4e9\n'
    gateway = GatewayConfig(port=0, prices="dram=3,nvme=0.1", gpu="cpu")
    driver = PlaneDriver(make_plane(ControlConfig(), gateway))
    driver.plane.observe(WorkerUp(Worker("w", "", Role.BOTH)), 0)
    note_report(driver, "w", None, read_report(page, 0))
    meter = cost_meter(driver)
    assert meter is not None
    hour = meter.bill(3600 * SECOND)
    assert hour.storage_usd == pytest.approx((3 * 1 + 0.1 * 4) / 730, rel=0.01)
    assert hour.usd == pytest.approx(hour.gpu_usd + hour.storage_usd)


def test_an_older_name_of_the_same_is_read() -> None:
    page = STOCK.replace(b"inter_token_latency", b"time_per_output_token")
    assert read_report(page, 0).itl_s == 2.0


def test_numbers_that_are_none_count_as_nothing() -> None:
    page = b"vllm:request_prefill_time_seconds_sum NaN\nvllm:request_prefill_time_seconds_sum -3\n"
    assert read_report(page, 0).prefill_s == 0.0


def test_adapters_are_those_on_the_device_and_hostile_pages_name_none() -> None:
    page = (
        b'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a,b"} 1.7e9\n'
        b'vllm:lora_adapter_loaded{adapter_name="a",level="gpu"} 1.0\n'
        b'vllm:lora_adapter_loaded{adapter_name="b",level="cpu"} 1.0\n'
        b'vllm:lora_adapter_loaded{adapter_name="c",level="gpu"} 0.0\n'
        b"pigou_lora_loads_total 4\npigou_lora_load_seconds_total 2.0\n"
    )
    assert read_adapters(page, "w") == AdapterReport("w", 2, ("a",), 0.5)
    assert read_adapters(page.replace(b'"2"', b'"-2"'), "w") is None
    assert read_adapters(page.replace(b'"2"', b'"0"'), "w") is None
    assert read_adapters(STOCK, "w") is None
    # Stock vLLM tells who runs, not what is loaded.
    assert read_adapters(page.split(b"\n")[0] + b"\n", "w") is None
