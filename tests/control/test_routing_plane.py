"""Every routing policy behind the real control plane, over fleets of ideal workers."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import entry_points

import pytest
from model_fleet import Ideal, ModelFleet, poisson

from pigou.config import ControlConfig
from pigou.control.plane import ControlPlane
from pigou.control.routing.policy import GROUP
from pigou.games.latency import LatencyLaw
from pigou.request import Role

LAW = LatencyLaw(0.0008, 0.02)
NAMES = sorted(entry_points(group=GROUP).names)
#: They choose between local and remote prefill.
CHOOSING = {"toll", "dynamo-conditional", "llm-d-conditional"}


def served(name: str, temperature: float, *roles: Role) -> tuple[ModelFleet, Counter[str]]:
    config = ControlConfig(policy=name, temperature=temperature)
    workers: dict[Role, list[Ideal]] = {}
    for role in roles:
        workers.setdefault(role, []).append(Ideal(LAW))
    model = ModelFleet(ControlPlane(config), workers)
    model.run(poisson(6, 14, 4, (100, 1200), (10, 40)))
    used: Counter[str] = Counter()
    for route in model.routes.values():
        used[route.choice.decode] += 1
        used[route.choice.prefill or "local"] += 1
    return model, used


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_served_by_one_pool(name: str, temperature: float) -> None:
    model, used = served(name, temperature, *[Role.BOTH] * 3)
    assert len(model.seconds) == len(model.requests)
    assert used["local"] == len(model.requests)
    assert min(used[f"both-{row}"] for row in range(3)) > len(model.requests) / 10


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_served_by_two_pools(name: str, temperature: float) -> None:
    pools = [Role.PREFILL] * 2 + [Role.DECODE] * 2
    model, used = served(name, temperature, *pools)
    total = len(model.requests)
    assert len(model.seconds) == total
    assert min(used[f"decode-{row}"] for row in range(2)) > total / 10
    if name not in CHOOSING and (temperature == 0.0 or name != "least-loaded"):
        assert used["local"] == 0
        assert min(used[f"prefill-{row}"] for row in range(2)) > total / 10
