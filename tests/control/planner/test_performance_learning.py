"""A model that is learned while serving, and corrections kept apart by cause."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from benchmarks.control.planner.clairvoyant import fewest_workers
from pigou.games.latency import LatencyLaw
from pigou.objectives import ProvisioningTimes, Slo
from pigou.performance.learning import (
    Corrections,
    SpeedLearner,
    prior_model,
)
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import DecodeLaw, PrefillLine, RequestMix
from pigou.request import SECOND, Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState, WorkerWindow

TIMES = ProvisioningTimes(start_up_s=100, warm_up_s=30)
TRUTH = PerformanceModel(PrefillLine(0.02, 2e-4, 1e-9), DecodeLaw(LatencyLaw(0.0004, 0.012), 2e-8))
MIX = RequestMix(2000, 200)
ROLES = (Role.PREFILL, Role.DECODE)


def worker(
    rng: np.random.Generator, name: str, factor: float = 1.0, since_ns: int = -(10**12)
) -> WorkerWindow:
    prompts = int(rng.integers(2, 8))
    tokens = float(rng.uniform(500, 4000)) * prompts
    streams = float(rng.uniform(4, 60))
    mean = tokens / prompts
    return WorkerWindow(
        id=name,
        since_ns=since_ns,
        computed_prompts=prompts,
        computed_tokens=tokens,
        prefill_s=factor * prompts * TRUTH.prefill.seconds(mean, mean) * rng.uniform(0.95, 1.05),
        mean_running=streams,
        mean_held_tokens=streams * 2100,
        itl_s=factor * TRUTH.decode.itl_s(streams, 2100) * rng.uniform(0.97, 1.03),
    )


def window(now_s: float, *workers: WorkerWindow) -> PlannerWindow:
    pool = PoolWindow(name="p", role=Role.DECODE, workers=workers)
    return PlannerWindow(now_ns=int(now_s * SECOND), seconds=5.0, pools=(pool,))


def test_speeds_are_learned_from_windows() -> None:
    rng = np.random.default_rng(0)
    prefill, decode = (SpeedLearner(prior_model(role), TIMES) for role in ROLES)
    for step in range(40):
        seen = window(5.0 * step, worker(rng, "a"), worker(rng, "b"))
        prompts = msgspec.structs.replace(seen.pools[0], role=Role.PREFILL)
        prefill.observe(seen, prompts)
        streams = [
            msgspec.structs.replace(each, computed_prompts=0, prefill_s=0.0)
            for each in seen.pools[0].workers
        ]
        decode.observe(seen, msgspec.structs.replace(seen.pools[0], workers=tuple(streams)))
    for tokens in (800.0, 3000.0):
        assert prefill.model.prefill.seconds(tokens, tokens) == pytest.approx(
            TRUTH.prefill.seconds(tokens, tokens), rel=0.06
        )
    for count in (8.0, 48.0):
        assert decode.model.decode.itl_s(count, 2100) == pytest.approx(
            TRUTH.decode.itl_s(count, 2100), rel=0.05
        )


def mixed(rng: np.random.Generator, seconds: float) -> WorkerWindow:
    """A worker that does both: prompts take time from streams, and their steps decode."""
    prompts, tokens = int(rng.integers(1, 4)), float(rng.uniform(500, 2000))
    streams = float(rng.uniform(4, 60))
    itl_s = TRUTH.decode.itl_s(streams, 2100)
    prompt_s = prompts * TRUTH.prefill.seconds(tokens, tokens)
    return WorkerWindow(
        id="a", since_ns=-(10**12), computed_prompts=prompts, computed_tokens=prompts * tokens,
        prefill_s=prompt_s + prompts * itl_s, mean_running=streams,
        mean_held_tokens=2100 * streams, itl_s=itl_s / (1.0 - prompt_s / seconds),
    )  # fmt: skip


def test_what_prompts_and_streams_take_from_each_other_is_no_slowness() -> None:
    rng = np.random.default_rng(4)
    learner, corrections = SpeedLearner(prior_model(), TIMES), Corrections(TIMES)
    for step in range(80):
        pool = PoolWindow(name="b", role=Role.BOTH, workers=(mixed(rng, 5.0),))
        seen = PlannerWindow(now_ns=int(5.0 * step * SECOND), seconds=5.0, pools=(pool,))
        learner.observe(seen, pool)
        corrections.observe(seen, pool, TRUTH, RequestMix(1250, 1700), None, None)
    assert corrections.prefill_factor == pytest.approx(1.0, rel=0.02)
    assert corrections.decode_factor == pytest.approx(1.0, rel=0.02)
    assert learner.model.decode.itl_s(32.0, 2100) == pytest.approx(
        TRUTH.decode.itl_s(32.0, 2100), rel=0.05
    )
    assert learner.model.prefill.seconds(1500, 1500) == pytest.approx(
        TRUTH.prefill.seconds(1500, 1500), rel=0.1
    )


def test_an_overload_from_the_start_on_teaches_the_speed_of_prompts() -> None:
    """Full steps of 3.3 s, of which a window of 1 s sees one in three: 0.33 s a prompt."""
    learner = SpeedLearner(prior_model(Role.BOTH), ProvisioningTimes(start_up_s=3, warm_up_s=0))
    for step in range(90):
        ended = step % 3 == 2
        full = WorkerWindow(
            id="a", since_ns=-(10**12), computed_prompts=10 * ended, computed_tokens=2000.0 * ended,
            computed_pairs=2e5 * ended, prefill_s=3.3 * ended, itl_s=3.3 if ended else None,
            mean_running=min(10.0 + step, 70.0), mean_held_tokens=210.0 * min(10.0 + step, 70.0),
        )  # fmt: skip
        pool = PoolWindow(name="p", role=Role.BOTH, workers=(full,))
        seen = PlannerWindow(now_ns=step * SECOND, seconds=1.0, pools=(pool,))
        learner.observe(seen, pool)
    assert learner.is_ready(Role.BOTH)
    # Each sample is far from the prior, 0.025 s, and counts for little alone.
    assert 0.2 < learner.model.prefill.seconds(200, 200) < 0.35


def test_slow_first_passes_of_a_new_worker_change_nothing() -> None:
    """The anchor's V3 (dynamo 12430): five samples at three times the time when a worker joins."""
    slo = Slo(ttft_s=2.0, itl_s=0.04)
    wanted = []
    for joins in (False, True):
        rng = np.random.default_rng(1)
        learner = SpeedLearner(prior_model(), TIMES)
        corrections = Corrections(TIMES)
        for step in range(30):
            workers = [worker(rng, "a"), worker(rng, "b")]
            if joins and step >= 25:
                cold = np.random.default_rng(2)
                workers.append(worker(cold, "new", 3.0, since_ns=int(5.0 * 24 * SECOND)))
            seen = window(5.0 * step, *workers)
            learner.observe(seen, seen.pools[0])
            corrections.observe(seen, seen.pools[0], TRUTH, MIX, None, None)
        model = learner.model
        factors = (corrections.prefill_factor, corrections.decode_factor)
        counts = [fewest_workers(model, role, 40.0, MIX, slo, 0.95) for role in Role]
        wanted.append((counts, factors))
    assert wanted[0] == wanted[1]


