"""Laws of simulated tiers: they change when things are done, and never what is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from setups import LAW, differences, figures, open_loop, run, simulation
from tests.lib.examples import examples

from pigou.config import ConfigError
from pigou.kv.offload import RecomputeCost
from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, Outage, WorkerGroup
from pigou.sim.setup import TierConfig
from pigou.sim.tiers import recompute_cost_of, simulated_tiers
from pigou.sim.timing_models import build_timing
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec

#: A block of 16 tokens of Llama-3.1-8B has 2 MiB.
BLOCK = 2 / 1024
SLOW = TierConfig(name="disk", gib=100 * BLOCK, gbps=20.0, latency_us=500.0)


def near(blocks: float, **rest: Any) -> TierConfig:
    return TierConfig(name="host", gib=blocks * BLOCK, **rest)


def setup(blocks: int, *tiers: TierConfig, **rest: Any) -> dict[str, Any]:
    return {"blocks": blocks, "model": "llama-3.1-8b", "tiers": tiers, **rest}


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_steps_at_once_equal_single_ones_with_tiers(data: st.DataObject) -> None:
    draw = data.draw
    tiers = draw(
        st.sampled_from(
            [(near(6),), (near(30), SLOW), (near(12, gbps=1.0, policy="arc"),), (near(60), SLOW)]
        )
    )
    fails = (Outage(start=0.7, end=1.1),) if draw(st.booleans()) else ()
    case: dict[str, Any] = {
        "fleet": draw(
            st.sampled_from(
                ["1xboth", "1p+2d", FleetConfig(workers=(WorkerGroup(count=2, fails=fails),))]
            )
        ),
        "client": ClientConfig(timeout=draw(st.sampled_from([0.0, 0.5])), retries=1, backoff=0.1),
        "setup": setup(
            draw(st.sampled_from([32, 60])), *tiers, engine=draw(st.sampled_from(["vllm", "pigou"]))
        ),
        "control": {"policy": draw(st.sampled_from(["least-loaded", "toll"]))},
    }
    workload = open_loop(draw(st.sampled_from([10.0, 60.0])), 40, seed=draw(st.integers(0, 9)))
    assert differences(run(workload, **case), run(workload, **case, stepwise=True)) == {}


def test_prompts_that_the_device_has_no_room_for_are_restored() -> None:
    workload = open_loop(8.0, 100, templates=4)
    bare = run(workload, "1xboth", setup=setup(30, engine="pigou")).document()
    tiered = run(workload, "1xboth", setup=setup(30, near(200), engine="pigou")).document()
    assert tiered["prefix_hit_ratio"] > bare["prefix_hit_ratio"] + 0.1
    assert tiered["ttft_s"]["mean"] < bare["ttft_s"]["mean"]
    host = tiered["workers"][0]["tiers"]["host"]
    assert host["restored_blocks"] > 0
    assert host["used_bytes"] <= host["cap_bytes"]


def test_a_link_slower_than_computing_is_not_read() -> None:
    workload = open_loop(4.0, 40, templates=4)
    slow = near(200, gbps=0.05)  # a third of a second for a block, against 0.8 ms
    document = run(workload, "1xboth", setup=setup(30, slow)).document()
    assert document["workers"][0]["tiers"]["host"]["restored_blocks"] == 0


def test_the_same_seed_gives_the_same_tiers() -> None:
    workload = open_loop(20.0, 60)
    one, two = (run(workload, "2xboth", setup=setup(40, near(30), SLOW)) for _ in range(2))
    assert figures(one) == figures(two)


def test_what_computing_takes_is_read_off_the_timing() -> None:
    timing = build_timing(LAW, "llama-3.1-8b", "", 1).timing
    worth = recompute_cost_of(timing, 16, 512)
    assert worth.slope == 0.0  # this law knows no context
    assert worth.base == pytest.approx(16 * (0.004 + 512 * 0.00005) / 512, rel=0.2)
    roofline = recompute_cost_of(
        build_timing("roofline", "llama-3.1-8b", "H100", 1).timing, 16, 2048
    )
    assert roofline.slope > 0.0
    assert np.isfinite(roofline.base)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ((near(0.5),), "it needs room for 1"),
        ((near(9, policy="belady"),), "eviction policy"),
        ((near(9, params={"half": 2.0}),), "eviction policy"),
    ],
)
def test_tiers_that_cannot_be_had_are_refused(tiers: tuple[TierConfig, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulation(open_loop(), "1xboth", setup=setup(40, *tiers))


def test_tiers_without_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="model"):
        simulation(open_loop(), "1xboth", setup={"tiers": (near(9),)})


def test_all_but_the_last_tier_have_room_for_what_is_on_its_way_down() -> None:
    tiers = simulated_tiers((near(32), SLOW), 2**21, 64, RecomputeCost())
    assert tiers.tiers[0].cap_bytes == 30 * 2**21
    assert tiers.tiers[1].cap_bytes == 100 * 2**21
    assert tiers.copies == 32


def _cached(host: int, *quotas: str) -> float:
    """Return the cached share of a tenant's four prompts of ten blocks, beside a flood."""
    sessions = []
    for at in range(80):
        mine = RequestSpec(160, 1, (at % 4,), 0, 160.0, tenant="victim")
        junk = RequestSpec(160, 1, (at,), 1, 160.0, tenant="flood")
        sessions += [RequestSession(at * SECOND // 4 + i, (spec,)) for i, spec in
                     enumerate([mine, junk, replace(junk, hash_scope=2)])]  # fmt: skip
    given = setup(30, near(host), engine="pigou", kv_quotas=quotas)
    runs = run(OpenLoop(sessions), "1xboth", setup=given).runs
    mine = [one for one in runs if one.spec.tenant == "victim"]
    return sum(one.cached_tokens for one in mine) / sum(one.spec.prompt_tokens for one in mine)


def test_a_floor_keeps_a_tenants_prefixes_in_tiers_from_a_flood() -> None:
    flooded = _cached(60)
    assert _cached(60, "victim=0:1", "*=0:0.2") > flooded + 0.2
    assert _cached(60, "victim=0.8:1") > flooded + 0.2
    assert _cached(60, "victim=0.8:1") > _cached(4, "victim=0.8:1") + 0.2
