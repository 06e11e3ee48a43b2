"""The bandit finds the best setting, and follows it when it changes."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.control.routing_controller import E2ESample
from pigou.control.saturation.regime import TTFTSample
from pigou.request import SECOND
from pigou_lab.routing_controllers import Bandit, BanditConfig, DiscountedUCB


def pulls(one: DiscountedUCB, means: list[float], rounds: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = np.zeros(len(means), dtype=int)
    for _ in range(rounds):
        arm = one.choose()
        one.forget()
        one.reward(arm, means[arm] + 0.1 * rng.normal())
        found[arm] += 1
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_best_arm_gets_most_pulls_and_a_new_best_one_is_found(seed: int) -> None:
    one = DiscountedUCB(4, 0.98, 0.25, np.random.default_rng(seed))
    assert pulls(one, [-1.0, -0.5, -1.5, -1.0], 600, seed).argmax() == 1
    after = pulls(one, [-1.0, -1.5, -1.5, -0.5], 900, seed)
    assert after.argmax() == 3
    assert after[3] > 600


def test_every_arm_is_pulled_before_any_is_pulled_again() -> None:
    one = DiscountedUCB(5, 0.9, 0.0, np.random.default_rng(0))
    seen = set()
    for _ in range(5):
        arm = one.choose()
        one.reward(arm, 0.0)
        seen.add(arm)
    assert len(seen) == 5


def play(one: Bandit, best: int, seconds: int, start: int, seed: int) -> np.ndarray:
    """Requests whose latency under setting i is 1 + |i - best|; shares of the settings."""
    rng = np.random.default_rng(seed)
    used = np.zeros(len(one.settings))
    for step in range(seconds * 10):
        now = (start * 10 + step) * SECOND // 10
        setting = one.parameters(now).setting
        used[setting] += 1
        one.observe(
            now, E2ESample(10 * (1 + abs(setting - best)) * rng.lognormal(0, 0.3), 10, setting)
        )
    return used / used.sum()


@pytest.mark.parametrize("seed", range(3))
def test_the_setting_with_short_latencies_is_kept_to_as_it_changes(seed: int) -> None:
    one = Bandit(BanditConfig(), None, np.random.default_rng(seed))
    assert play(one, 2, 600, 0, seed)[2] > 0.6
    play(one, 6, 600, 600, seed)
    assert play(one, 6, 600, 1200, seed)[6] > 0.6


def test_a_setting_holds_for_an_epoch() -> None:
    one = Bandit(BanditConfig(epoch=SECOND), None, np.random.default_rng(0))
    first = one.parameters(0)
    one.observe(1, E2ESample(1.0, 1.0, first.setting))
    assert one.parameters(SECOND - 1) == first
    assert one.parameters(SECOND) != first


def test_late_outcomes_are_credited_to_their_own_setting() -> None:
    one = Bandit(BanditConfig(epoch=SECOND), None, np.random.default_rng(0))
    old = one.parameters(0).setting
    one.observe(1, E2ESample(1.0, 1.0, old))
    new = one.parameters(SECOND).setting
    one.observe(SECOND + 1, E2ESample(9.0, 1.0, old))
    one.parameters(2 * SECOND)
    assert one.arms.pulls[old] > 1
    assert one.arms.pulls[new] == 0


def test_the_same_seed_plays_the_same() -> None:
    shares = [
        play(Bandit(BanditConfig(), None, np.random.default_rng(7)), 3, 60, 0, 1) for _ in range(2)
    ]
    assert (shares[0] == shares[1]).all()


@pytest.mark.parametrize("reward", ["latency", "ttft"])
def test_only_the_outcome_that_was_asked_for_counts(reward: str) -> None:
    one = Bandit(BanditConfig(reward=reward), None, np.random.default_rng(0))
    setting = one.parameters(0).setting
    one.observe(
        1, TTFTSample(5.0, setting=setting) if reward == "latency" else E2ESample(5.0, 1.0, setting)
    )
    one.parameters(10 * SECOND)
    assert not one.arms.pulls.any()


def test_outcomes_of_no_setting_are_refused() -> None:
    one = Bandit(BanditConfig(), None, np.random.default_rng(0))
    with pytest.raises(ValueError, match="setting is 99"):
        one.observe(0, E2ESample(1.0, 1.0, 99))
    with pytest.raises(ValueError, match="unloaded is 0"):
        one.observe(0, E2ESample(1.0, 0.0, 0))
