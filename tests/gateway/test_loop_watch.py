"""Laws of the event loop's watch: a lag shows on the page, and cycles go by time."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

from tests.gateway.stub import Stub, serving
from tests.gateway.test_front import eventually, raw

from pigou.gateway.app import LOOK_S, LoopWatch
from pigou.metric_rows import MetricSet


class Node:
    """A cycle of one."""

    def __init__(self) -> None:
        self.own = self


async def test_a_pause_of_the_loop_is_observed() -> None:
    metrics = MetricSet()
    registry = metrics.registry
    watching = asyncio.create_task(LoopWatch(metrics).run())
    await asyncio.sleep(0)
    time.sleep(LOOK_S + 0.4)
    await asyncio.sleep(0.01)
    watching.cancel()
    name = "pigou_event_loop_lag_seconds"
    assert (registry.get_sample_value(f"{name}_sum") or 0.0) >= 0.3
    assert registry.get_sample_value(f"{name}_bucket", {"le": "0.25"}) == 0.0


async def test_cycles_of_the_oldest_generation_are_collected_by_time() -> None:
    node = Node()
    gone = weakref.ref(node)
    gc.collect()
    gc.disable()
    try:
        del node
        watching = asyncio.create_task(LoopWatch(MetricSet(), collect_every_s=0.0).run())
        await eventually(lambda: gone() is None, 10)
        watching.cancel()
    finally:
        gc.enable()


async def test_the_page_has_the_lag() -> None:
    async with serving(Stub("a")) as fleet:
        page = await raw(fleet, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"pigou_event_loop_lag_seconds" in page + await raw(
            fleet, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
