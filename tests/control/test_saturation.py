"""The detectors: what the paper's equations say, and what a change of load does to each."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ConfigError
from pigou.control.saturation.cusum_detector import CusumConfig, CusumDetector
from pigou.control.saturation.regime import Detector, Regime, TTFTSample
from pigou.control.saturation.regime import load as load_detector
from pigou.request import SECOND
from pigou_lab.detectors import (
    PRESETS,
    ConfigVariance,
    ConfigVarianceConfig,
    Latches,
    PaperConfig,
    PaperDetector,
    SecondDifference,
    SecondDifferenceConfig,
)

POLL = 5 * SECOND
NAMES = {
    "paper": {},
    "cusum": {},
    "second-difference": {"theta1": 0.1, "theta2": 1.0},
    "config-variance": {"theta1": 0.1, "theta2": 1.0},
}


def polls(found: Detector, values: list[float], start: int = 0) -> list[Regime]:
    """Give one first token in the middle of each poll; return the regimes after each window."""
    out = []
    for i, ttft in enumerate(values):
        found.update(start + i * POLL + POLL // 2, TTFTSample(ttft))
        out.append(found.tick(start + (i + 1) * POLL, 1))
    return out


def paper(**values: float) -> PaperDetector:
    one = PaperDetector(PaperConfig(theta1=1.0, theta2=4.0, margin=0.2, **values))
    one.tick(0, 1)  # the first window begins at 0
    return one


def test_the_smoothed_p99_is_equation_10() -> None:
    one = paper()
    polls(one, [1.0, 2.0, 0.5])
    assert one.signal == pytest.approx(0.3 * 0.5 + 0.7 * (0.3 * 2.0 + 0.7 * 1.0))


def test_a_threshold_is_crossed_after_k_polls_and_not_before() -> None:
    assert polls(paper(consecutive=3), [1.5] * 4)[1:] == [
        Regime.BELOW, Regime.TRANSITION, Regime.TRANSITION
    ]  # fmt: skip


def test_a_poll_below_the_threshold_begins_the_count_anew() -> None:
    one = paper(consecutive=3, alpha=1.0)
    assert set(polls(one, [1.5, 1.5, 0.5, 1.5, 1.5])) == {Regime.BELOW}


def test_the_way_back_asks_for_the_margin() -> None:
    one = paper(consecutive=2, alpha=1.0)
    levels = polls(one, [1.5, 1.5, 0.9, 0.9, 0.9, 0.7, 0.7])
    assert levels[1:] == [Regime.TRANSITION] * 5 + [Regime.BELOW]


def test_far_above_both_thresholds_it_goes_to_saturated_at_once() -> None:
    assert polls(paper(consecutive=3), [9.0] * 3)[-1] is Regime.SATURATED


def test_a_poll_without_first_tokens_changes_nothing() -> None:
    one = paper(consecutive=1, alpha=1.0)
    polls(one, [1.5])
    assert one.tick(10 * POLL, waiting=3) is Regime.TRANSITION
    assert one.signal == 1.5


@pytest.mark.parametrize("name", NAMES)
def test_an_idle_fleet_is_below(name: str) -> None:
    one = load_detector({"detector": name, **NAMES[name]})
    rng = np.random.default_rng(0)
    now = 0
    for i in range(400):
        now = i * SECOND // 4
        crowd = 1 if i < 100 else i - 99
        setting = int(rng.integers(2))
        one.update(
            now, TTFTSample(0.1 * crowd**1.5 * (1 + 3 * setting), 100, crowd, crowd - 1, setting)
        )
    busy = one.tick(now + SECOND, 1)
    assert one.tick(now + 20 * SECOND, 0) is busy
    assert one.tick(now + 200 * SECOND, 5) is busy, "somebody waits"
    assert one.tick(now + 260 * SECOND, 0) is Regime.BELOW
    assert math.isnan(one.signal)


def test_the_presets_are_the_papers() -> None:
    found = {name: (each.theta1, each.theta2) for name, each in PRESETS.items()}
    assert found == {"llama-3.1-70b": (0.3, 2.0), "nemotron-4-340b": (1.0, 10.0)}


def test_the_advised_threshold_is_a_multiple_of_the_p99_at_rest() -> None:
    assert PaperConfig.of_baseline(0.05).theta1 == pytest.approx(0.2)


@given(
    st.lists(st.floats(0, 10), max_size=60),
    st.integers(1, 4),
    st.floats(0.1, 5),
    st.floats(0, 1),
)
def test_saturated_is_never_left_for_below_while_above_the_first_threshold(
    signals: list[float], consecutive: int, low: float, share: float
) -> None:
    latches = Latches(low, 2 * low, consecutive, share * 0.9 * low)
    for i, signal in enumerate(signals):
        before = latches.regime
        after = latches.update(signal)
        if before is Regime.SATURATED and signal >= low:
            assert after is not Regime.BELOW
        run = signals[max(0, i + 1 - consecutive) : i + 1]
        if len(run) == consecutive and min(run) >= 2 * low:
            assert after is Regime.SATURATED


def test_the_second_difference_of_a_parabola_is_twice_its_coefficient() -> None:
    one = SecondDifference(SecondDifferenceConfig(theta1=0.5, theta2=50.0))
    one.tick(0, 1)
    for i, load in enumerate([1, 7, 3, 12]):
        one.update(i * POLL + 1, TTFTSample(2.0 + 0.1 * load + 0.4 * load**2, 1, load))
        one.tick((i + 1) * POLL, 1)
    assert one.signal == pytest.approx(0.8)
    assert one.regime is Regime.TRANSITION


def test_loads_that_lie_together_give_no_second_difference() -> None:
    one = SecondDifference(SecondDifferenceConfig(theta1=0.5, theta2=50.0, apart=2.0))
    one.tick(0, 1)
    for i in range(6):
        one.update(i * POLL + 1, TTFTSample(float(i), 1, 5 + i % 2))
        one.tick((i + 1) * POLL, 1)
    assert math.isnan(one.signal)


def test_the_variance_is_that_of_the_means_of_settings() -> None:
    one = ConfigVariance(ConfigVarianceConfig(theta1=0.5, theta2=50.0, window=2))
    one.tick(0, 1)
    for second, (ttft, setting) in enumerate([(1.0, 0), (3.0, 0), (4.0, 1), (6.0, 2)]):
        one.update(second * SECOND, TTFTSample(ttft, setting=setting))
    one.tick(POLL, 1)
    assert one.signal == pytest.approx(np.var([2.0, 4.0, 6.0], ddof=1))


def test_one_setting_has_no_variance() -> None:
    one = ConfigVariance(ConfigVarianceConfig(theta1=0.5, theta2=50.0))
    assert set(polls(one, [1.0, 9.0, 30.0])) == {Regime.BELOW}


def queue(
    seed: int, levels: list[tuple[float, float]], speed: float = 1.0
) -> list[tuple[int, TTFTSample]]:
    """First tokens of one server, first come first served, at (seconds, utilisation) in turn."""
    rng = np.random.default_rng(seed)
    now, free, out, ends = 0.0, 0.0, [], []
    until = 0.0
    for seconds, utilisation in levels:
        until += seconds
        while now < until:
            now += rng.exponential(0.12 * speed / utilisation)
            tokens = int(rng.integers(200, 1800))
            service = speed * (0.02 + 1e-4 * tokens) * rng.lognormal(0, 0.1)
            ends = [end for end in ends if end > now]
            free = max(now, free) + service
            out.append(
                (round(free * SECOND), TTFTSample(free - now, tokens, len(ends) + 1, len(ends)))
            )
            ends.append(free)
    return out


def spans(one: Detector, events: list[tuple[int, TTFTSample]]) -> list[tuple[float, Regime]]:
    """(Seconds, regime) of each change."""
    out = [(0.0, Regime.BELOW)]
    for now, sample in events:
        regime = one.update(now, sample)
        if regime is not out[-1][1]:
            out.append((now / SECOND, regime))
    return out


@pytest.mark.parametrize("speed", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_cusum_finds_the_rise_and_the_fall_at_any_speed_of_the_fleet(
    seed: int, speed: float
) -> None:
    levels = [(400 * speed, 0.3), (100 * speed, 1.6), (500 * speed, 0.3)]
    found = spans(CusumDetector(), queue(seed, levels, speed))
    rise = next(at for at, regime in found if regime is not Regime.BELOW)
    assert 400 * speed < rise < 415 * speed
    assert any(regime is Regime.SATURATED for _, regime in found)
    at, last = found[-1]
    assert last is Regime.BELOW
    assert at < 700 * speed


def test_cusum_keeps_quiet_under_moderate_load() -> None:
    alarms = sum(len(spans(CusumDetector(), queue(seed, [(1800, 0.3)]))) - 1 for seed in range(4))
    assert alarms == 0


def test_cusum_needs_not_know_who_was_ahead() -> None:
    events = [
        (now, TTFTSample(each.ttft, each.tokens, each.load))
        for now, each in queue(5, [(400, 0.3), (100, 1.6), (500, 0.3)])
    ]
    found = spans(CusumDetector(), events)
    assert 400 < next(at for at, regime in found if regime is not Regime.BELOW) < 415
    assert found[-1][1] is Regime.BELOW


def test_longer_prompts_are_not_taken_for_a_queue() -> None:
    one, now = CusumDetector(), 0
    rng = np.random.default_rng(0)
    for i in range(3000):
        now += SECOND // 4
        tokens = int(rng.integers(100, 500)) * (1 if i < 1500 else 12)
        ttft = (0.02 + 1e-4 * tokens) * rng.lognormal(0, 0.1)
        assert one.update(now, TTFTSample(ttft, tokens, 1, 0)) is Regime.BELOW


def test_a_slower_fleet_is_relearned() -> None:
    one, now = CusumDetector(), 0
    regimes = []
    for i in range(6000):
        now += SECOND // 4
        regimes.append(one.update(now, TTFTSample(0.05 if i < 1000 else 0.2, 100, 1, 0)))
    assert Regime.TRANSITION in regimes
    assert regimes[-1] is Regime.BELOW
    assert one.law(100) == pytest.approx(0.2, rel=0.2)


def test_a_few_odd_requests_are_no_change() -> None:
    one, now = CusumDetector(), 0
    for i in range(2000):
        now += SECOND // 4
        odd = i % 100 == 99
        assert one.update(now, TTFTSample(5.0 if odd else 0.05, 100, 1, 0)) is Regime.BELOW


def test_a_first_token_at_once_is_no_error() -> None:
    assert CusumDetector().update(0, TTFTSample(0.0, 10, 1, 0)) is Regime.BELOW


@pytest.mark.parametrize("ttft", [-1.0, math.nan, math.inf])
def test_impossible_times_are_refused(ttft: float) -> None:
    with pytest.raises(ValueError, match="ttft is"):
        CusumDetector().update(0, TTFTSample(ttft))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"detector": "cusum", "knee": 1.0}, "knee is 1.0"),
        ({"detector": "cusum", "full": 2.0}, "full is 2.0"),
        ({"detector": "cusum", "zone": 1.0}, "zone is 1.0"),
        ({"detector": "cusum", "arl0": 5}, "arl0 is 5; it must be at least"),
        ({"detector": "paper", "theta1": 3.0}, "theta2 is 2.0"),
        ({"detector": "paper", "alpha": 0.0}, "alpha is 0.0"),
        ({"detector": "paper", "margin": 0.3}, "margin is 0.3"),
        ({"detector": "paper", "consecutive": 0}, "consecutive is 0"),
        ({"detector": "paper", "theta3": 1}, "theta3"),
        ({"detector": "second-difference"}, "theta1"),
        ({"detector": "config-variance", "theta1": 1, "theta2": 2, "window": 0}, "window is 0"),
        ({"detector": "knee"}, "knee"),
        ({}, "detector"),
    ],
)
def test_bad_parameters_are_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_detector(values)


def test_a_detector_is_found_by_its_name() -> None:
    cusum = load_detector({"detector": "cusum", "zone": 2})
    assert isinstance(cusum, CusumDetector)
    assert cusum.config == CusumConfig(zone=2.0)
    for name, values in NAMES.items():
        one = load_detector({"detector": name, **values})
        low, high = one.thresholds
        assert one.regime is Regime.BELOW
        assert low < high
