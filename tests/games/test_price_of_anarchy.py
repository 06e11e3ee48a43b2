"""Laws of the live Price of Anarchy: the parts mean what they say."""

from __future__ import annotations

from dataclasses import astuple
from functools import cache
from itertools import product

import numpy as np
import pytest
from tests.games.fleet import always_first, at_random, least_loaded, simulate

from pigou.games.latency import LatencyLaw, OnlineFit
from pigou.games.price_of_anarchy import PriceOfAnarchy, calibrated, legacy_index, legacy_optimum
from pigou.games.request_window import RequestWindow
from pigou_lab.games.routing import RoutingGame

DECODE = LatencyLaw(0.0005, 0.02, 0.2, 40, 1.0)
LIGHT = LatencyLaw(0.002, 0.002)
SERIAL = LatencyLaw(0.02, 0.0)


@cache
def learnt(law: LatencyLaw) -> LatencyLaw:
    """The law as a fleet learns it: from a worker like these, under few and under many."""
    runs = [simulate([law], clients=c, requests=300, seed=c) for c in (1, 2, *range(4, 37, 4))]
    online = OnlineFit(40.0, half_life=1e6)
    for run in runs:
        for load, seconds in zip(run.decode_load, run.decode_seconds, strict=True):
            online.observe(load, seconds)
    return online.law()


def judged(window: RequestWindow, workers: int, prefill: LatencyLaw = LIGHT) -> PriceOfAnarchy:
    return calibrated(window, [learnt(DECODE)] * workers, [learnt(prefill)] * workers)


@pytest.mark.parametrize("clients", [1, 4, 9, 32])
def test_identical_workers_under_optimal_routing_give_one(clients: int) -> None:
    result = judged(simulate([DECODE] * 2, clients=clients), 2)
    for part in (result.whole, result.routing, result.prefill_decode, result.queueing):
        assert part.value == pytest.approx(1.0, abs=0.02)
        assert part.low <= part.value <= part.high


@pytest.mark.parametrize("arrivals", [50.0, 400.0])
def test_random_arrivals_leave_it_at_one(arrivals: float) -> None:
    result = judged(simulate([DECODE] * 3, arrivals=arrivals), 3)
    assert result.whole.value == pytest.approx(1.0, abs=0.02)


def test_a_split_that_suits_the_load_gives_one() -> None:
    window = simulate([DECODE] * 2, prefill_laws=[LIGHT] * 2, clients=32)
    result = judged(window, 4)
    for part in (result.whole, result.routing, result.prefill_decode, result.queueing):
        assert part.value == pytest.approx(1.0, abs=0.02)
    assert result.prefill_workers == (0, 1)


@pytest.mark.parametrize("clients", [4, 16, 30])
def test_sending_all_to_one_worker_moves_the_routing_part_only(clients: int) -> None:
    result = judged(simulate([DECODE] * 2, always_first, clients=clients), 2)
    game = RoutingGame([DECODE] * 2, np.zeros((clients, 2)), 1.0)
    brute = game.social_cost([0] * clients) / game.social_cost(game.optimum())
    assert brute > 1.04
    assert result.routing.value == pytest.approx(brute, rel=0.05)
    assert result.prefill_decode.value == pytest.approx(1.0, abs=0.02)
    assert result.queueing.value == pytest.approx(1.0, abs=0.02)


def test_routing_at_random_costs_more_than_to_the_least_loaded() -> None:
    steep = LatencyLaw(0.005, 0.01)
    laws = [learnt(steep)] * 4
    random, best = (
        calibrated(simulate([steep] * 4, router, clients=24), laws).routing.value
        for router in (at_random, least_loaded)
    )
    assert random > best + 0.03


@pytest.mark.parametrize("clients", [8, 32])
def test_a_starved_prefill_pool_moves_the_prefill_decode_part_only(clients: int) -> None:
    window = simulate([DECODE] * 3, prefill_laws=[SERIAL], clients=clients)
    result = judged(window, 4, SERIAL)
    assert result.prefill_decode.value > 2
    assert result.prefill_decode.low > 1.5
    assert len(result.prefill_workers) > 1
    assert result.routing.value == pytest.approx(1.0, abs=0.02)
    assert result.queueing.value == pytest.approx(1.0, abs=0.02)


def test_waiting_before_any_worker_moves_the_queueing_part_only() -> None:
    window = simulate([DECODE] * 2, clients=16)
    laws = [learnt(DECODE)] * 2
    delayed = RequestWindow(
        **{
            name: getattr(window, name)
            for name in RequestWindow.__dataclass_fields__
            if name != "waiting"
        },
        waiting=window.decode_seconds * 0.5,
    )
    before, after = calibrated(window, laws), calibrated(delayed, laws)
    assert after.queueing.value == pytest.approx(1.5 * before.queueing.value, rel=1e-9)
    assert astuple(after.routing) == pytest.approx(astuple(before.routing))
    assert astuple(after.prefill_decode) == pytest.approx(astuple(before.prefill_decode))


@pytest.mark.parametrize("clients", [8, 32])
def test_the_parts_multiply_to_the_whole(clients: int) -> None:
    window = simulate([DECODE] * 2, at_random, prefill_laws=[SERIAL], clients=clients)
    result = judged(window, 3, SERIAL)
    product_ = result.routing.value * result.prefill_decode.value * result.queueing.value
    assert result.whole.value == pytest.approx(product_, rel=1e-12)


