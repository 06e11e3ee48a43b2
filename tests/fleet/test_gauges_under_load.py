"""Gauges that a planner, a router, diagnosis or an alert reads, polled on a fleet under load.

The names come from the code that reads them: a gauge that is read and has no law here fails.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from tests.fleet.harness import Client, running

from pigou.config import ControlConfig
from pigou.control.state import LOADS
from pigou.diagnosis.metric_pages import MetricPage
from pigou.fleet import probe, worker_report
from pigou.fleet.planner_windows import PlannerWindows
from pigou.windows import scrape
from pigou.windows.planner_window import WorkerWindow
from pigou.wire import metrics_text
from tools.diagnosis_pages import alert_rules

#: Prompts take 0.3 s, steps 20 ms: a planner looks between the ends of steps, and within them.
TIMING = "law:itl_a=0.02,itl_b=0.001,prefill=0.02,prefill_token=0.001"
ARGUMENTS = ("--timing", TIMING, "--max-seqs", "32", "--blocks", "800", "--repeat", "1")
STREAMS, PROMPT, POLLS, POLL_S = 28, "word " * 150, 15, 0.1
PREFILL, DECODE, GATEWAY = "prefill-0", "decode-0", ""
_NAME = re.compile(r"\b(?:vllm:|pigou_)\w+")


@dataclass
class Polled:
    """What a fleet showed while it was busy, look by look."""

    pages: dict[str, list[MetricPage]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    rows: list[Mapping[str, Mapping[str, float]]] = field(default_factory=list)
    windows: list[Mapping[str, WorkerWindow]] = field(default_factory=list)

    def share(self, worker: str, *names: str) -> float:
        """Return how often a page's metrics were above 0, of the looks at which it had work."""
        values = [
            sum(page.total(name) or 0.0 for name in names)
            for number, page in enumerate(self.pages[worker])
            if worker == GATEWAY or (number and self.has_work(worker, number))
        ]
        assert len(values) > POLLS // 4, f"{worker} is idle: the load does not fit the test"
        return sum(value > 0 for value in values) / len(values)

    def has_work(self, worker: str, look: int) -> bool:
        """Whether the gateway had requests at a worker, before this look and behind it."""
        rows = [self.rows[number][worker] for number in (look - 1, look)]
        return all(row["prefill_requests"] + row["decode_requests"] > 0 for row in rows)


async def load(client: Client, until: asyncio.Event, number: int) -> None:
    while not until.is_set():
        await client.reply(prompt=f"{number} {time.monotonic()} " + PROMPT, max_tokens=50)


async def poll() -> Polled:
    """Look again and again at a fleet that is never idle."""
    polled, over = Polled(), asyncio.Event()
    control = ControlConfig(
        policy="llm-d-conditional", params={"non_cached_tokens": 1}, max_inflight=20
    )
    async with running(1, 1, 0, arguments=ARGUMENTS, control=control) as (serving, client):
        windows = PlannerWindows(serving.live_fleet, serving.plane_driver)
        tasks = [asyncio.create_task(load(client, over, number)) for number in range(STREAMS)]
        await asyncio.sleep(2.0)
        for look in range(POLLS):
            await asyncio.sleep(POLL_S)
            windows.sample()
            for path in ("/metrics", "/metrics/workers"):
                async with client.session.get(client.url + path) as response:
                    text = await response.text()
                page = MetricPage.read(text)
                polled.kinds |= dict(re.findall(r"# TYPE (\S+) (\S+)", text))
                pages = page.by_label("worker") if path.endswith("s/workers") else {GATEWAY: page}
                for worker, seen in pages.items():
                    polled.pages.setdefault(worker, []).append(seen)
            polled.rows.append(await client.workers())
            if look % 5 == 4:
                window = windows.window(time.monotonic_ns())
                polled.windows.append({w.id: w for pool in window.pools for w in pool.workers})
        over.set()
        await asyncio.gather(*tasks)
    return polled


@pytest.fixture(scope="module")
def polled() -> Polled:
    return asyncio.run(poll())


def busy(*workers: str, share: float = 0.7) -> Callable[[Polled, str], bool]:
    """Expect a gauge above 0 in nearly every look at these pages."""
    return lambda polled, name: all(polled.share(worker, name) >= share for worker in workers)


def shown(*workers: str) -> Callable[[Polled, str], bool]:
    """Expect a gauge whose 0 is a state of its own: it is on each page."""
    return lambda polled, name: all(name in polled.pages[worker][-1] for worker in workers)


def works(polled: Polled, _: str) -> bool:
    """Expect of both workers that requests run or wait."""
    return all(polled.share(worker, RUNNING, WAITING) >= 0.7 for worker in (PREFILL, DECODE))


RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
LAWS: dict[str, Callable[[Polled, str], bool]] = {
    RUNNING: works,
    WAITING: works,
    "vllm:kv_cache_usage_perc": busy(PREFILL, DECODE),
    "pigou_kv_block_tokens": busy(PREFILL, DECODE),
    "pigou_kv_table_blocks": busy(PREFILL, DECODE),
    "pigou_kv_table_tokens": busy(PREFILL, DECODE),
    "pigou_requests_inflight": busy(GATEWAY),
    "pigou_requests_queued": busy(GATEWAY),
    "pigou_worker_kv_usage_ratio": busy(GATEWAY),
    "pigou_worker_running": busy(GATEWAY),
    "pigou_worker_up": busy(GATEWAY),
    "pigou_game_prefill_busy_ratio": busy(GATEWAY),
    "pigou_game_expected_itl_seconds": busy(GATEWAY),
    "pigou_game_saturation_state": shown(GATEWAY),
    "pigou_kv_blocks": busy(PREFILL, DECODE),
    "pigou_kv_idle_tokens": shown(PREFILL, DECODE),
    "pigou_prompt_longest_tokens": shown(GATEWAY),
    "pigou_prompt_longest_wait_seconds": shown(GATEWAY),
}
#: Metrics of what this fleet does not have.
ELSEWHERE = {
    "vllm:gpu_cache_usage_perc", "vllm:cache_config_info", "vllm:time_per_output_token_seconds",
    "pigou_device_energy_joules_total", "pigou_tier_queued_blocks", "pigou_tier_cap_bytes",
    "pigou_tier_restored_blocks_total", "pigou_tier_tenant_bytes",
    "pigou_tier_quota_evicted_blocks_total", "pigou_tier_quota_refused_blocks_total",
    "pigou_expert_rank_imbalance", "pigou_lane_starves", "vllm:lora_requests_info",
    "pigou_cache_hits_total", "pigou_cache_stale_hits_total", "pigou_answer_ratings_total",
    "vllm:lora_adapter_loaded", "pigou_lora_loads_total", "pigou_lora_load_seconds_total",
}  # fmt: skip
_END = re.compile("_(total|sum|count|bucket)$")
#: Fields of a worker's window that are no load, or none of its role's.
_STATE = {"id", "state", "since_ns", "unplaceable", "location", "experts", "rank_imbalance"}
_STREAMS = {"mean_running", "held_tokens", "mean_held_tokens", "itl_s"}
_PROMPTS = {"queued_prefill_tokens", "computed_prompts", "computed_tokens", "computed_pairs",
            "routed_tokens"}  # fmt: skip
NOT_OF = {
    PREFILL: _STATE | _STREAMS | {"waiting"},
    DECODE: _STATE | _PROMPTS | {"prefill_s", "waiting"},
}


def read_names() -> set[str]:
    """Return the metrics that the readers of the pages name."""
    sources: Sequence[object] = (scrape, metrics_text, worker_report, probe)
    text = "\n".join(inspect.getsource(each) for each in sources)  # type: ignore[arg-type]
    text += alert_rules() + " ".join(str(name, "ascii") for name in worker_report._NAMES)
    return set(_NAME.findall(text)) - {
        name + end for name in ELSEWHERE for end in ("_sum", "_count")
    }


def test_each_gauge_that_is_read_is_above_zero_while_the_fleet_is_busy(polled: Polled) -> None:
    gauges = {name for name in read_names() if polled.kinds.get(name) == "gauge"} - ELSEWHERE
    assert gauges == set(LAWS)
    silent = {
        name: [polled.share(worker, name) for worker in polled.pages]
        for name, law in LAWS.items()
        if not law(polled, name)
    }
    assert not silent


def test_each_name_that_is_read_is_on_a_page(polled: Polled) -> None:
    families = {_END.sub("", name) for name in polled.kinds}
    assert {n for n in read_names() - ELSEWHERE if _END.sub("", n) not in families} == set()


def test_each_load_that_the_router_sees_is_above_zero_while_the_fleet_is_busy(
    polled: Polled,
) -> None:
    silent = {
        name
        for name in LOADS
        if not any(row[worker][name] for row in polled.rows for worker in (PREFILL, DECODE))
    }
    assert not silent


def test_each_figure_of_a_planners_window_is_known_while_the_fleet_is_busy(
    polled: Polled,
) -> None:
    for worker, without in NOT_OF.items():
        for name in WorkerWindow.__struct_fields__:
            values = [getattr(window[worker], name) for window in polled.windows[1:]]
            assert name in without or any(values), (worker, name, values)
