"""What is known of the sizes of prompts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.latency_model.demand import PromptSizes
from pigou.control.latency_model.estimates import pairs
from pigou.control.latency_model.model import LatencyModel
from pigou.request import SECOND

LAWS = st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.floats(0, 1e-7))


@given(st.lists(st.integers(1, 100_000), min_size=16, max_size=64), LAWS)
def test_mean_and_spread_of_seconds_are_those_of_the_law_whatever_it_was_before(
    sizes: list[int], law: tuple[float, float, float]
) -> None:
    found = PromptSizes()
    found._keep = 1.0  # nothing is forgotten, so that both sides weigh alike
    for size in sizes:
        found.observe(size, pairs(size, size))
    tokens = np.array(sizes, dtype=np.float64)
    base, token, pair = law
    seconds = base + token * tokens + pair * pairs(tokens, tokens)
    assert found.mean(*law) == pytest.approx(seconds.mean())
    assert found.cv2(*law) == pytest.approx(seconds.var() / seconds.mean() ** 2, abs=1e-6)


def test_nothing_is_said_of_the_spread_of_a_few_prompts() -> None:
    found = PromptSizes()
    assert found.mean(0.5, 0.1, 0.0) == 0.5
    for size in range(15):
        found.observe(size, 0.0)
        assert found.cv2(0.5, 0.1, 0.0) == 1.0
    found.observe(100, 0.0)
    assert found.cv2(0.5, 0.1, 0.0) != 1.0


@pytest.mark.parametrize("seed", range(4))
def test_prompts_are_as_uneven_as_they_are_while_the_law_changes_its_mind(seed: int) -> None:
    """A law whose slope is nearly nothing makes a pair worth any number of tokens."""
    estimator, rng, now = LatencyModel(), np.random.default_rng(seed), SECOND
    estimator.add_worker()
    taken = []
    for _ in range(400):
        size = int(rng.lognormal(7, 1.2))
        seconds = (0.01 + 1e-9 * pairs(size, size)) * rng.lognormal(0, 0.3)
        taken.append(seconds)
        estimator.prompt_sent(0, now)
        estimator.prompt_computed(0, size, now, now + round(seconds * SECOND))
        now += round((seconds + 0.01) * SECOND)
        estimator.sample(now)
        spread = estimator.estimates(now).prefill_cv2.item()
        assert spread < 3 * max(1.0, np.var(taken) / np.mean(taken) ** 2)
