"""The order of events on the virtual clock."""

from __future__ import annotations

import pytest

from pigou.sim.virtual_clock import EPOCH, Clock, Phase


def test_events_run_by_time_then_phase_then_key() -> None:
    clock, seen = Clock(), []
    for time, phase, key in [(5, 4, 0), (5, 1, 7), (4, 9, 0), (5, 1, 2)]:
        place = (EPOCH + time, phase, key)
        clock.at(*place, lambda _, place=place: seen.append(place))  # type: ignore[misc]
    while clock.step():
        pass
    assert seen == sorted(seen)
    with pytest.raises(ValueError, match="already"):
        clock.at(EPOCH, Phase.SEND, 0, lambda _: None)
