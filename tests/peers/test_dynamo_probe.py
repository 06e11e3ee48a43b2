"""The probe and the wrapper of Dynamo's router, over a router whose truth is known."""

from __future__ import annotations

import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from tests.peers.dynamo_fakes import PAPER, TEMPERATURE, WEIGHT, FakeRouter, ScriptedSteering

from pigou.config import ConfigError
from pigou.control.saturation.regime import Regime
from pigou.request import SECOND
from pigou_lab.dynamo_host import binding
from pigou_lab.dynamo_host.probe import Honoured, probe
from pigou_lab.dynamo_host.router import AdaptiveRouter, OverridesIgnored
from pigou_lab.dynamo_host.steering import Steering

PROMPT = list(range(300, 332))


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("honours", [True, False])
async def test_the_probe_tells_what_is_true(
    honours: bool, temperature: float, workers: int
) -> None:
    for seed in range(5):
        router = FakeRouter(workers, honours=honours, temperature=temperature, seed=seed)
        found = await probe(router, "m", block_size=16)
        assert found.temperature.verdict is (Honoured.YES if honours else Honoured.NO), found
        assert found.workers == workers
        if temperature == 0:
            assert found.weight.verdict is (Honoured.YES if honours else Honoured.NO)
        assert sum(found.temperature.control.values()) == 100


async def test_one_worker_or_no_cache_tells_nothing() -> None:
    for router in (FakeRouter(1), FakeRouter(4, cached=False)):
        found = await probe(router, "m", block_size=16, patience_s=0.1)
        assert found.temperature.verdict is Honoured.UNKNOWN
        assert not found.honoured
        assert found.temperature.why


async def test_a_router_that_ignores_overrides_is_refused_with_the_evidence() -> None:
    router = FakeRouter(honours=False)
    with pytest.raises(OverridesIgnored, match=r"ignored.*100 with no override.*two or more"):
        await AdaptiveRouter.start(router, ScriptedSteering(), "m", block_size=16)


async def test_a_router_that_pretends_says_that_nothing_changes() -> None:
    router, control = FakeRouter(honours=False), ScriptedSteering(Regime.TRANSITION)
    wrapped = await AdaptiveRouter.start(router, control, "m", block_size=16, pretend=True)
    router.overrides.clear()
    await wrapped.best_worker(PROMPT)
    assert router.overrides == [None]
    told = wrapped.status()
    assert told["per_request"] is False
    assert told["wanted"]["temperature"] == 0.7
    assert told["in_force"]["temperature"] == 0.0
    assert b"pigou_game_router_temperature 0.0" in wrapped.meters.exposition()


async def test_every_call_carries_the_parameters_of_the_regime() -> None:
    router, control = FakeRouter(), ScriptedSteering()
    wrapped = await AdaptiveRouter.start(router, control, "m", block_size=16)
    for regime in Regime:
        control.to(regime)
        router.overrides.clear()
        await wrapped.best_worker(PROMPT, request_id="a")
        async for _ in await wrapped.generate(PROMPT, "m"):
            pass
        async for _ in await wrapped.generate_from_request({"token_ids": PROMPT}):
            pass
        row = PAPER.setting(regime)
        wanted = {TEMPERATURE: row.temperature, WEIGHT: row.overlap_weight}
        assert router.overrides == [wanted] * 3
        level = f"pigou_game_saturation_state {float(regime.level)}".encode()
        assert level in wrapped.meters.exposition()
    assert control.heard == ["arrived", "first", "ended"] * 6


async def test_a_callers_own_override_goes_first() -> None:
    router = FakeRouter()
    wrapped = await AdaptiveRouter.start(router, ScriptedSteering(), "m", block_size=16)
    router.overrides.clear()
    await wrapped.best_worker(PROMPT, {TEMPERATURE: 2.5})
    await wrapped.best_worker(PROMPT, {"overlap_score_weight": 3.0})
    assert router.overrides == [
        {TEMPERATURE: 2.5, WEIGHT: 1.0},
        {TEMPERATURE: 0.0, "overlap_score_weight": 3.0},
    ]


async def test_what_the_wrapper_does_not_know_is_dynamos() -> None:
    router = FakeRouter()
    wrapped = await AdaptiveRouter.start(router, ScriptedSteering(), "m", block_size=16)
    await wrapped.free("r1")
    assert router.freed == ["r1"]


async def test_a_stream_that_is_left_early_no_longer_waits() -> None:
    router, control = FakeRouter(), ScriptedSteering()
    wrapped = await AdaptiveRouter.start(router, control, "m", block_size=16)
    stream = await wrapped.generate(PROMPT, "m")
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert control.heard == ["arrived", "left"]


CALLS = st.lists(
    st.tuples(st.sampled_from(["arrive", "first", "end"]), st.integers(0, 5)), max_size=80
)


@settings(max_examples=examples(100))
@given(CALLS)
def test_who_waits_is_counted_whatever_is_told_twice(calls: list[tuple[str, int]]) -> None:
    steering, trips, wait = Steering.paper(), [], set()
    for now, (call, which) in enumerate(calls):
        if call == "arrive":
            wait.add(len(trips))
            trips.append(steering.arrive(now))
        elif which < len(trips):
            wait.discard(which)
            if call == "first":
                trips[which].first_token(now)
            else:
                trips[which].end(now)
        assert steering.waiting == len(wait)
        assert steering.parameters(now).temperature == PAPER.below.temperature


def test_slow_first_tokens_bring_the_next_regime_and_rest_brings_it_back() -> None:
    steering, now = Steering.paper(), 0
    seen = []
    for ttft in [0.05] * 50 + [1.0] * 60 + [5.0] * 30 + [0.05] * 300:
        trip = steering.arrive(now)
        trip.first_token(now + int(ttft * SECOND))
        trip.end(now + int(ttft * SECOND))
        now += max(SECOND // 2, int(ttft * SECOND))
        seen.append(steering.regime)
    order = [regime for regime, _ in groupby(seen)]
    assert order == [Regime.BELOW, Regime.TRANSITION, Regime.SATURATED, Regime.TRANSITION,
                     Regime.BELOW]  # fmt: skip


def test_controllers_and_detectors_are_found_by_name() -> None:
    found = Steering.of({"controller": "bandit"}, {"detector": "cusum"})
    assert found.parameters(0).temperature in (0.0, 0.3, 0.7)
    with pytest.raises(ConfigError, match="guess"):
        Steering.of({"controller": "guess"}, {"detector": "paper"})


def test_without_dynamo_the_package_is_named() -> None:
    with pytest.raises(binding.DynamoMissing, match="ai-dynamo-runtime"):
        binding.load("dynamo_that_is_not_there")


def test_importing_the_integration_loads_nothing_heavy() -> None:
    source = Path(__file__).parents[2] / "src"
    code = (
        "import sys; import pigou_lab.dynamo_host.__main__; "
        "print([m for m in ('torch', 'numba', 'scipy', 'xxhash', 'dynamo', 'tokenizers') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