def test_first_passes_are_slow_however_long_a_worker_waited_for_them() -> None:
    """A live worker was ready long before its first request, and compiled its kernels then."""
    learner = SpeedLearner(prior_model(), TIMES)
    rng = np.random.default_rng(4)
    for step in range(40):
        idle = step < 10
        one = (
            WorkerWindow(id="a", running=0)
            if idle
            else worker(rng, "a", 20.0 if step < 14 else 1.0)
        )
        seen = window(1000.0 + 5.0 * step, one)
        learner.observe(seen, seen.pools[0])
        if step == 15:
            assert learner.model.prefill == prior_model().prefill
    expected = TRUTH.prefill.seconds(2000, 2000)
    assert learner.model.prefill.seconds(2000, 2000) == pytest.approx(expected, rel=0.1)


def test_a_sample_that_is_far_from_the_fit_counts_for_less() -> None:
    rng = np.random.default_rng(3)
    learner = SpeedLearner(prior_model(), TIMES)
    for step in range(40):
        seen = window(5.0 * step, worker(rng, "a", 10.0 if step == 39 else 1.0))
        learner.observe(seen, seen.pools[0])
    expected = TRUTH.prefill.seconds(2000, 2000)
    assert learner.model.prefill.seconds(2000, 2000) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("value", [None, 0.0, math.nan, math.inf])
