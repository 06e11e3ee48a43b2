"""Factors of links: by distance class before transfers are seen, by pair of hosts after."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.control.latency_model.estimates import PRIOR_TRANSFER, Estimates
from pigou.control.latency_model.link_factors import LinkFactors
from pigou.control.latency_model.model import LatencyModel
from pigou.control.router import candidates
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import SECOND, Location, Request

HERE = Location("h0", "r0", "a")
SAME_RACK = Location("h1", "r0", "a")
OTHER_RACK = Location("h2", "r1", "a")
OTHER_ZONE = Location("h3", "r0", "b")
UNKNOWN = Location()


def links_of(*locations: Location) -> LinkFactors:
    links = LinkFactors()
    for location in locations:
        links.add_worker(location)
    return links


def test_the_prior_is_the_distance_class() -> None:
    links = links_of(HERE, HERE, SAME_RACK, OTHER_RACK, OTHER_ZONE, UNKNOWN)
    factors = [links.factor(0, row) for row in range(6)]
    assert factors == pytest.approx([0.25, 0.25, 1.0, 4.0, 40.0, 1.0])


def test_what_labels_do_not_tell_counts_as_within_a_rack() -> None:
    links = links_of(HERE, Location("x"), Location("y"), Location("w", "", "a"), Location("x"))
    assert [links.factor(0, row) for row in (1, 2, 3)] == pytest.approx([1.0, 1.0, 1.0])
    assert links.factor(1, 2) == pytest.approx(1.0)
    assert links.factor(1, 4) == pytest.approx(0.25)


def test_a_measured_pair_leaves_its_class() -> None:
    links = links_of(HERE, SAME_RACK, OTHER_RACK)
    for n in range(40):
        links.observe(0, 2, 12.0, 1.0, n * SECOND)
    assert links.factor(0, 2) == pytest.approx(12.0, rel=0.1)
    assert links.factor(0, 1) == pytest.approx(1.0)


def test_other_pairs_of_a_class_follow_those_that_were_seen() -> None:
    links = links_of(HERE, OTHER_RACK, Location("h9", "r9", "a"))
    for n in range(40):
        links.observe(0, 1, 12.0, 1.0, n * SECOND)
    assert 8.0 < links.factor(0, 2) < 12.5


def test_one_slow_transfer_moves_a_pair_by_a_bounded_factor() -> None:
    links = links_of(HERE, SAME_RACK)
    links.observe(0, 1, 1e6, 1.0, SECOND)
    assert links.factor(0, 1) < np.e


def test_a_pair_that_is_avoided_is_forgiven() -> None:
    links = links_of(HERE, SAME_RACK, OTHER_RACK)
    for n in range(10):
        links.observe(0, 1, 8.0, 1.0, n * SECOND)
    for n in range(10, 30):  # others of the class are as they should be
        links.observe(1, 0, 1.0, 1.0, n * SECOND)
    slow = links.factor(0, 1)
    links.table(20_000 * SECOND)
    assert links.factor(0, 1) < 0.6 * slow


def test_the_latency_model_learns_pairs_from_transfers() -> None:
    model = LatencyModel()
    for location in (HERE, SAME_RACK, OTHER_RACK):
        model.add_worker(location=location)
    now = SECOND
    for n in range(200):
        tokens = 1000 + 500 * (n % 7)
        source, factor = (1, 1.0) if n % 2 else (2, 10.0)
        took = int((0.004 + 2e-6 * factor * tokens) * SECOND)
        model.transferred(0, tokens, now, now + took, source)
        now += SECOND
    model.sample(now)
    known = model.estimates(now)
    assert known.links is not None
    for row, factor in ((1, 1.0), (2, 10.0)):
        link = known.links.factors[known.links.hosts[row], known.links.hosts[0]]
        seconds = known.transfer_base[0] + known.transfer_token[0] * link * 2000
        assert seconds == pytest.approx(0.004 + 2e-6 * factor * 2000, rel=0.05)


def split_view(*locations: Location) -> FleetView:
    """The first decodes, the others prefill."""
    workers = len(locations)
    links = links_of(*locations)
    decodes = np.arange(workers) == 0
    estimates = Estimates(Estimates.prior(workers).table, links.table(0))
    return FleetView.of(workers, decodes=decodes, prefills=~decodes, estimates=estimates)


def test_the_toll_charges_a_transfer_by_its_distance() -> None:
    fleet = split_view(HERE, SAME_RACK, OTHER_RACK)
    pairs = Candidates(np.array([1, 2], dtype=np.int32), np.array([0, 0], dtype=np.int32))
    costs = Toll().parts(Request("r", 4000, 10), fleet, pairs)["transfer"]
    base_s, token_s = PRIOR_TRANSFER
    assert costs.tolist() == pytest.approx([base_s + token_s * 4000, base_s + token_s * 16000])


def test_without_labels_all_pairs_cost_the_same() -> None:
    fleet = split_view(UNKNOWN, UNKNOWN, UNKNOWN)
    pairs = Candidates(np.array([1, 2], dtype=np.int32), np.array([0, 0], dtype=np.int32))
    costs = Toll().parts(Request("r", 4000, 10), fleet, pairs)["transfer"]
    assert costs[0] == costs[1]


def test_the_idlest_prefill_worker_of_each_rack_is_a_candidate() -> None:
    far = [Location(f"f{i}", "r9", "a") for i in range(6)]
    fleet = split_view(HERE, *far, SAME_RACK)
    fleet.prefill_tokens[:] = [0, 0, 0, 0, 0, 0, 0, 5000]
    everywhere = np.ones(8, dtype=np.bool_)
    pairs = candidates(Request("r", 4000, 10), fleet, everywhere, everywhere)
    assert 7 in pairs.prefill
    assert len(set(pairs.prefill.tolist()) - {-1}) == 5
