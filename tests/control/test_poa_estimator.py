"""The parts of the Price of Anarchy mean what they say, on windows of whole fleets."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from model_fleet import Ideal, ModelFleet, poisson

from pigou.config import ControlConfig
from pigou.control.plane import ControlPlane
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.control.routing.policy import RoutingPolicy
from pigou.games.latency import LatencyLaw
from pigou.request import SECOND, Role

LAW = LatencyLaw(0.0008, 0.02)


class First:
    """Sends everything to the first decode worker."""

    def costs(self, request, fleet, candidates):  # type: ignore[no-untyped-def]
        return candidates.decode.astype(float)


def last(
    fleet: dict[Role, list[Ideal]], rate: float, policy: RoutingPolicy | str, seconds: float = 90
) -> tuple[PoAEstimate, ModelFleet]:
    if isinstance(policy, str):
        plane = ControlPlane(ControlConfig(policy=policy))
    else:
        plane = ControlPlane(ControlConfig(), policy)
    model = ModelFleet(plane, fleet)
    model.run(poisson(rate, seconds, 2, (200, 800), (50, 150)), until=int(seconds * SECOND))
    found = plane.status(model.now).poa
    assert found is not None
    return found, model


@pytest.mark.parametrize("policy", ["least-loaded", "toll"])
@pytest.mark.parametrize("rate", [2.0, 8.0])
def test_identical_workers_under_good_routing_have_a_price_of_one(policy: str, rate: float) -> None:
    found, _ = last({Role.BOTH: [Ideal(LAW), Ideal(LAW), Ideal(LAW)]}, rate, policy)
    for part in (found.anarchy.whole, found.anarchy.routing, found.anarchy.prefill_decode):
        assert part.value == pytest.approx(1.0, abs=0.02)


def test_all_on_one_worker_moves_the_routing_part_alone() -> None:
    found, model = last({Role.BOTH: [Ideal(LAW), Ideal(LAW), Ideal(LAW)]}, 4, First())
    present = 4 * float(np.mean(list(model.seconds.values())))

    def together(n: float) -> float:
        """Seconds of n requests that share a worker: own prompt, those of the others, tokens."""
        prompt, tokens = 0.002 + 500e-4, 99
        return tokens * LAW(max(n, 1.0)) + max(n, 1.0) * prompt

    grid = np.arange(0, present + 1e-9, present / 24)
    least = min(
        sum(part * together(part) for part in (x, y, present - x - y)) / present
        for x, y in product(grid, grid)
        if x + y <= present
    )
    ratio = together(present) / least
    assert found.anarchy.routing.value == pytest.approx(ratio, rel=0.05)
    assert found.anarchy.prefill_decode.value == pytest.approx(1.0, abs=0.02)
    assert found.anarchy.queueing.value == pytest.approx(1.0, abs=0.05)


def test_a_starved_prefill_pool_moves_the_prefill_decode_part_alone() -> None:
    slow = [Ideal(LAW, 6e-4) for _ in range(4)]
    found, _ = last({Role.PREFILL: slow[:1], Role.DECODE: slow[1:]}, 2.8, "least-loaded")
    assert found.anarchy.prefill_decode.value > 1.1
    assert found.anarchy.routing.value == pytest.approx(1.0, abs=0.02)
    assert found.anarchy.queueing.value == pytest.approx(1.0, abs=0.05)


def test_an_unequal_fleet_is_measured_by_its_own_laws() -> None:
    slow = Ideal(LatencyLaw(0.0024, 0.06))
    found, _ = last({Role.BOTH: [Ideal(LAW), slow]}, 3, "least-loaded")
    priced, _ = last({Role.BOTH: [Ideal(LAW), slow]}, 3, "toll")
    assert found.anarchy.routing.value > 1.05
    assert priced.anarchy.routing.value < found.anarchy.routing.value


def test_parts_multiply_to_the_whole_and_lie_in_their_intervals() -> None:
    found, _ = last({Role.BOTH: [Ideal(LAW), Ideal(LAW)]}, 4, "least-loaded")
    parts = found.anarchy
    product_ = parts.routing.value * parts.prefill_decode.value * parts.queueing.value
    assert parts.whole.value == pytest.approx(product_)
    for part in (parts.whole, parts.routing, parts.queueing):
        assert part.low <= part.value <= part.high
    assert found.legacy > 5


def test_each_workers_ratio_tells_who_is_overloaded() -> None:
    found, _ = last({Role.BOTH: [Ideal(LAW), Ideal(LAW), Ideal(LAW)]}, 4, First())
    assert len(found.by_worker) == 1  # the others computed nothing
    assert list(found.by_worker.values()) == [pytest.approx(found.anarchy.whole.value)]
    slow = Ideal(LatencyLaw(0.0024, 0.06))
    found, _ = last({Role.BOTH: [Ideal(LAW), slow]}, 4, "round-robin")
    quick, late = (found.by_worker[worker] for worker in sorted(found.by_worker))
    assert quick < found.anarchy.whole.value < late
    for worker, value in found.by_worker.items():
        low, high = found.ranges[worker]
        assert 1.0 <= low <= value <= high


def test_a_worker_that_left_is_forgotten() -> None:
    from pigou.control.messages import WorkerDown

    found, model = last({Role.BOTH: [Ideal(LAW), Ideal(LAW)]}, 4, "least-loaded")
    assert found.requests > 20
    model.plane.observe(WorkerDown("both-1"), model.now)
    status = model.plane.status(model.now)
    assert status.workers == ("both-0",)
    assert status.tolls.shape == (1,)
