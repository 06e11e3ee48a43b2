"""Laws of the live Price of Anarchy: at least 1, and unknown where too little is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_fleet import Ideal, ModelFleet, poisson

from pigou.config import ControlConfig
from pigou.control.messages import WorkerDown, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.games.latency import LatencyLaw
from pigou.games.price_of_anarchy import calibrated
from pigou.games.request_window import RequestWindow
from pigou.request import SECOND, Role, Worker

LAW = LatencyLaw(0.0008, 0.02)


def fleet(roles: dict[Role, list[Ideal]], rate: float = 4.0) -> ModelFleet:
    model = ModelFleet(ControlPlane(ControlConfig(policy="least-loaded")), roles)
    model.run(poisson(rate, 60, 2, (200, 800), (50, 150)), until=60 * SECOND)
    return model


def test_it_is_unknown_once_traffic_has_stopped_for_a_minute() -> None:
    model = fleet({Role.BOTH: [Ideal(LAW), Ideal(LAW)]})
    plane, now = model.plane, model.now
    assert plane.status(now).poa is not None
    assert plane.status(now).unknown == ""
    status = plane.status(now + 90 * SECOND)
    assert status.poa is None
    assert "0 requests ended in the last 60 s" in status.unknown
    assert plane.status(now).poa is not None, "asking changes nothing"


def test_it_is_unknown_before_enough_requests_ended() -> None:
    status = ControlPlane(ControlConfig()).status(SECOND)
    assert status.poa is None
    assert "at least 20" in status.unknown


def test_it_is_unknown_while_a_worker_is_down() -> None:
    model = fleet({Role.BOTH: [Ideal(LAW), Ideal(LAW), Ideal(LAW)]}, 8.0)
    plane, now = model.plane, model.now
    plane.observe(WorkerDown("both-1"), now)
    status = plane.status(now)
    assert status.poa is None
    assert "both-1 is down" in status.unknown
    plane.observe(WorkerUp(Worker("both-1", "u")), now)
    assert plane.status(now).unknown == ""


def test_a_better_split_is_named_with_what_it_saves() -> None:
    slow = [Ideal(LAW, 6e-4) for _ in range(4)]
    model = fleet({Role.PREFILL: slow[:1], Role.DECODE: slow[1:]}, 2.8)
    found = model.plane.status(model.now).poa
    assert found is not None
    assert found.split is not None
    assert "prefill-0" in found.split.prefill
    assert len(found.split.prefill) > 1
    assert set(found.split.prefill) | set(found.split.decode) == set(
        model.plane.status(model.now).workers
    )
    assert found.split.saves > 0.0
    assert found.anarchy.prefill_decode.low > 1.0


def test_the_present_split_is_not_offered_as_a_better_one() -> None:
    found = fleet({Role.BOTH: [Ideal(LAW), Ideal(LAW)]})
    assessment = found.plane.status(found.now).poa
    assert assessment is not None
    assert assessment.split is None


def window(data: Any, count: int) -> RequestWindow:
    times = st.lists(st.floats(0.0, 20.0), min_size=count, max_size=count)
    spans = st.lists(st.floats(0.01, 5.0), min_size=count, max_size=count)
    worker = st.lists(st.integers(0, 2), min_size=count, max_size=count)
    started = np.array(data.draw(times))
    waited, ran = (np.array(data.draw(spans)) for _ in range(2))
    return RequestWindow.from_times(
        arrived=started - waited,
        started=started,
        prefill_done=started,
        ended=started + ran,
        prefill=np.full(count, -1),
        decode=np.array(data.draw(worker)),
        decode_work=np.array(data.draw(spans)),
    )


@given(st.data(), st.integers(2, 30), st.floats(0.0, 0.05), st.floats(0.001, 2.0))
def test_no_part_of_it_and_no_end_of_its_interval_is_below_one(
    data: Any, count: int, slope: float, base: float
) -> None:
    laws = [LatencyLaw(slope * k, base * k) for k in (1, 2, 3)]
    found = calibrated(window(data, count), laws, draws=50)
    for part in (found.whole, found.routing, found.prefill_decode, found.queueing):
        assert part.value >= 1.0
        assert part.low >= 1.0
        assert part.high >= part.low
    product = found.routing.value * found.prefill_decode.value * found.queueing.value
    assert found.whole.value == pytest.approx(product)
    assert all(each is None or each >= 1.0 for each in found.workers)


def test_the_interval_is_the_same_each_time() -> None:
    at = np.arange(40.0)
    same = RequestWindow.from_times(
        arrived=at, started=at, prefill_done=at, ended=at + 2.0 + at % 3, prefill=np.full(40, -1),
        decode=np.arange(40) % 2,
    )  # fmt: skip
    assert calibrated(same, [LAW, LAW]) == calibrated(same, [LAW, LAW])
