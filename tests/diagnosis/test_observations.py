"""Laws of observations: they are read as they are written, and bad ones are named."""

from __future__ import annotations

import pytest

from pigou.config import ConfigError
from pigou.windows.observations import (
    FleetObservation,
    TenantObservation,
    WorkerObservation,
    read_observations,
    written,
)

WINDOW = FleetObservation(
    start_s=0.0, seconds=10.0, queued=2.0,
    workers=(WorkerObservation(worker="a", waiting=1.5), WorkerObservation(worker="b", waiting=1)),
    tenants=(TenantObservation(tenant="anna", tokens=5.0),),
)  # fmt: skip


def test_windows_are_read_as_they_are_written() -> None:
    assert read_observations(written([WINDOW]), "x.json") == (WINDOW,)


def test_waiting_is_that_of_gateway_and_workers() -> None:
    assert WINDOW.waiting == 4.5


def test_a_figure_that_no_worker_says_is_none() -> None:
    assert WINDOW.total("wasted_tokens") is None
    assert WINDOW.total("waiting") == 2.5


@pytest.mark.parametrize(
    ("windows", "words"),
    [
        ([], "no windows"),
        ([{"start_s": 0.0}], "seconds"),
        ([{"start_s": 0.0, "seconds": 0.0}], "above 0"),
        ([{"start_s": 9.0, "seconds": 1.0}, {"start_s": 1.0, "seconds": 1.0}], "order of time"),
        ([{"start_s": 0.0, "seconds": 1.0, "arrivd": 1}], "arrivd"),
        ({"a": 1}, "array"),
    ],
)
def test_windows_that_are_none_are_refused_by_name(windows: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_observations(windows, "x.json")
