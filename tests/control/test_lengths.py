"""Laws of predicted output lengths, and of the order that goes by them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ConfigError, ControlConfig
from pigou.control.admission.queue_order import QueuedRequest, load
from pigou.control.lengths import (
    LEXICAL,
    MAX_CHARACTERS,
    LengthModel,
    Online,
    OnlineParams,
    Oracle,
    Prediction,
    kendall_tau,
    lexical,
    noisy_lengths,
)
from pigou.control.lengths import load as load_lengths
from pigou.control.messages import Ended, Queue, Route, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.view import Candidates, FleetView
from pigou.games.queueing import cobham_waits, mgc_wait
from pigou.request import NEVER, SECOND, FinishReason, Request, Worker

NO_LIMIT = NEVER


def request(id_: str = "r", tenant: str = "", template: int = 0, **fields: Any) -> Request:
    keys = {16: np.array([template, template + 1], dtype=np.uint64)} if template else {}
    fields = {"prompt": 1000, "max_tokens": NO_LIMIT} | fields
    return Request(id_, tenant=tenant, keys=keys, **fields)


def taught(*lessons: tuple[Request, int], times: int = 40) -> Online:
    online = Online()
    for _ in range(times):
        for asked, tokens in lessons:
            online.observe(asked, tokens)
    return online


def mean_completion(order: str, lengths: list[float]) -> float:
    """Serve one at a time, all having come at once; return the mean time of the ends."""
    queue = load({"order": order})
    for serial, length in enumerate(lengths):
        asked = Request(f"r{serial}", 1, 8)
        queue.add(QueuedRequest(asked, 0, 1, length=length, serial=serial))
    now, ends = 0.0, list[float]()
    while (first := queue.first(0)) is not None:
        queue.taken(first, 1)
        now += first.length
        ends.append(now)
    return sum(ends) / len(ends)


def test_shortest_remaining_completes_10_1_1_after_5_on_average_and_fcfs_after_11() -> None:
    assert mean_completion("fcfs", [10, 1, 1]) == 11
    assert mean_completion("shortest-remaining", [10, 1, 1]) == 5


def test_cobhams_waits_of_two_classes() -> None:
    rates, means = [0.5, 0.05], [0.5, 8.0]
    short, long = cobham_waits(rates, means)
    assert (short, long) == pytest.approx((4.43333, 12.66667), abs=1e-4)
    assert (0.5 * short + 0.05 * long) / 0.55 == pytest.approx(5.18182, abs=1e-4)
    mean, square = 0.65 / 0.55, 2 * (0.5 * 0.25 + 0.05 * 64.0) / 0.55
    fcfs = mgc_wait(1, 0.65, square / mean**2 - 1.0, mean)
    assert fcfs == pytest.approx(9.5)
    assert 0.25 * short + 0.4 * long == pytest.approx(0.65 * fcfs)  # conservation law
    with pytest.raises(ValueError, match=r"load is 1\.2"):
        cobham_waits([1.2], [1.0])
    with pytest.raises(ValueError, match="one of 0 or more a class"):
        cobham_waits([0.1, 0.1], [1.0])


RATES, MEANS = (0.5, 0.05), (0.5, 8.0)


def two_classes(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return arrivals (s), classes and exponential services (s) of the M/G/1 above."""
    rng = np.random.default_rng(6)
    arrivals = np.cumsum(rng.exponential(1.0 / sum(RATES), count))
    kinds = (rng.random(count) < RATES[1] / sum(RATES)).astype(int)
    return arrivals, kinds, rng.exponential(1.0, count) * np.array(MEANS)[kinds]


def waits(order: str, arrivals: np.ndarray, services: np.ndarray, predicted: Any) -> np.ndarray:
    """Return the waits at one server, without ageing and weight of prompts."""
    params = {"ageing": 1e-6, "input_weight": 0.0} if order == "shortest-remaining" else {}
    queue, waited, now, came = load({"order": order, **params}), np.zeros(len(arrivals)), 0.0, 0
    for _ in arrivals:
        while True:
            while came < len(arrivals) and arrivals[came] <= now:
                asked = Request(str(came), 1 + came % 7, 8)
                since, length = round(arrivals[came] * SECOND), float(predicted[came])
                queue.add(QueuedRequest(asked, since, asked.prompt, length=length, serial=came))
                came += 1
            if (first := queue.first(0)) is not None:
                break
            now = float(arrivals[came])
        queue.taken(first, 1)
        waited[first.serial] = now - arrivals[first.serial]
        now += float(services[first.serial])
    return waited


