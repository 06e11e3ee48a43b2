"""Objectives: which class a request is of, and what counts as inside."""

from __future__ import annotations

import math

import msgspec
import pytest

from pigou.config import ConfigError
from pigou.control.planner.config import PlannerConfig, RequestClassConfig
from pigou.objectives import AttainmentCounter, Objectives, Slo, WorkloadClass


def test_the_first_class_of_which_all_parts_fit_is_a_requests_own() -> None:
    objectives = Objectives(
        None,
        (
            WorkloadClass(name="long", min_prompt_tokens=1000),
            WorkloadClass(name="ann", key="ann", model="m"),
            WorkloadClass(name="gold", header="x-class=gold"),
        ),
    )
    assert objectives.names == ("long", "ann", "gold", "")
    assert objectives.name_of("ann", 1000, model="m") == "long"
    assert objectives.name_of("ann", 10, model="m") == "ann"
    assert objectives.name_of("ann", 10, {"x-class": "gold"}, "other") == "gold"
    assert objectives.name_of("bob", 10) == ""


def test_without_an_objective_what_is_done_is_inside() -> None:
    objectives = Objectives(None, (WorkloadClass(name="a", slo=Slo(ttft_s=1.0)),))
    assert objectives.attained("", 1e9, 1e9)
    assert objectives.attained("a", 1.0, None)
    assert not objectives.attained("a", 1.1, None)


def test_the_share_is_of_offered_requests() -> None:
    counter = AttainmentCounter(Objectives(Slo(ttft_s=1.0)))
    assert counter.document()["attained"] == 1.0  # nothing was offered
    for inside in (True, False, False, True):
        counter.add("", inside)
    document = counter.document()
    assert document == {"ttft_s": 1.0, "itl_s": None, "percentile": 95.0, "attained": 0.5}


def test_a_class_is_read_from_options_and_its_header_in_any_case() -> None:
    config = msgspec.convert({"name": "g", "ttft": 0.5, "header": "X-Class=Gold"},
                             RequestClassConfig)  # fmt: skip
    assert config.workload_class.header == "x-class=Gold"
    assert config.workload_class.slo == Slo(ttft_s=0.5, itl_s=math.inf)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_workers": 3}, "give --planner too"),
        ({"start_up": 3.0}, "give --planner too"),
        ({"interval_s": 0.0}, "interval_s is 0.0"),
        ({"slo": "ttft=0"}, "ttft_s is 0"),
        ({"slo": "fast=1"}, "write ttft=500ms,itl=40ms"),
    ],
)
def test_what_no_planner_can_use_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match=message):
        _ = msgspec.convert(values, PlannerConfig).objectives