def test_a_hole_in_the_metrics_is_not_a_sample(value: float | None) -> None:
    learner = SpeedLearner(prior_model(), TIMES)
    corrections = Corrections(TIMES)
    empty = WorkerWindow(
        id="a", since_ns=-(10**12), computed_prompts=3, computed_tokens=value, prefill_s=value,
        mean_running=value, mean_held_tokens=value, itl_s=value,
    )  # fmt: skip
    seen = window(5.0, empty)
    for _ in range(20):
        learner.observe(seen, seen.pools[0])
        corrections.observe(seen, seen.pools[0], TRUTH, MIX, 1.0, value)
    assert learner.model.prefill is not None
    assert corrections.prefill_factor == corrections.decode_factor == 1.0


def observed(corrections: Corrections, speed: float, wait: float, steps: int = 400) -> None:
    """Show a settled pool of four workers that is slower, and waits longer, than the model says."""
    rps, mix = 7.5 / speed, MIX
    slower = TRUTH.corrected(speed, speed, 1.0)
    latency = slower.latency(Role.PREFILL, rps, 4, mix, 0.5)
    bare = slower.latency(Role.PREFILL, 0.0, 4, mix, 0.5).mean_ttft_s
    ttft = bare + wait * (latency.mean_ttft_s - bare)
    for step in range(steps):
        workers = tuple(
            WorkerWindow(
                id=name, since_ns=-(10**12), computed_prompts=5, computed_tokens=10_000.0,
                prefill_s=speed * 5 * TRUTH.prefill.seconds(2000, 2000),
            )
            for name in "abcd"
        )  # fmt: skip
        pool = PoolWindow(name="p", role=Role.PREFILL, workers=workers)
        seen = PlannerWindow(now_ns=int(5.0 * step * SECOND), seconds=5.0, pools=(pool,))
        corrections.observe(seen, pool, TRUTH, mix, rps, ttft)


@pytest.mark.parametrize(("speed", "wait"), [(1.0, 1.0), (1.3, 1.0), (1.0, 2.0), (1.2, 0.5)])
def test_each_cause_is_corrected_by_its_own_factor(speed: float, wait: float) -> None:
    corrections = Corrections(TIMES)
    observed(corrections, speed, wait)
    assert corrections.prefill_factor == pytest.approx(speed, rel=0.02)
    assert corrections.wait_factor == pytest.approx(wait, rel=0.1)


def test_what_ttft_takes_without_a_queue_is_overhead() -> None:
    corrections = Corrections(TIMES)
    bare = TRUTH.latency(Role.PREFILL, 0.5, 4, MIX, 0.5).mean_ttft_s
    workers = tuple(WorkerWindow(id=name, since_ns=-(10**12)) for name in "abcd")
    pool = PoolWindow(name="p", role=Role.PREFILL, workers=workers)
    for step in range(400):
        seen = PlannerWindow(now_ns=int(5.0 * step * SECOND), seconds=5.0, pools=(pool,))
        corrections.observe(seen, pool, TRUTH, MIX, 0.5, bare + 0.08)
    assert corrections.overhead_s == pytest.approx(0.08, rel=0.02)
    assert corrections.wait_factor == 1.0


