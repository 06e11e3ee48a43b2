"""The price of a claim: what it saves the queue against cache that another worker has."""

import numpy as np
import pytest

from pigou.control.pull_queue.claim_price import ClaimLoad, Seconds, best_claim, claim_values


def cost(service: Seconds, age: Seconds, free: Seconds, toll: float, skip: int = -1) -> float:
    """Sum of the costs of list scheduling with a rise of 0.7, written out."""
    busy, total = free.copy(), 0.0
    for i, row in enumerate(service):
        if i == skip:
            continue
        worker = int(np.argmin(busy + row + toll * row))
        busy[worker] += row[worker]
        time = age[i] + busy[worker]
        total += time + 0.7 * time**2 / 2 + toll * (row[worker] - row.min())
    return total


@pytest.mark.parametrize("seed", range(20))
def test_a_value_is_what_leaving_costs_more_than_taking(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts, workers = int(rng.integers(1, 7)), int(rng.integers(2, 5))
    service = rng.uniform(0.01, 1.0, (prompts, workers))
    age, free = rng.uniform(0, 1, prompts), rng.uniform(0, 1, workers)
    own = int(rng.integers(workers))
    values = claim_values(service, age, own, ClaimLoad(free, arrivals=3.0, rise=0.7, toll=0.5))
    left = free.copy()
    left[own] = max(free[own], np.delete(free, own).min())
    toll = 0.5 * 3.0 * (free.sum() + service.min(axis=1).sum()) / workers / workers
    for i in range(prompts):
        after = free.copy()
        after[own] += service[i, own]
        time = age[i] + after[own]
        taken = time + 0.7 * time**2 / 2 + toll * (service[i, own] - service[i].min())
        expected = cost(service, age, left, toll) - taken - cost(service, age, after, toll, i)
        assert values[i] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_equal_prompts_go_in_their_order() -> None:
    values = claim_values(np.ones((4, 3)), np.zeros(4), 1, ClaimLoad(np.array([1.0, 0.0, 2.0])))
    assert best_claim(values) == 0


def test_a_prompt_goes_where_its_prefix_is_while_others_wait_for_nobody() -> None:
    """Worker 0 is free and has the second prompt's prefix; 1 has the first one's."""
    service = np.array([[1.0, 0.2], [0.2, 1.0]])
    values = claim_values(service, np.zeros(2), 0, ClaimLoad(np.array([0.0, 0.3])))
    assert best_claim(values) == 1


def test_a_claim_is_worth_it_once_the_other_worker_is_busy_for_longer_than_computing_anew() -> None:
    def value(busy_s: float) -> float:
        load = ClaimLoad(np.array([0.0, busy_s]))
        return claim_values(np.array([[1.0, 0.2]]), np.zeros(1), 0, load).item()

    assert value(0.5) < 0 < value(1.0)
    assert value(0.8) == pytest.approx(0.0)


def test_the_toll_on_what_is_computed_twice_grows_with_arrivals() -> None:
    service, free = np.array([[1.0, 0.2]]), np.array([0.0, 1.0])
    few, many = (
        claim_values(service, np.zeros(1), 0, ClaimLoad(free, arrivals)).item()
        for arrivals in (0.0, 2.0)
    )
    assert few - many == pytest.approx(0.8 * 2.0 * (1.0 + 0.2) / 4)


def test_one_of_idle_workers_takes_a_prompt_that_only_a_busy_one_has_cached() -> None:
    """None leaves it to another that is no better off, whatever the toll."""
    service = np.array([[0.042, 0.045, 0.045]])
    load = ClaimLoad(np.array([0.04, 0.0, 0.0]), arrivals=30.0)
    assert best_claim(claim_values(service, np.zeros(1), 1, load)) == 0


def test_a_lone_worker_takes_the_shortest_prompt_first() -> None:
    values = claim_values(np.array([[1.0], [0.2]]), np.zeros(2), 0, ClaimLoad(np.zeros(1)))
    assert best_claim(values) == 1
