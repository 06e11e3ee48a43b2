"""Tables of a live fleet are what its clients see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.workload.stub import Stub

from pigou.config import ConfigError
from pigou.performance.speed import RequestMix
from pigou.request import Role
from pigou.sim.setup import Setup, SweepConfig
from pigou.workload.endpoint import EndpointError
from pigou.workload.live_sweep import SweepTarget, live_sweep

Start = Callable[..., Stub]
CONFIG = SweepConfig(
    isl="64", workers="2", utilisation="0.5", requests=20, concurrency="1,4,500",
    contexts="100", osl=8,
)  # fmt: skip


def test_the_tables_have_the_servers_times(stub: Start) -> None:
    server = stub(first=0.05, gap=0.01)
    told: list[str] = []
    tables = asyncio.run(
        live_sweep(CONFIG, Setup(blocks=500), SweepTarget(server.url, decode_workers=2),
                   lambda done, total, what: told.append(f"{done}/{total}"))
    )  # fmt: skip
    assert tables is not None
    assert told == ["0/4", "1/4", "2/4", "3/4"]  # 500 users are more than a worker runs
    (prompt,), (prefill,) = tables.prompts, tables.prefill
    assert 0.05 <= prompt.prefill_s < 1.0
    assert prefill.rate_rps == pytest.approx(0.5 * 2 / prompt.prefill_s)
    assert prefill.ttft_p50_s >= 0.05
    assert [point.concurrency for point in tables.decode] == [1, 4]
    for point in tables.decode:
        assert 0.01 <= point.itl_mean_s < 0.4
        assert 0 < point.streams <= point.concurrency
    model = tables.performance(Role.PREFILL)
    assert model.service_s(RequestMix(isl=64, osl=8)) == pytest.approx(prompt.prefill_s)
    assert (model.kv_tokens, model.max_seqs) == (8000, 256)


@pytest.mark.parametrize(
    ("config", "setup", "word"),
    [
        (CONFIG, Setup(blocks=500, gpu="H100"), "gpu"),
        (CONFIG, Setup(), "blocks"),
        (SweepConfig(), Setup(blocks=500), "workers"),
    ],
)
def test_what_the_fleet_decides_itself_is_refused(
    config: SweepConfig, setup: Setup, word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        asyncio.run(live_sweep(config, setup, SweepTarget("http://127.0.0.1:1")))


def test_a_fleet_that_is_not_there_is_told() -> None:
    with pytest.raises(EndpointError):
        asyncio.run(live_sweep(CONFIG, Setup(blocks=500), SweepTarget("http://127.0.0.1:9")))