def test_a_decode_worker_that_computes_prompts_itself_is_not_slow() -> None:
    """Its KV was not held for as long as its streams waited, and its steps compute it again."""
    rng = np.random.default_rng(0)
    factors = {}
    for own_s in (0.1, 4.0):
        corrections = Corrections(TIMES)
        for step in range(100):
            slow = msgspec.structs.replace(
                worker(rng, "a", 2.0), prefill_s=own_s, computed_prompts=0
            )
            seen = window(5.0 * step, slow)
            corrections.observe(seen, seen.pools[0], TRUTH, MIX, 1.0, 1.0)
        factors[own_s] = corrections.decode_factor
    assert factors[0.1] > 1.5
    assert factors[4.0] == 1.0


def test_queueing_adds_prefill_workers() -> None:
    """Dynamo's min(1, c_p) never does."""
    slower = TRUTH.corrected(1.0, 1.0, 2.0)
    slo = Slo(ttft_s=1.5)
    with_waits = fewest_workers(slower, Role.PREFILL, 20.0, MIX, slo, 0.95)
    without = fewest_workers(TRUTH, Role.PREFILL, 20.0, MIX, slo, 0.95)
    assert with_waits is not None
    assert without is not None
    assert with_waits > without


def test_a_factor_moves_no_faster_than_the_lag_allows() -> None:
    times = ProvisioningTimes(start_up_s=500, warm_up_s=0)
    corrections = Corrections(times, gain_per_s=1.0)
    observed(corrections, 1.5, 1.0, steps=1)
    bound = 0.25 * math.pi / 500 * 5.0
    assert 0 < math.log(corrections.prefill_factor) <= bound * math.log(1.5) + 1e-12


def test_a_pool_that_changes_says_nothing_of_waits() -> None:
    corrections = Corrections(TIMES)
    pool = PoolWindow(
        name="p",
        role=Role.PREFILL,
        workers=(
            WorkerWindow(id="a", since_ns=-(10**12)),
            WorkerWindow(id="b", state=WorkerState.STARTING),
        ),
    )
    for step in range(100):
        seen = PlannerWindow(now_ns=int(5.0 * step * SECOND), seconds=5.0, pools=(pool,))
        corrections.observe(seen, pool, TRUTH, MIX, 1.0, 30.0)
    assert corrections.wait_factor == 1.0


@pytest.mark.parametrize("beside", [False, True], ids=["own prompts", "prompts beside"])
def test_speeds_are_known_where_decode_workers_compute_prompts_themselves(beside: bool) -> None:
    """The router sends prompts where they cost least, and each of them is a sample."""
    rng, step_s = np.random.default_rng(5), TRUTH.decode.itl_s(8.0, 500)
    role = Role.PREFILL if beside else Role.DECODE
    learner = SpeedLearner(prior_model(role), ProvisioningTimes(start_up_s=3, warm_up_s=10))
    for step in range(12):
        tokens = float(rng.uniform(500, 3000))
        prompts_s = 7 * TRUTH.prefill.seconds(tokens, tokens)
        busy = WorkerWindow(
            id="d", since_ns=-(10**12), computed_prompts=7, computed_tokens=7 * tokens,
            prefill_s=prompts_s + 7 * step_s, mean_running=8.0, mean_held_tokens=4000.0,
            itl_s=step_s / (1.0 - prompts_s / 5.0),
        )  # fmt: skip
        decode = PoolWindow(name="d", role=Role.DECODE, workers=(busy,))
        idle = WorkerWindow(id="p", since_ns=-(10**12), computed_prompts=0, computed_tokens=0.0)
        prefill = PoolWindow(name="p", role=Role.PREFILL, workers=(idle,))
        seen = PlannerWindow(
            now_ns=int(5.0 * step * SECOND), seconds=5.0, pools=(prefill, decode)
        )  # fmt: skip
        if beside:
            learner.observe(seen, prefill, [decode])
        else:
            learner.observe(seen, decode)
    assert learner.is_ready(Role.PREFILL)
    assert learner.model.prefill.seconds(1500, 1500) == pytest.approx(
        TRUTH.prefill.seconds(1500, 1500), rel=0.15
    )
    if not beside:
        assert learner.is_ready(Role.DECODE)
        assert learner.model.decode.itl_s(8.0, 500) == pytest.approx(step_s, rel=0.15)
