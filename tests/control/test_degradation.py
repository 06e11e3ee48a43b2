"""Degraded modes: they begin and end by their thresholds, and stay between them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ConfigError
from pigou.control.degradation import Degradation, DegradedMode, ShedMeter
from pigou.request import SECOND

SHORT = DegradedMode(name="max_tokens", limit=64, wait_s=2.0, leave_wait_s=0.5, hold_s=3.0)


@given(st.lists(st.floats(0.0, 4.0), min_size=1, max_size=60))
def test_a_mode_changes_only_at_its_thresholds(waits: list[float]) -> None:
    modes = Degradation([SHORT])
    low_since, was_on = 0, False
    for second, wait_s in enumerate(waits, 1):
        modes.update(second * SECOND, wait_s)
        is_on = modes.is_on("max_tokens")
        if is_on and not was_on:
            assert wait_s >= 2.0
        if wait_s > 0.5 or not was_on:
            low_since = second
        if was_on and not is_on:
            assert second - low_since >= 3.0
        assert is_on or wait_s < 2.0
        was_on = is_on


def test_each_mode_has_a_threshold_of_its_own_and_waits_for_both_pressures() -> None:
    model = DegradedMode(name="model", to="small", wait_s=5.0, shed=0.5, leave_shed=0.1, hold_s=0)
    modes = Degradation([SHORT, model])
    modes.update(SECOND, 3.0)
    assert (modes.is_on("max_tokens"), modes.is_on("model")) == (True, False)
    for shed in (True, False):
        modes.meter.decided(2 * SECOND, shed=shed)
    modes.update(2 * SECOND, 0.0)
    assert modes.is_on("model")  # half of the requests are shed
    modes.update(9 * SECOND, 0.0)
    assert (modes.is_on("max_tokens"), modes.is_on("model")) == (False, True)
    modes.update(12 * SECOND, 0.0)  # they left the window
    assert not modes.is_on("model")


def test_a_share_of_shed_requests_is_of_ten_seconds() -> None:
    meter = ShedMeter()
    assert meter.share(0) == 0.0
    meter.decided(SECOND, shed=True)
    meter.decided(5 * SECOND, shed=False)
    assert meter.share(10 * SECOND) == 0.5
    assert meter.share(11 * SECOND) == 0.0


def test_a_mode_is_for_its_classes_alone() -> None:
    modes = Degradation([DegradedMode(name="cached", wait_s=1.0, classes="chat+batch")])
    assert modes.active("cached", "chat") is None
    modes.update(SECOND, 1.0)
    assert modes.active("cached", "chat") is not None
    assert modes.active("cached", "voice") is None
    assert modes.active("model", "chat") is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "cached"}, "give wait_s=2 or shed"),
        ({"name": "max_tokens", "wait_s": 1}, "limit is 0"),
        ({"name": "cached", "wait_s": 1, "limit": 5}, "limit is 5"),
        ({"name": "model", "wait_s": 1}, "to is ''"),
        ({"name": "cached", "wait_s": 1, "leave_wait_s": 1}, "must be below wait_s"),
        ({"name": "cached", "shed": 0.1, "leave_shed": 0.2}, "must be below shed"),
    ],
)
def test_a_mode_without_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DegradedMode(**values)


def test_a_mode_is_given_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        Degradation([SHORT, SHORT])
