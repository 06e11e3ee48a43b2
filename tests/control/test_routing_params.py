"""Laws of the parameters of routing policies, and of their overrides."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
from routing_fleets import PROMPT, alone

from pigou.config import ConfigError, ControlConfig
from pigou.control.messages import Queue, Route, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.control.routing.policy import GROUP, load, override, params_of
from pigou.control.routing.view import FleetView
from pigou.request import Request, Role, Worker

NAMES = sorted(entry_points(group=GROUP).names)


@pytest.mark.parametrize("name", NAMES)
def test_the_entry_point_is_the_name(name: str) -> None:
    assert type(load(name)).name == name  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_parameter_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="warp is no parameter of the routing policy; it has: "):
        load(name, {"warp": 9.0})


def test_an_unknown_policy_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'best'; it must be one of: .*dynamo.*toll"):
        load("best")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dynamo-paper", {"overlap_weight": -1.0}),
        ("dynamo-paper", {"overlap_weight": float("nan")}),
        ("dynamo", {"overlap_score_credit_decay": -0.1}),
        ("dynamo", {"prefill_load_scale": float("inf")}),
        ("lmetric", {"port": "nginx"}),
        ("sglang-cache-aware", {"cache_threshold": 1.5}),
        ("sglang-cache-aware", {"balance_abs_threshold": 1.5}),
        ("llm-d", {"peak_prefill_throughput": 0.0}),
        ("llm-d", {"exploration_probability": 2.0}),
        ("llm-d-blend", {"max_model_len": 0}),
        ("aibrix-prefix", {"standard_deviation_factor": -1.0}),
        ("ray-prefix", {"match_rate_threshold": -0.5}),
        ("mooncake", {"balancing_threshold": 0.5}),
        ("dynamo-conditional", {"eff_isl_ratio_threshold": 7.0}),
        ("dynamo-conditional", {"policy": "sometimes"}),
        ("llm-d-conditional", {"non_cached_tokens": -1}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        load(name, values)


EXTREMES = (float("nan"), float("inf"), -1e308, -1.0, 0.0, 1.0, 1e9, 1e308, 2**63)


@pytest.mark.parametrize("name", NAMES)
def test_no_parameter_that_is_taken_makes_a_cost_that_is_no_number(name: str) -> None:
    for field, default in params_of(load(name)).items():
        for value in () if isinstance(default, str) else EXTREMES:
            kind = int(value) if isinstance(default, int) and value % 1 == 0 else value
            try:
                plane = ControlPlane(ControlConfig(policy=name, params={field: kind}))
            except ConfigError:
                continue
            for role in Role:
                plane.observe(WorkerUp(Worker(role.value, "u", role)), 0)
            for i in range(4):
                found = plane.submit(Request(f"r{i}", 500 * i + 8, 4), i)
                assert isinstance(found, Route | Queue), f"{field} is {kind}"


@pytest.mark.parametrize("name", NAMES)
def test_every_default_can_be_given(name: str) -> None:
    values = dict(params_of(load(name)))
    assert params_of(load(name, values)) == values


def test_a_whole_number_may_come_as_a_float() -> None:
    """Headers carry numbers, all of them floats."""
    policy = override(load("sglang-cache-aware"), {"balance_abs_threshold": 8.0})
    assert params_of(policy)["balance_abs_threshold"] == 8


def test_an_override_leaves_the_policy_as_it_was() -> None:
    policy, fleet = load("dynamo-paper"), FleetView.of(2, overlap=[10, 0])
    other = override(policy, {"overlap_weight": 0.0})
    assert other.costs(PROMPT, fleet, alone(2)) == pytest.approx([0, 0])
    assert policy.costs(PROMPT, fleet, alone(2)) == pytest.approx([53, 63])


@pytest.mark.parametrize(
    ("name", "given", "values"),
    [
        ("llm-d-blend", {}, {"queue": 2.5}),
        ("llm-d-conditional", {"inner": "round-robin"}, {"non_cached_tokens": 3}),
    ],
)
def test_an_override_shares_turns_and_draws(
    name: str, given: dict[str, Any], values: dict[str, Any]
) -> None:
    policy, fleet, got = load(name, given), FleetView.of(4), []
    for turn in range(8):
        asked = override(policy, values) if turn % 2 else policy
        got.append(int(asked.costs(PROMPT, fleet, alone(4)).argmin()))
    assert got == [0, 1, 2, 3] * 2


def test_a_request_sets_parameters_for_itself_alone() -> None:
    plane = ControlPlane(ControlConfig(policy="dynamo-paper"))
    for name in ("a", "b"):
        plane.observe(WorkerUp(Worker(name, f"http://{name}")), 0)
    hashes = np.ones((4, 2), dtype=np.uint64)
    costs = []
    for weight in (None, 5.0, 0.0, None):
        overrides = {} if weight is None else {"overlap_weight": weight}
        request = Request(f"r{len(costs)}", 64, 5, hashes=hashes, overrides=overrides)
        decision = plane.submit(request, 0)
        assert isinstance(decision, Route)
        costs.append(decision.choice.cost)
    # 4 blocks of prefill, and 0, 0, 4 or 4 blocks of streams on the idler worker.
    assert costs == pytest.approx([4, 20, 4, 8])
