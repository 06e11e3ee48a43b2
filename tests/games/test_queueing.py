"""Laws and tables of the textbook queues."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.games.queueing import (
    erlang_b,
    erlang_c,
    lognormal_quantile,
    max_utilisation,
    mdc_tail,
    mgc_wait,
    mgc_wait_quantile,
    mmc_wait,
    mmc_wait_quantile,
    response_quantile,
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
def test_erlang_c_is_its_defining_sum(servers: int, utilisation: float) -> None:
    offered = servers * utilisation
    top = offered**servers / math.factorial(servers) / (1 - utilisation)
    below = sum(offered**k / math.factorial(k) for k in range(servers))
    assert erlang_c(servers, utilisation) == pytest.approx(top / (below + top), rel=1e-9)


def test_erlang_b_is_as_in_the_tables() -> None:
    assert erlang_b(10, 5) == pytest.approx(0.018385, abs=1e-6)
    assert erlang_b(0, 5) == 1


@given(st.floats(0.01, 0.99), st.floats(0, 9))
def test_one_server_is_pollaczek_khinchine(utilisation: float, scv: float) -> None:
    expected = utilisation * (1 + scv) / 2 / (1 - utilisation)
    assert mgc_wait(1, utilisation, scv) == pytest.approx(expected)


@given(st.integers(1, 20), st.floats(0.05, 0.98), st.floats(0, 0.999))
def test_waits_exceed_their_quantile_as_often_as_it_says(
    servers: int, utilisation: float, quantile: float
) -> None:
    t = mmc_wait_quantile(servers, utilisation, quantile, service=2.0)
    tail = erlang_c(servers, utilisation) * math.exp(-servers * (1 - utilisation) * t / 2.0)
    assert tail <= 1 - quantile + 1e-9
    assert t == 0 or tail == pytest.approx(1 - quantile)


def test_the_rise_from_half_to_full_load_depends_on_the_servers() -> None:
    rises = [mmc_wait(c, 0.95) / mmc_wait(c, 0.5) for c in (1, 2, 4, 8, 16)]
    assert rises == pytest.approx([19, 27.8, 51, 143, 865], rel=6e-3)


def test_an_unstable_queue_is_refused() -> None:
    for call in (
        lambda: erlang_c(1, 1.0),
        lambda: erlang_c(0, 0.5),
        lambda: mgc_wait(1, 0.5, -1),
        lambda: mmc_wait_quantile(1, 0.5, 1.0),
        lambda: erlang_b(-1, 1),
    ):
        with pytest.raises(ValueError, match=r"give|stable"):
            call()


# --- deterministic and general service -----------------------------------------------------------


@pytest.mark.parametrize(
    ("utilisation", "mean", "quantiles"),
    [
        (0.3, 0.214, (0.0, 0.838, 1.071, 1.891)),
        (0.5, 0.5, (0.0, 1.516, 2.051, 3.336)),
        (0.7, 1.167, (0.730, 3.077, 4.103, 6.485)),
        (0.8, 2.0, (1.276, 5.012, 6.620, 10.356)),
        (0.9, 4.5, (3.013, 10.783, 14.129, 21.898)),
    ],
)
def test_waits_of_m_d_1_are_as_in_the_table(
    utilisation: float, mean: float, quantiles: tuple[float, ...]
) -> None:
    """The table was computed by Erlang's sum with 80 digits."""
    assert mgc_wait(1, utilisation, 0.0) == pytest.approx(mean, abs=5e-4)
    for share, wait in zip((0.5, 0.9, 0.95, 0.99), quantiles, strict=True):
        assert mgc_wait_quantile(1, utilisation, share, 0.0) == pytest.approx(wait, abs=5e-4)


@pytest.mark.parametrize(
    ("limit", "p95", "p99"),
    [(1.5, 0.093, 0.020), (2, 0.287, 0.135), (3, 0.492, 0.320), (5, 0.694, 0.561),
     (10, 0.848, 0.773)],
)  # fmt: skip
def test_the_highest_load_that_keeps_a_limit_is_as_in_the_table(
    limit: float, p95: float, p99: float
) -> None:
    assert max_utilisation(1, limit, 0.95) == pytest.approx(p95, abs=5e-4)
    assert max_utilisation(1, limit, 0.99) == pytest.approx(p99, abs=5e-4)


