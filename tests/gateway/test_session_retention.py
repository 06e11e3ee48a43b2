"""Laws of what is still cached of a session as its next prompt comes."""

from __future__ import annotations

import aiohttp
import numpy as np
from tests.gateway.stub import Stub, serving
from tests.gateway.test_stage_metrics import scrape

from pigou.gateway.metrics import SessionRetention
from pigou.metric_rows import MetricSet
from pigou.request import BlockKeys


def keys(*values: int) -> BlockKeys:
    return np.array(values, dtype=np.uint64)


def counts(retention: SessionRetention) -> tuple[float, float]:
    return retention._returned._value.get(), retention._retained._value.get()


def test_a_prompt_that_begins_with_an_earlier_one_is_its_sessions_next_turn() -> None:
    retention = SessionRetention(MetricSet())
    retention.take(keys(1, 2, 3), 0)
    retention.take(keys(1, 2, 3, 4, 5), 3)  # all of the first turn is there
    assert counts(retention) == (3, 3)
    retention.take(keys(1, 2, 3, 4, 5, 6), 1)  # of five blocks one is left
    assert counts(retention) == (8, 4)


def test_another_prompt_of_the_same_start_is_another_session() -> None:
    retention = SessionRetention(MetricSet())
    retention.take(keys(1, 2, 3), 0)
    retention.take(keys(1, 2, 9), 2)  # a shared system prompt is no session
    retention.take(keys(), 0)
    assert counts(retention) == (0, 0)
    retention.take(keys(1, 2, 3), 3)  # the same prompt again
    assert counts(retention) == (3, 3)


async def test_a_request_counts_as_a_retry_where_its_client_says_so() -> None:
    async with serving(Stub("a")) as fleet:
        for told in ({}, {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}):
            async with (
                aiohttp.ClientSession(headers=told) as session,
                session.post(fleet.url + "/v1/completions", json={"prompt": "x"}) as response,
            ):
                assert response.status == 200
        assert (await scrape(fleet))["pigou_client_retries_total"] == 1
