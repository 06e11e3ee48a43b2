"""Laws of what is shown of the Price of Anarchy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from pigou.config import ControlConfig
from pigou.control.lengths import LengthScore
from pigou.control.messages import WorkerUp
from pigou.control.plane import ControlPlane, Status
from pigou.control.price_of_anarchy import PoAEstimate, Split
from pigou.games.price_of_anarchy import Estimate, PriceOfAnarchy
from pigou.gateway.fleet_status import FleetStatus, WorkerRow
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.prices import game_view, price_families
from pigou.metric_rows import Scraped
from pigou.request import Worker

GAIN = Estimate(1.5, 1.25, 2.0)
FOUND = PoAEstimate(
    PriceOfAnarchy(GAIN, Estimate(1.0, 1.0, 1.0), GAIN, Estimate(1.0, 1.0, 1.0), (0, 1)),
    3.0,
    40,
    {},
    Split(("w", "v"), ("u",), ("v",), 0.5),
)


def plane() -> ControlPlane:
    made = ControlPlane(ControlConfig())
    made.observe(WorkerUp(Worker("w", "u")), 0)
    return made


def status(assessment: PoAEstimate | None, why: str = "") -> Status:
    return replace(plane().status(1), poa=assessment, unknown=why)


def metrics(found: Status) -> str:
    registry = CollectorRegistry()
    registry.register(Scraped(lambda: price_families(found, [])))
    return generate_latest(registry).decode()


def test_what_is_unknown_is_null_with_its_reason() -> None:
    told = game_view(status(None, "nothing ended"))
    assert (told["poa"], told["poa_split"], told["poa_unknown"]) == (None, None, "nothing ended")
    page = metrics(status(None, "nothing ended"))
    assert "pigou_game_poa_known 0.0" in page
    assert "pigou_game_poa{" not in page


def test_what_is_known_has_its_interval_and_the_better_split_its_gain() -> None:
    told: dict[str, Any] = game_view(status(FOUND))
    assert told["poa_unknown"] is None
    assert told["poa"]["whole"] == {"value": 1.5, "low": 1.25, "high": 2.0}
    assert told["poa_split"] == {
        "prefill": ["w", "v"],
        "decode": ["u"],
        "moves": ["v"],
        "saves_seconds_per_request": 0.5,
        "gain": {"value": 1.5, "low": 1.25, "high": 2.0},
        "certain": True,
    }
    page = metrics(status(FOUND))
    assert "pigou_game_poa_known 1.0" in page
    assert "pigou_game_split_saves_seconds 0.5" in page
    assert 'pigou_game_poa_low{part="whole"} 1.25' in page


def test_a_worker_of_the_fleet_that_is_not_up_makes_it_unknown() -> None:
    made, rows = plane(), [WorkerRow(id="w", url="", role="both", state="up", kind="local")]
    made.status = lambda now: status(FOUND)  # type: ignore[method-assign, assignment]
    fleet_status = FleetStatus(PlaneDriver(made), lambda: rows)
    assert fleet_status.prices()[0].poa is FOUND
    for state in ("starting", "down", "backoff"):
        rows[1:] = [WorkerRow(id="other", url="", role="both", state=state, kind="attached")]
        found, prices = fleet_status.prices()
        assert found.poa is None
        assert "other" in found.unknown
        assert all(math.isnan(each.poa) for each in prices)


def test_a_workers_ratio_is_shown_with_its_interval_or_not_at_all() -> None:
    rows = [WorkerRow(id="w", url="", role="both", state="up", kind="local")]
    ranges: dict[str, tuple[float, float]]
    for ranges in ({}, {"w": (1.1, 1.4)}):
        made = plane()
        estimate = replace(FOUND, by_worker={"w": 1.2}, ranges=ranges)
        made.status = lambda now, found=estimate: status(found)  # type: ignore[method-assign, misc]
        fleet_status = FleetStatus(PlaneDriver(made), lambda: rows)
        (row,) = fleet_status.view()["workers"]
        registry = CollectorRegistry()
        shown = fleet_status.prices()
        registry.register(Scraped(partial(price_families, *shown)))
        page = generate_latest(registry).decode()
        if ranges:
            assert (row["poa"], row["poa_low"], row["poa_high"]) == (1.2, 1.1, 1.4)
            assert 'pigou_game_worker_poa_low{worker="w"} 1.1' in page
        else:
            assert (row["poa"], row["poa_low"]) == (None, None)
            assert "pigou_game_worker_poa{" not in page


def test_predicted_lengths_show_their_error_and_rank_correlation() -> None:
    assert "pigou_length" not in metrics(status(None))
    score = LengthScore()
    for predicted, tokens in ((10, 10), (20, 50), (100, 90)):
        score.note(predicted, tokens)
    page = metrics(replace(status(None), lengths=score))
    assert "pigou_length_rank_correlation 1.0" in page
    assert 'pigou_length_error_ratio_bucket{le="1.25"} 2.0' in page
    assert "pigou_length_error_ratio_count 3.0" in page
