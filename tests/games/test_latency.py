"""Laws of the latency law, and of its fits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.games.latency import LatencyLaw, OnlineFit

LAWS = [
    LatencyLaw(0.0005, 0.02),
    LatencyLaw(0.002, 0.02, 0.5, 70, 1),
    LatencyLaw(0.0, 0.05, 0.3, 45, 0.5),
    LatencyLaw(0.0005, 0.02, 3.0, 64, 2),
]
laws = st.builds(
    LatencyLaw,
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 10),
    st.floats(0.5, 100),
    st.floats(0.2, 4),
    st.floats(0.1, 4),
)


def test_the_law_is_the_papers_equation_below_the_pole() -> None:
    law = LatencyLaw(0.005, 0.02, 0.01, 64, 2)
    for n in (0, 1, 32, 63):
        assert law(n) == pytest.approx(0.005 * n + 0.02 + 0.01 / (64 - n) ** 2)
    assert law(np.array([1.0, 2.0])).shape == (2,)
    assert isinstance(law(3.0), float)


@given(laws, st.floats(0, 200))
def test_the_law_is_finite_rising_and_convex_past_its_pole(law: LatencyLaw, n: float) -> None:
    low, middle, high = law(n), law(n + 1), law(n + 2)
    assert math.isfinite(high)
    assert low <= middle + 1e-12 <= high + 2e-12
    assert high - middle >= middle - low - 1e-9 * max(1.0, high)
    marginal, following = middle + law.toll(n), high + law.toll(n + 1)
    assert following >= marginal - 1e-9 * max(1.0, high) * (n + 2)


@given(laws, st.integers(0, 200))
def test_a_newcomers_marginal_cost_is_its_own_and_the_toll(law: LatencyLaw, n: int) -> None:
    social = (n + 1) * law(n + 1) - n * law(n)
    assert law(n + 1) + law.toll(n) == pytest.approx(social, rel=1e-9, abs=1e-9)
    assert law.toll(0) == 0


def test_an_overloaded_workers_toll_does_not_fall_past_the_pole() -> None:
    law = LatencyLaw(0.001, 0.02, 0.5, 40, 1)
    tolls = [law.toll(n) for n in range(80)]
    assert tolls == sorted(tolls)


@pytest.mark.parametrize(
    ("field", "value"), [("a", -1), ("b", math.nan), ("d", math.inf), ("n_sat", 0), ("beta", 0)]
)
def test_a_law_names_the_parameter_that_is_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is"):
        LatencyLaw(**{"a": 0.1, "b": 0.1, field: value})


def observed(
    law: LatencyLaw, seed: int, noise: float, outliers: float, count: int = 1000
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    top = 60 if math.isinf(law.n_sat) else round(0.95 * law.n_sat)
    n = rng.integers(1, top + 1, count).astype(float)
    seconds = law(n) * np.exp(rng.normal(-0.5 * noise**2, noise, count))
    bad = rng.random(count) < outliers
    seconds[bad] *= rng.uniform(3, 30, bad.sum())
    return n, seconds


def error(fitted: LatencyLaw, law: LatencyLaw, n: np.ndarray) -> float:
    loads = np.arange(1.0, n.max() + 1)
    return float(np.mean(np.abs(fitted(loads) / law(loads) - 1)))


def test_a_straight_line_gets_no_pole() -> None:
    online = OnlineFit(64)
    for load, each in zip(*observed(LAWS[0], 4, 0.1, 0.0), strict=True):
        online.observe(load, each)
    assert online.law().d == 0


def test_one_load_alone_gives_its_seconds() -> None:
    online = OnlineFit(64)
    for seconds in (1.0, 1.1, 0.9, 1.0, 50.0):
        online.observe(4.0, seconds)
    assert online.law()(4.0) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("outliers", [0.0, 0.15])
def test_the_online_fit_agrees_with_the_law(law: LatencyLaw, outliers: float) -> None:
    n, seconds = observed(law, 6, 0.1, outliers)
    online = OnlineFit(64)
    for load, each in zip(n, seconds, strict=True):
        online.observe(load, each)
    assert error(online.law(), law, n) < 0.06


def test_an_observation_of_half_the_weight_counts_for_half_of_one() -> None:
    law, (n, seconds) = LAWS[0], observed(LAWS[0], 9, 0.05, 0.0)
    whole, halves, wrong = OnlineFit(64), OnlineFit(64), OnlineFit(64)
    for load, each in zip(n, seconds, strict=True):
        whole.observe(load, each)
        halves.observe(load, each, 0.5)
        halves.observe(load, each, 0.5)
        wrong.observe(load, each)
        wrong.observe(load, 4 * each, 1e-4)
    assert halves.weight == pytest.approx(whole.weight, rel=0.1)
    for online in (halves, wrong):
        assert error(online.law(), law, n) < 0.03


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_the_online_fit_follows_a_lasting_change(factor: float) -> None:
    law = LAWS[0]
    changed = LatencyLaw(law.a * factor, law.b * factor)
    online = OnlineFit(64, half_life=128)
    for each, seed in ((law, 7), (changed, 8)):
        for load, took in zip(*observed(each, seed, 0.1, 0.0, count=1000), strict=True):
            online.observe(load, took)
    assert error(online.law(), changed, np.array([60.0])) < 0.05


def test_the_online_fit_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ValueError, match="no observations"):
        OnlineFit(64).law()
    with pytest.raises(ValueError, match="n_max"):
        OnlineFit(0)
    with pytest.raises(ValueError, match="half_life"):
        OnlineFit(64, 0)
    with pytest.raises(ValueError, match="seconds > 0"):
        OnlineFit(64).observe(1, 0)
    for weight in (0.0, 1.5):
        with pytest.raises(ValueError, match="weight"):
            OnlineFit(64).observe(1, 1, weight)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(1e-4, 1e3)), min_size=1, max_size=40))
@settings(max_examples=examples(40))
def test_any_latencies_fit_to_a_law(data: list[tuple[int, float]]) -> None:
    online = OnlineFit(max(load for load, _ in data) + 1)
    for load, each in data:
        online.observe(load, each)
    law = online.law()
    assert np.isfinite([law(k) for k in range(120)]).all()


def test_what_requests_hold_is_told_from_what_they_are() -> None:
    rng, online = np.random.default_rng(7), OnlineFit(64, doubling=20_000.0)
    law = LatencyLaw(2e-5, 0.005)
    for _ in range(300):
        n = float(rng.integers(1, 60))
        held = n * rng.uniform(100.0, 8000.0)
        online.observe(n, (law(n) + 3e-8 * held) * rng.normal(1.0, 0.02), held=held)
    assert online.held_s == pytest.approx(3e-8, rel=0.1)
    assert online.law()(30.0) == pytest.approx(law(30.0), rel=0.1)


@given(st.integers(0, 1000), st.floats(0.0, 1e-3), st.floats(1e-3, 0.1))
def test_where_requests_hold_alike_they_are_charged_and_not_what_they_hold(
    seed: int, a: float, b: float
) -> None:
    """Both say the same of those that were seen: the law is that of one who knows of no holding."""
    rng = np.random.default_rng(seed)
    plain, online = OnlineFit(64), OnlineFit(64, doubling=20_000.0)
    for n in rng.integers(1, 60, 80).astype(float):
        seconds = (a * n + b) * rng.normal(1.0, 0.01)
        plain.observe(n, seconds)
        online.observe(n, seconds, held=500.0 * n)
    for n in (5.0, 50.0):
        assert online.law()(n) + online.held_s * 500.0 * n == pytest.approx(
            plain.law()(n), rel=0.02
        )


def test_what_is_held_has_to_be_a_number_and_announced() -> None:
    with pytest.raises(ValueError, match="held is not 0: give `doubling`"):
        OnlineFit(64).observe(1, 1, held=1)
    for held in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"held={held}: give a finite number, 0 or more"):
            OnlineFit(64, doubling=1.0).observe(1, 1, held=held)
    with pytest.raises(ValueError, match="doubling is -1"):
        OnlineFit(64, doubling=-1)
    assert OnlineFit(64, doubling=1.0).held_s == 0.0


def test_sums_that_tell_nothing_apart_end_in_a_law_all_the_same() -> None:
    """One request for days, that holds more and more."""
    for doubling in (0.0, 20_000.0):
        online = OnlineFit(256.0, doubling=doubling)
        for part in range(40):
            held = 25.0 * np.arange(1000.0 * part, 1000.0 * (part + 1)) * (doubling > 0.0)
            ones = np.ones(1000)
            online.observe_all(ones, 0.02 * ones, ones, held)
            at = online.law()(1.0) + online.held_s * float(held[-1])
            assert at == pytest.approx(0.02, rel=0.05)