def test_two_classes_wait_in_the_order_as_cobham_has_it() -> None:
    arrivals, kinds, services = two_classes(30_000)
    fcfs = waits("fcfs", arrivals, services, services)
    assert fcfs.mean() == pytest.approx(9.5, rel=0.1)
    made = waits("shortest-remaining", arrivals, services, np.array(MEANS)[kinds])
    assert made[kinds == 0].mean() == pytest.approx(4.4333, rel=0.1)
    assert made[kinds == 1].mean() == pytest.approx(12.6667, rel=0.1)
    assert made.mean() / fcfs.mean() == pytest.approx(5.1818 / 9.5, rel=0.05)


def test_a_random_prediction_is_fcfs_and_the_wait_falls_with_the_rank_correlation() -> None:
    arrivals, _, services = two_classes(15_000)
    tokens = np.ceil(100 * services).astype(int).tolist()
    fcfs = waits("fcfs", arrivals, services, tokens).mean()
    ratio = {
        tau: waits("shortest-remaining", arrivals, services, noisy_lengths(tokens, tau, 8)).mean()
        / fcfs
        for tau in (0.0, 0.3, 0.6, 1.0)
    }
    assert ratio[0.0] == pytest.approx(1.0, abs=0.05)
    assert ratio[0.0] - 0.1 > ratio[0.3] > ratio[0.6] + 0.1 > ratio[1.0] + 0.1
    assert ratio[1.0] < 0.5


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 3000)), max_size=30))
@settings(max_examples=examples(40), deadline=None)
def test_a_request_is_overtaken_at_most_its_length_over_the_ageing_later(
    others: list[tuple[int, int]],
) -> None:
    ageing, length = 100.0, 250
    queue = load({"order": "shortest-remaining", "ageing": ageing})
    first = QueuedRequest(request("first"), 0, 1, length=length)
    queue.add(first)
    for serial, (ms, tokens) in enumerate(others, 1):
        since = ms * SECOND // 1000
        queue.add(QueuedRequest(request(f"r{serial}"), since, 1, length=tokens, serial=serial))
    while (head := queue.first(0)) is not first:
        assert head is not None
        assert head.since <= (length - 1) / ageing * SECOND
        queue.taken(head, 1)


TENANTS = {"a": 300, "b": 20, "c": 4000}
LIMITED = st.lists(st.tuples(st.sampled_from(list(TENANTS)), st.integers(1, 10**6)), max_size=12)


def routed(asked: list[tuple[str, int]]) -> list[str]:
    """Return requests of tenants with declared limits in the order of their routes."""
    config = ControlConfig(
        policy="round-robin", admission={"order": "shortest-remaining"},
        lengths={"predictor": "online"}, max_inflight=1,
    )  # fmt: skip
    plane = ControlPlane(config)
    plane.tracker.lengths = taught(*((request(tenant=t), n) for t, n in TENANTS.items()))
    plane.observe(WorkerUp(Worker("w", "u")), 0)
    plane.submit(request("runs"), 1)
    order = ["runs"]
    for number, (tenant, limit) in enumerate(asked):
        asks = request(str(number), tenant=tenant, max_tokens=limit)
        assert isinstance(plane.submit(asks, 2 + number), Queue)
    for now in range(len(asked)):
        (route,) = plane.observe(Ended(order[-1], FinishReason.STOP), 100 + now)
        assert isinstance(route, Route)
        order.append(route.request)
    return order


