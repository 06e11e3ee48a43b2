"""Laws and tables of the textbook queues."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.games.queueing import (
    closed_knee,
    erlang_b,
    erlang_c,
    mgc_wait,
    mm1ps_response,
    mmc_wait,
    mmc_wait_quantile,
    power_knee,
    wait_knee,
)


@pytest.mark.parametrize(
    ("servers", "utilisation", "waits", "wait"),
    [
        (1, 0.5, 0.5, 1),
        (2, 0.5, 1 / 3, 1 / 3),
        (2, 0.8, 0.711111, 1.777778),
        (4, 0.7, 0.428654, 0.357212),
    ],
)
def test_erlang_c_is_as_in_the_tables(
    servers: int, utilisation: float, waits: float, wait: float
) -> None:
    assert erlang_c(servers, utilisation) == pytest.approx(waits, abs=1e-6)
    assert mmc_wait(servers, utilisation) == pytest.approx(wait, abs=1e-6)


@given(st.integers(1, 40), st.floats(0.01, 0.99))
@settings(deadline=None)
def test_erlang_c_is_its_defining_sum(servers: int, utilisation: float) -> None:
    offered = servers * utilisation
    top = offered**servers / math.factorial(servers) / (1 - utilisation)
    below = sum(offered**k / math.factorial(k) for k in range(servers))
    assert erlang_c(servers, utilisation) == pytest.approx(top / (below + top), rel=1e-9)


def test_erlang_b_is_as_in_the_tables() -> None:
    assert erlang_b(10, 5) == pytest.approx(0.018385, abs=1e-6)
    assert erlang_b(0, 5) == 1


@given(st.floats(0.01, 0.99), st.floats(0, 9))
@settings(deadline=None)
def test_one_server_is_pollaczek_khinchine(utilisation: float, scv: float) -> None:
    expected = utilisation * (1 + scv) / 2 / (1 - utilisation)
    assert mgc_wait(1, utilisation, scv) == pytest.approx(expected)


@given(st.integers(1, 20), st.floats(0.05, 0.98), st.floats(0, 0.999))
@settings(deadline=None)
def test_waits_exceed_their_quantile_as_often_as_it_says(
    servers: int, utilisation: float, quantile: float
) -> None:
    t = mmc_wait_quantile(servers, utilisation, quantile, service=2.0)
    tail = erlang_c(servers, utilisation) * math.exp(-servers * (1 - utilisation) * t / 2.0)
    assert tail <= 1 - quantile + 1e-9
    assert t == 0 or tail == pytest.approx(1 - quantile)


def test_sharing_one_server_takes_the_time_of_the_others_too() -> None:
    assert mm1ps_response(0.75, 2.0) == 8.0
    assert mm1ps_response(0.5) == pytest.approx(1 + mmc_wait(1, 0.5))


def test_the_rise_from_half_to_full_load_depends_on_the_servers() -> None:
    rises = [mmc_wait(c, 0.95) / mmc_wait(c, 0.5) for c in (1, 2, 4, 8, 16)]
    assert rises == pytest.approx([19, 27.8, 51, 143, 865], rel=6e-3)


def test_knees_are_where_they_are_defined_to_be() -> None:
    assert power_knee(1) == pytest.approx(0.5, abs=1e-6)
    assert power_knee(1, scv=0) > power_knee(1) > power_knee(1, scv=4)
    assert power_knee(8) > power_knee(2) > power_knee(1)
    for servers, wait, scv in ((1, 1.0, 1.0), (4, 0.5, 2.0), (16, 3.0, 0.0)):
        assert mgc_wait(servers, wait_knee(servers, wait, scv), scv) == pytest.approx(wait)
    assert wait_knee(1) == pytest.approx(0.5)


def test_the_closed_systems_knee_is_littles_law() -> None:
    assert closed_knee(18.9, 5.33) == pytest.approx(100.7, abs=0.1)
    assert closed_knee(2.0, 1.0, think=4.0) == 10


def test_an_unstable_queue_is_refused() -> None:
    for call in (
        lambda: erlang_c(1, 1.0),
        lambda: erlang_c(0, 0.5),
        lambda: mm1ps_response(1.2),
        lambda: mgc_wait(1, 0.5, -1),
        lambda: wait_knee(1, 0),
        lambda: closed_knee(0, 1),
        lambda: mmc_wait_quantile(1, 0.5, 1.0),
        lambda: erlang_b(-1, 1),
    ):
        with pytest.raises(ValueError, match=r"give|stable"):
            call()
