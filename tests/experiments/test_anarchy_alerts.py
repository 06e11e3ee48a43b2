"""Alerts over fault trials: when the objective breaks, and which signal is first."""

from __future__ import annotations

import numpy as np
import pytest

from pigou_lab.experiments.anarchy_alerts import _first, _late, alarms, alerts, leads


def test_late_requests_count_when_their_fate_is_known() -> None:
    sent = np.arange(0.0, 40.0)  # one a second
    first = np.where(sent < 20, sent + 0.1, sent + 5.0)
    assert _late(sent, first, 20.0) == 0.0
    assert _late(sent, first, 25.0) == pytest.approx(5 / 25)
    assert _late(sent, np.full(40, np.inf), 31.0) == 1.0
    assert _late(sent[:10], np.full(10, np.inf), 31.0) == 0.0  # too few
    assert _first([5.0, 10.0, 15.0], [False, True, True]) == 10.0
    assert _first([5.0], [False]) is None


@pytest.mark.slow
def test_a_queue_that_builds_up_breaks_the_objective_and_a_healthy_fleet_is_silent() -> None:
    assert set(alarms(0, 1).values()) == {None}
    queue = alarms(6, 1)
    assert queue["broken"] is not None
    assert queue["anarchy"] is not None
    assert queue["late"] is not None
    assert queue["late"] <= queue["broken"]


def test_leads_count_alarms_before_the_break_and_false_ones() -> None:
    one = {"broken": 30.0, "anarchy": 20.0, "queue": 40.0, "late": None}
    calm = {"broken": None, "anarchy": 5.0, "queue": None, "late": None}
    found = leads([{"runs": [one, calm]}])
    assert found["anarchy"] == {"before": 1, "broken": 1, "false": 1, "unbroken": 1}
    assert found["queue"] == {"before": 0, "broken": 1, "false": 0, "unbroken": 1}
    (row,) = alerts(None, None, [1], [0])  # type: ignore[arg-type]
    assert (row["fault"], row["broken"], row["anarchy_lead_s"]) == ("healthy", 0, None)