def test_three_times_the_bare_prefill_takes_twice_the_servers_of_the_mean() -> None:
    assert 1.0 / max_utilisation(1, 3.0, 0.95) == pytest.approx(2.0, abs=0.04)


def simulated_waits(servers: int, rate: float, services: np.ndarray, seed: int) -> np.ndarray:
    """Waits of Poisson arrivals, first come first served."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, len(services))
    free, now, waits = [0.0] * servers, 0.0, np.empty(len(services))
    for index, (gap, service) in enumerate(zip(gaps, services, strict=True)):
        now += gap
        first = free.index(min(free))
        waits[index] = max(free[first] - now, 0.0)
        free[first] = max(free[first], now) + service
    return waits[len(waits) // 10 :]


@pytest.mark.parametrize(("servers", "utilisation"), [(2, 0.8), (5, 0.9), (12, 0.85)])
def test_waits_of_m_d_c_are_those_of_a_simulated_queue(servers: int, utilisation: float) -> None:
    waits = simulated_waits(servers, servers * utilisation, np.ones(200_000), 1)
    for share in (0.9, 0.95, 0.99):
        wait = mgc_wait_quantile(servers, utilisation, share, 0.0)
        assert wait == pytest.approx(np.quantile(waits, share), rel=0.08)


@pytest.mark.parametrize(("servers", "utilisation", "scv"), [(1, 0.7, 0.5), (4, 0.85, 0.4)])
def test_responses_of_m_g_c_are_near_those_of_a_simulated_queue(
    servers: int, utilisation: float, scv: float
) -> None:
    spread = math.log1p(scv)
    draws = np.random.default_rng(2).lognormal(-spread / 2, math.sqrt(spread), 200_000)
    waits = simulated_waits(servers, servers * utilisation, draws, 3)
    response = np.quantile(waits + draws[len(draws) - len(waits) :], 0.95)
    assert response_quantile(servers, utilisation, 0.95, scv) == pytest.approx(response, rel=0.06)


def test_the_tail_of_m_d_1_has_its_known_constant() -> None:
    constant, rate = mdc_tail(1, 0.5)
    assert math.exp(rate) == pytest.approx(1 + rate / 0.5, rel=1e-9)  # sigma = e^(rho (sigma - 1))
    assert constant == pytest.approx(0.661, abs=5e-4)
    assert mdc_tail(3, 0.0) == (0.0, math.inf)


@given(st.integers(1, 40), st.floats(0.05, 0.95), st.floats(0, 3), st.floats(0.5, 0.99))
@settings(max_examples=examples(50))
def test_waits_fall_with_servers_and_rise_with_load_and_variance(
    servers: int, utilisation: float, scv: float, share: float
) -> None:
    wait = mgc_wait_quantile(servers, utilisation, share, scv)
    assert mgc_wait_quantile(servers + 1, utilisation, share, scv) <= wait + 1e-6
    assert mgc_wait_quantile(servers, min(utilisation + 0.02, 0.99), share, scv) >= wait - 1e-6


def test_queues_without_meaning_are_refused() -> None:
    for call in (
        lambda: mgc_wait_quantile(1, 1.0, 0.5, 0.0),
        lambda: mgc_wait_quantile(1, 0.5, 1.0, 0.0),
        lambda: mgc_wait_quantile(1, 0.5, 0.5, -1),
        lambda: lognormal_quantile(0.1, 1.0),
    ):
        with pytest.raises(ValueError, match=r"give|stable"):
            call()
    assert response_quantile(1, 1.5, 0.9) == math.inf


@pytest.mark.parametrize(
    ("servers", "utilisation", "burst"), [(1, 0.6, 10), (4, 0.5, 30), (8, 0.7, 60)]
)
def test_waits_of_bursts_are_near_those_of_a_simulated_queue(
    servers: int, utilisation: float, burst: int
) -> None:
    rng = np.random.default_rng(4)
    times = np.cumsum(rng.exponential(burst / (servers * utilisation), 6000)).repeat(burst)
    free = np.zeros(servers)
    waits = []
    for at in times:
        first = int(free.argmin())
        waits.append(max(free[first] - at, 0.0))
        free[first] = max(free[first], at) + 1.0
    seen = float(np.quantile(waits, 0.95))
    wait = mgc_wait_quantile(servers, utilisation, 0.95, 0.0, float(burst))
    assert wait == pytest.approx(seen, rel=0.3)
    assert mgc_wait_quantile(servers, utilisation, 0.95, 0.0, 1.0) < 0.5 * seen