@given(LIMITED)
@settings(max_examples=examples(15), deadline=None)
def test_declared_limits_move_nobody_in_the_queue(asked: list[tuple[str, int]]) -> None:
    assert routed(asked) == routed([(tenant, NO_LIMIT) for tenant, _ in asked])


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=6))
@settings(max_examples=examples(20), deadline=None)
def test_a_declared_limit_moves_a_price_by_no_more_than_it_cuts_off(limits: list[int]) -> None:
    """The engine enforces it, so it is no claim: more is never cheaper, what cuts nothing free."""
    online = taught((request(tenant="a"), 300), (request(tenant="a"), 500), times=200)
    candidates = Candidates(np.array([-1, -1], np.int32), np.array([0, 1], np.int32))
    toll = Toll()
    toll.recent_ttft.add(0.5)

    def price(limit: int) -> np.ndarray:
        made = online.predict(request(tenant="a", max_tokens=limit))
        fleet = FleetView.of(
            2, output=made.mean, lengths=made, decode_requests=[0, 8], recomputed_share=[0.5, 0.1]
        )
        return toll.costs(request(max_tokens=limit), fleet, candidates)

    ascending = [*sorted(limits), NO_LIMIT]
    for low, high in pairwise(ascending):
        assert (price(low) <= price(high) * (1 + 1e-9)).all()
        if low >= 1000:
            assert price(low) == pytest.approx(price(NO_LIMIT), rel=0.02)


def test_answers_cut_short_teach_nothing_of_short_answers() -> None:
    before = taught((request(tenant="a"), 400))
    after = taught((request(tenant="a"), 400))
    for _ in range(200):
        after.observe(request(tenant="a", max_tokens=8), 8)
    assert after.predict(request(tenant="a")).rank >= 0.9 * before.predict(request(tenant="a")).rank


def test_levels_shrink_to_the_tenant_and_to_all() -> None:
    online = taught(
        (request(tenant="chat", template=7), 20), (request(tenant="chat", template=9), 900),
        (request(tenant="agent", template=7), 2000),
    )  # fmt: skip
    rank = {
        name: online.predict(made).rank
        for name, made in {
            "short": request(tenant="chat", template=7),
            "long": request(tenant="chat", template=9),
            "new template": request(tenant="chat", template=11),
            "other tenant": request(tenant="agent", template=7),
            "new tenant": request(tenant="code"),
        }.items()
    }
    assert rank["short"] < 100
    assert 250 < rank["new template"] < 700 < rank["long"] < 1200
    assert 1500 < rank["other tenant"] < 2600
    assert rank["new template"] < rank["new tenant"] < rank["other tenant"]


def test_a_distribution_has_its_quantiles_and_its_variance_under_a_limit() -> None:
    online = taught((request(), 10), (request(), 1000), times=200)
    made = online.predict(request())
    assert made.quantile(0.25) == pytest.approx(10, rel=0.2)
    assert made.quantile(0.9) == pytest.approx(1000, rel=0.2)
    assert made.mean == pytest.approx(505, rel=0.15)
    assert made.variance**0.5 == pytest.approx(495, rel=0.2)
    cut = online.predict(request(max_tokens=10))
    assert cut.mean <= 10
    assert cut.variance < 5


def test_features_of_the_text_tell_lengths_within_a_template() -> None:
    long, short = lexical("Write a detailed essay on prices."), lexical("Yes or no: is it so?")
    online = taught(
        (request(tenant="a", template=3, features=long), 800),
        (request(tenant="a", template=3, features=short), 8),
        times=100,
    )
    ranks = [
        online.predict(request(tenant="a", template=3, features=features)).rank
        for features in (long, short)
    ]
    assert ranks[0] > 3 * ranks[1]


def test_lexical_features_read_a_bounded_end_of_the_prompt() -> None:
    text = "List 3 steps?\n```python\n" * 10
    found = dict(zip(LEXICAL, lexical(text), strict=True))
    assert all(found[name] > 0 for name in ("questions", "lists", "numbers", "fences", "code"))
    assert (
        lexical("x" * 10**6 + text[-MAX_CHARACTERS:])[1:]
        == lexical("y" * (MAX_CHARACTERS - len(text)) + text)[1:]
    )
    assert len(lexical("")) == len(LEXICAL)


def test_a_waiting_request_is_predicted_once_however_often_it_is_viewed() -> None:
    plane = ControlPlane(ControlConfig(policy="round-robin", lengths={"predictor": "online"}))
    plane.observe(WorkerUp(Worker("w", "u")), 0)
    asked, again = request(), request(prompt=2000)
    first = plane.view(asked, 1).lengths
    assert plane.view(asked, 2).lengths is first
    assert plane.view(again, 3).lengths is not first  # another of the same id


