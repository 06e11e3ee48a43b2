"""What the control plane learns is what the workers are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fleet import Ideal, ModelFleet, poisson
from tests.lib.examples import examples

from pigou.config import ControlConfig
from pigou.control.latency_model.affine_fit import AffineFit
from pigou.control.latency_model.estimates import Estimates, pairs
from pigou.control.latency_model.model import LatencyModel
from pigou.control.latency_model.worker_factors import WorkerFactors
from pigou.control.messages import Choice
from pigou.control.plane import ControlPlane
from pigou.games.latency import LatencyLaw
from pigou.request import SECOND, Request, Role, Worker

LAW = LatencyLaw(0.0008, 0.02)


def itl_s(known: Estimates, row: int, streams: float) -> float:
    """Return the ITL of a worker at a number of streams."""
    return known.itl(np.array([row]), np.array([streams])).item()


def run(policy: str, fleet: dict[Role, list[Ideal]], rate: float, seconds: float) -> ModelFleet:
    model = ModelFleet(ControlPlane(ControlConfig(policy=policy)), fleet)
    model.run(poisson(rate, seconds, 1, (200, 800), (50, 150)))
    return model


def test_speeds_of_a_disaggregated_fleet_are_learned() -> None:
    fast, slow = Ideal(LAW, 2e-4, 0.003), Ideal(LatencyLaw(0.001, 0.03), 3e-4)
    model = run("least-loaded", {Role.PREFILL: [fast], Role.DECODE: [Ideal(LAW), slow]}, 5, 60)
    found = model.plane.tracker.estimates(model.now)
    assert found.prefill_token[0] == pytest.approx(2e-4, rel=0.05)
    assert found.prefill_base[0] == pytest.approx(0.003, rel=0.3)
    for row, worker in ((1, LAW), (2, slow.law)):
        seen = float(model.plane.tracker.state.columns.served[row]) / 60 * 100 * worker(5.0)
        assert itl_s(found, row, seen) == pytest.approx(worker(seen), rel=0.1)


def test_the_expected_output_follows_what_requests_generate() -> None:
    model = run("least-loaded", {Role.BOTH: [Ideal(LAW)]}, 4, 40)
    estimator = model.plane.tracker.latency_model
    assert estimator.outputs.expected(10_000) == pytest.approx(100, rel=0.1)
    assert estimator.outputs.expected(10) == 10


def test_a_worker_of_which_nothing_was_seen_is_taken_for_one_like_the_others() -> None:
    estimator = LatencyModel()
    for _ in range(3):
        estimator.add_worker()
    for i in range(60):
        for row in (0, 2):
            at = (10 * i + 1) * SECOND
            size = (100, 200, 400)[i % 3]
            estimator.prompt_computed(row, size, at, at + int((0.5 + 0.01 * size) * SECOND))
    found = estimator.estimates(600 * SECOND)
    assert found.prefill_base == pytest.approx([0.5] * 3, rel=0.02)
    assert found.prefill_token == pytest.approx([0.01] * 3, rel=0.02)


def test_a_slow_worker_shows_and_chance_does_not() -> None:
    factors, rng = WorkerFactors(), np.random.default_rng(0)
    for _ in range(3):
        factors.add_worker()
    for i in range(60):
        for row, slow in enumerate((1.0, 1.0, 1.6)):
            factors.observe(row, slow * float(rng.lognormal(0, 0.2)), i * SECOND)
    common, own = factors.factors(60 * SECOND)
    assert common * own[2] == pytest.approx(1.6, rel=0.1)
    assert own[0] == pytest.approx(own[1], rel=0.12)
    alike = WorkerFactors()
    alike.add_worker()
    alike.add_worker()
    for i in range(30):
        for row in (0, 1):
            alike.observe(row, float(rng.lognormal(0, 0.2)), i * SECOND)
    assert alike.factors(30 * SECOND)[1] == pytest.approx([1, 1], abs=0.1)


def test_a_worker_that_was_slow_once_is_tried_again() -> None:
    factors = WorkerFactors()
    factors.add_worker()
    factors.add_worker()
    factors.observe(1, 100.0, 0)
    for i in range(40):
        factors.observe(0, 1.0, i * SECOND)
    assert factors.factors(40 * SECOND)[1][1] < 1.7
    assert factors.factors(600 * SECOND)[1][1] == pytest.approx(1.0, abs=0.01)


@given(st.floats(0, 5), st.floats(0, 2), st.lists(st.floats(1, 1000), min_size=3, max_size=40))
@settings(max_examples=examples(80))
def test_an_affine_law_is_recovered_and_never_negative(
    base: float, slope: float, sizes: list[float]
) -> None:
    fit = AffineFit()
    for size in sizes:
        if base + slope * size > 0:
            fit.observe(size, base + slope * size)
    found_base, found_slope = fit.law
    assert found_base >= 0
    assert found_slope >= 0
    if max(sizes) > 2 * min(sizes) and base + slope > 1e-3:
        middle = float(np.median(sizes))
        want = base + slope * middle
        assert fit(middle) == pytest.approx(want, rel=0.05, abs=1e-3)


def test_an_outlier_hardly_moves_an_affine_law() -> None:
    fit = AffineFit()
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = float(rng.uniform(10, 100))
        fit.observe(size, (1 + 0.1 * size) * float(rng.uniform(0.95, 1.05)))
    fit.observe(50.0, 500.0)
    assert fit(50.0) == pytest.approx(6.0, rel=0.1)


def test_a_first_outlier_does_not_starve_its_worker() -> None:
    """The fleet learns what a prompt takes, and sends the slow starter its share again."""
    model = ModelFleet(
        ControlPlane(ControlConfig(policy="toll")), {Role.BOTH: [Ideal(LAW), Ideal(LAW)]}
    )
    model.workers["both-1"].stall = 5 * SECOND
    model.run(poisson(8, 60, 1, (200, 800), (50, 150)))
    served = model.plane.state.columns.served
    assert served.min() > 0.35 * served.sum()


def test_a_prompt_takes_what_its_tokens_and_their_attention_take() -> None:
    """Pairs of tokens count where prompts are long enough, and are not seen where they are not."""
    rng, fit = np.random.default_rng(4), AffineFit()
    for _ in range(200):
        size = float(rng.uniform(1e3, 2e5))
        both = size * size * float(rng.uniform(0.5, 3.0))
        took = 0.01 + 2e-5 * size + 4e-10 * both
        fit.observe(size, took * float(rng.uniform(0.95, 1.05)), both)
    assert fit.pair == pytest.approx(4e-10, rel=0.1)
    assert fit.law[1] == pytest.approx(2e-5, rel=0.2)
    assert fit.ratio == pytest.approx(2e-5, rel=0.3)
    short = AffineFit()
    for _ in range(200):
        size = float(rng.uniform(50, 400))
        took = 0.01 + 2e-4 * size
        short.observe(size, took * float(rng.uniform(0.9, 1.1)), size * size / 2)
    assert short.pair == 0.0
    assert short.law == pytest.approx((0.01, 2e-4), rel=0.2)


def test_prompts_that_are_all_alike_are_taken_to_cost_by_the_token() -> None:
    fit = AffineFit()
    for _ in range(20):
        fit.observe(128.0, 0.064, 128.0 * 64)
    assert fit.law == pytest.approx((0.0, 0.0005))
    assert fit(1280.0) == pytest.approx(0.64)


def test_the_work_of_a_queue_is_that_of_its_prompts() -> None:
    known = Estimates.prior(2)
    known.prefill_pair[:] = 1e-9
    rows, tokens = np.array([0, 1]), np.array([3e4, 1e4])
    each = known.service(rows, tokens, np.array([5e4, 1e4]))
    both = pairs(tokens, np.array([5e4, 1e4]))
    work = known.work(np.array([1, 1]), tokens.astype(np.int64), both.astype(np.int64))
    assert work == pytest.approx(each)
    assert each[0] == pytest.approx(0.005 + 3.0 + 1e-9 * 3e4 * (2e4 + 1.5e4))


@given(st.integers(0, 20), st.floats(0, 1), st.floats(1e-4, 1), st.floats(0, 1))
def test_the_vector_of_laws_is_each_law(n: int, a: float, b: float, d: float) -> None:
    law = LatencyLaw(a, b, d, 12.0, 2.0)
    value = Estimates.prior(2, law).itl(np.array([1]), np.array([float(n)]))
    assert value[0] == pytest.approx(law(float(n)))


@pytest.mark.parametrize(
    ("sent_s", "computed_s", "learned"),
    [(0.0, 9.0, False), (1.5, 9.0, False), (1.5, 2.5, False), (0.0, 0.5, True), (8.0, 9.0, True)],
)
def test_a_transfer_that_may_have_waited_for_a_prompt_teaches_nothing(
    sent_s: float, computed_s: float, learned: bool
) -> None:
    """The prompt is on the decode worker meanwhile, or only before or after the transfer."""
    tracker = ControlPlane(ControlConfig()).tracker
    for worker in (Worker("p", "u", Role.PREFILL), Worker("d", "u", Role.DECODE)):
        tracker.up(worker, 0)
    events: list[tuple[float, Callable[[int], object]]] = [
        (0.1, lambda now: tracker.routed(Request("remote", 1000, 9), Choice("d", "p"), now)),
        (1.0, lambda now: tracker.prefill_done("remote", True, now)),
        (3.0, lambda now: tracker.first_token("remote", now)),
        (sent_s, lambda now: tracker.routed(Request("local", 4000, 9), Choice("d"), now)),
        (computed_s, lambda now: tracker.first_token("local", now)),
    ]
    for at_s, event in sorted(events, key=lambda one: one[0]):
        event(SECOND + int(at_s * SECOND))
    tracker.latency_model.sample(20 * SECOND)
    transfer_s = tracker.estimates(20 * SECOND).transfer(np.array([1]), np.array([1000.0])).item()
    assert (transfer_s > 1.0) == learned


def test_short_transfers_are_no_price_of_the_tokens_of_long_ones() -> None:
    """Some of about 20 tokens and 30 ms, then one of 2,000 tokens and 40 ms."""
    model = LatencyModel()
    model.add_worker()
    for second, (tokens, milliseconds) in enumerate(((20, 30), (23, 34), (16, 27), (2000, 40)), 1):
        began = second * SECOND
        model.transferred(0, tokens, began, began + milliseconds * SECOND // 1000)
        known = model.estimates(began + SECOND)
        assert 0.02 < known.transfer(np.array([0]), np.array([2000.0])).item() < 0.1