def test_a_large_fleets_split_is_searched_and_improves_too() -> None:
    window = simulate([DECODE] * 12, prefill_laws=[SERIAL], clients=32, requests=600)
    result = judged(window, 13, SERIAL)
    assert result.prefill_decode.value > 2
    assert len(result.prefill_workers) > 1


def concurrent(decode: list[int], workers: int, seconds: np.ndarray) -> RequestWindow:
    """Requests that are all there all the time."""
    where = np.array(decode)
    load = np.bincount(where, minlength=workers)[where].astype(float)
    ones = np.ones(len(where))
    return RequestWindow(
        waiting=0 * ones,
        prefill=np.full(len(where), -1),
        prefill_seconds=0 * ones,
        prefill_load=ones,
        prefill_total=ones,
        decode=where,
        decode_seconds=seconds,
        decode_load=load,
        decode_total=len(where) * ones,
    )


@pytest.mark.parametrize("seed", range(5))
def test_requests_that_are_all_there_are_the_routing_game(seed: int) -> None:
    rng = np.random.default_rng(seed)
    laws = [LatencyLaw(*rng.uniform(0.1, 1, 3), n_sat=9.0) for _ in range(3)]
    game = RoutingGame(laws, np.zeros((6, 3)), 1.0)
    chosen = rng.integers(0, 3, 6).tolist()
    loads = game.loads(chosen)
    paid = np.array([laws[w](float(loads[w])) for w in chosen])
    result = calibrated(concurrent(chosen, 3, paid), laws)
    best = min(game.social_cost(p) for p in product(range(3), repeat=6))
    assert result.routing.value == pytest.approx(game.social_cost(chosen) / best, rel=1e-3)
    assert result.queueing.value == pytest.approx(1.0)


def test_the_interval_narrows_as_the_window_grows() -> None:
    widths = []
    for requests in (300, 3000):
        result = judged(simulate([DECODE] * 2, clients=16, requests=requests, noise=0.2), 2)
        widths.append(result.whole.high - result.whole.low)
    assert widths[1] < 0.6 * widths[0]


def test_loads_are_means_over_each_requests_own_stage() -> None:
    window = RequestWindow.from_times(
        arrived=[0, 0, 0],
        started=[0, 1, 2],
        prefill_done=[0, 2, 2],
        ended=[4, 4, 3],
        prefill=[-1, 2, -1],
        decode=[0, 0, 1],
    )
    np.testing.assert_allclose(window.waiting, [0, 1, 2])
    np.testing.assert_allclose(window.decode_load, [1.5, 2, 1])
    np.testing.assert_allclose(window.decode_total, [1.75, 2.5, 3])
    np.testing.assert_allclose(window.prefill_seconds, [0, 1, 0])
    np.testing.assert_allclose(window.observed, [4, 4, 3])


def test_a_window_says_what_is_wrong_with_it() -> None:
    good = concurrent([0, 1], 2, np.ones(2))
    fields = {name: getattr(good, name) for name in RequestWindow.__dataclass_fields__}
    for name, value, match in (
        ("waiting", np.zeros(3), r"give \(requests,\)"),
        ("waiting", np.array([0.0, -1.0]), "waiting must be"),
        ("decode", np.array([0, -1]), "below 0"),
        ("decode_seconds", np.array([0.0, np.nan]), "decode_seconds must be"),
        ("decode_load", np.array([0.0, 1.0]), "decode_load must be"),
    ):
        with pytest.raises(ValueError, match=match):
            RequestWindow(**{**fields, name: value})
    with pytest.raises(ValueError, match="in this order"):
        RequestWindow.from_times(
            arrived=[1], started=[0], prefill_done=[0], ended=[2], prefill=[-1], decode=[0]
        )


def test_calibration_says_what_it_lacks() -> None:
    window = concurrent([0, 1], 2, np.ones(2))
    with pytest.raises(ValueError, match="no law"):
        calibrated(window, [DECODE])
    with pytest.raises(ValueError, match="needs prefill_laws"):
        calibrated(window, [DECODE] * 3, prefill_workers=[2])


@pytest.mark.parametrize(
    ("workers", "seconds", "count", "paper", "within"),
    [
        (2, 5.53, 200, 18.7, 0.01),  # 340B 1P/2D, C = 64 and 96
        (2, 5.71, 200, 19.5, 0.015),  # C = 32
        (2, 4.98, 29, 84.4, 0.03),  # C = 1: only 29 requests completed
        (5, 1.905, 200, 14.7, 0.06),  # 70B 1P/5D, C = 32: window and eps fit this row less well
        (2, 2.17, 200, 7.47, 0.02),  # 70B 1P/2D, C = 64
    ],
)
def test_the_legacy_index_is_the_papers_table(
    workers: int, seconds: float, count: int, paper: float, within: float
) -> None:
    assert legacy_index([seconds] * count, workers) == pytest.approx(paper, rel=within)


def test_the_legacy_optimum_is_a_constant_of_the_fleets_size() -> None:
    assert legacy_optimum(2, 200) / 200 == pytest.approx(0.296, abs=1e-3)
    assert 0.1225 <= legacy_optimum(5, 200) / 200 <= 0.129
    assert legacy_index([9.0] * 300, 2) == legacy_index([5.0] * 100 + [9.0] * 200, 2)


def test_the_legacy_assignment_of_equal_rows_takes_the_cheapest_copies() -> None:
    k = np.arange(1, 76)
    column = 0.005 * k + 0.02 + 0.01 / np.maximum(64 - k, 0.4) ** 2
    assert legacy_optimum(2, 150) == pytest.approx(np.sort(np.tile(column, 2))[:150].sum())