def test_what_was_learned_is_read_back_and_predicts_the_same() -> None:
    features = lexical("Write a story")
    online = taught((request(tenant="a", template=3, features=features), 500), (request(), 9))
    written = msgspec.json.encode(online.model())
    model = msgspec.json.decode(written)
    again = load_lengths({"predictor": "online"}, model)
    assert isinstance(again, Online)
    for asked in (request(tenant="a", template=3, features=features), request(), request("b")):
        assert again.predict(asked).rank == pytest.approx(online.predict(asked).rank, rel=1e-3)


def test_a_model_of_another_format_and_bad_settings_are_refused() -> None:
    model = msgspec.to_builtins(Online().model(), str_keys=True)
    with pytest.raises(ConfigError, match="reads format 1"):
        load_lengths({"predictor": "online"}, model | {"format": 2})
    with pytest.raises(ConfigError, match="bin 99"):
        load_lengths({"predictor": "online"}, model | {"nodes": [("", {"99": 1.0})]})
    with pytest.raises(ConfigError, match="give lengths online"):
        load_lengths({"predictor": "mean"}, model)
    with pytest.raises(ConfigError, match="only online reads one"):
        load_lengths({"predictor": "oracle"}, model)
    with pytest.raises(ConfigError, match="tau is 2"):
        load_lengths({"predictor": "oracle", "tau": "2"}, {})
    with pytest.raises(ConfigError, match="length predictor is 'best'"):
        load_lengths({"predictor": "best"}, {})
    with pytest.raises(ConfigError, match="ageing is 0"):
        load({"order": "shortest-remaining", "ageing": "0"})


def test_nodes_stay_bounded() -> None:
    online = Online(OnlineParams(max_nodes=16))
    for number in range(200):
        online.observe(request(tenant=f"t{number}", template=number + 1), 10)
    assert len(online.model().nodes) <= 16


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.6, 1.0])
def test_noisy_lengths_have_the_rank_correlation_asked_for(tau: float) -> None:
    true = np.random.default_rng(1).lognormal(5.0, 1.0, 1000).astype(int).tolist()
    drawn = noisy_lengths(true, tau, seed=2)
    assert sorted(drawn) == sorted(true)
    found = kendall_tau(np.array(true, dtype=float), np.array(drawn, dtype=float))
    assert found == pytest.approx(tau, abs=0.04)


def test_kendalls_tau_counts_ties_as_tau_b_does() -> None:
    first, second = np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0, 4.0])
    assert kendall_tau(first, second) == pytest.approx(5 / np.sqrt(5 * 6))
    assert kendall_tau(first, np.ones(4)) == 0.0


def test_outputs_of_unknown_length_leave_room_on_a_worker() -> None:
    """Two tenants of one mean: the one whose lengths vary is admitted less often."""
    admitted = {}
    for name, lengths in {"even": (500, 500), "varied": (20, 980)}.items():
        config = ControlConfig(
            policy="round-robin", lengths={"predictor": "online"}, max_inflight_tokens=10_000
        )
        plane = ControlPlane(config)
        assert plane.tracker.lengths is not None
        for _ in range(100):
            for tokens in lengths:
                plane.tracker.lengths.observe(request(prompt=100), tokens)
        plane.observe(WorkerUp(Worker("w", "u")), 0)
        made = [plane.submit(request(str(n), prompt=100), n + 1) for n in range(40)]
        admitted[name] = sum(isinstance(decision, Route) for decision in made)
    assert 0.6 * admitted["even"] < admitted["varied"] < admitted["even"] - 1


def test_an_oracle_takes_what_its_driver_predicts() -> None:
    made = Oracle().predict(replace_request(expected=70))
    assert made == Prediction(70.0, 70.0, 0.0)


def replace_request(**fields: Any) -> Request:
    return msgspec.structs.replace(request(), **fields)


def test_a_model_file_names_its_features() -> None:
    model = msgspec.convert(msgspec.to_builtins(Online().model()), LengthModel)
    assert model.features == Online.FEATURES
    with pytest.raises(ConfigError, match="features 1"):
        Online().restore(msgspec.structs.replace(model, features=("prompt",)))


def test_a_score_counts_errors_and_ranks() -> None:
    online = taught((request(tenant="a"), 10), (request(tenant="b"), 1000), times=100)
    score = online.score
    assert score.observed == sum(score.buckets) == 200
    assert score.tau > 0.65  # two lengths: ties
    assert sum(score.buckets[:5]) > 180  # within a factor of 3
