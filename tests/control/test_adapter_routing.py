"""Routes weigh the load of a LoRA adapter, and the adapters that it pushes out."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.config import ControlConfig
from pigou.control.adapters import AdapterTable
from pigou.control.messages import AdapterReport, Ended, Route, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Role, Worker


def plane_of(workers: int, slots: int = 2, load_s: float = 0.5, **options: object) -> ControlPlane:
    """Build a plane whose workers have told their adapters: none."""
    plane = ControlPlane(ControlConfig(policy="toll", **options))  # type: ignore[arg-type]
    for index in range(workers):
        plane.observe(WorkerUp(Worker(f"w{index}", "http://x", max_seqs=64)), 0)
        plane.observe(AdapterReport(f"w{index}", slots, (), load_s), 0)
    return plane


def route(plane: ControlPlane, id: str, model: str, now: int, ends: bool = True) -> str:
    """Return the worker of a request, which ends at once."""
    made = plane.submit(Request(id, prompt=64, max_tokens=16, model=model), now)
    assert isinstance(made, Route)
    if ends:
        plane.observe(Ended(id, FinishReason.STOP), now + 1)
    return made.choice.decode


def test_requests_of_an_adapter_stay_where_it_is_loaded() -> None:
    plane = plane_of(4)
    homes: dict[str, set[str]] = {}
    for at in range(40):
        name = f"a{at % 8}"
        homes.setdefault(name, set()).add(route(plane, f"{at}", name, at * SECOND))
    assert [len(there) for there in homes.values()] == [1] * 8
    assert sorted(there.copy().pop() for there in homes.values()) == sorted(
        ["w0", "w1", "w2", "w3"] * 2
    )


def test_a_queue_longer_than_the_load_is_worth_another_copy() -> None:
    plane = plane_of(2, load_s=0.01)
    used = {route(plane, f"{at}", "hot", 1, ends=False) for at in range(40)}
    assert used == {"w0", "w1"}


def test_who_is_asked_for_least_is_evicted() -> None:
    plane = plane_of(2, slots=1)
    homes = {name: route(plane, f"{name}0", name, 0) for name in ("hot", "cold")}
    assert len(set(homes.values())) == 2
    for at in range(1, 12):
        route(plane, f"hot{at}", "hot", at * SECOND)
    assert route(plane, "new", "new", 13 * SECOND) == homes["cold"]


def test_the_wait_and_the_toll_are_parts_of_the_cost() -> None:
    plane = plane_of(2, slots=1, load_s=0.25, max_decisions=8)
    route(plane, "a", "x", 0)
    route(plane, "b", "y", SECOND)
    home = route(plane, "c", "x", 2 * SECOND)
    seen = plane.decision("c")
    assert seen is not None
    row = seen.decode.index(home)
    assert seen.parts["toll_adapter"][row] == 0.0
    other = 1 - row
    # y was asked for once a second ago, x once two seconds ago: decayed by e^(-1/60), e^(-2/60).
    y, x = np.exp(-1 / 60), np.exp(-2 / 60)
    assert seen.parts["toll_adapter"][other] == pytest.approx(0.25 * y / (x + y), rel=1e-6)
    assert seen.parts["wait"][other] - seen.parts["wait"][row] >= 0.25 - 1e-9
    total = sum(seen.parts.values())
    np.testing.assert_allclose(total, seen.costs, rtol=1e-12)


def test_a_remote_prefill_worker_loads_it_too() -> None:
    plane = ControlPlane(ControlConfig(policy="toll", max_decisions=2))
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        plane.observe(WorkerUp(Worker(name, "http://x", role=role, max_seqs=8)), 0)
        plane.observe(AdapterReport(name, 2, ("x",) if name != "p0" else (), 0.5), 0)
    made = plane.submit(Request("r", prompt=4096, max_tokens=16, model="x"), 1)
    assert isinstance(made, Route)
    assert made.choice.prefill != "p0"


def test_a_report_keeps_what_is_under_way_and_forgets_what_is_gone() -> None:
    table = AdapterTable()
    table.report(AdapterReport("w", 2, ("a", "b"), 0.5))
    table.routed("r", "c", ["w"], 0)
    assert table.cold == {"r"}
    for at, wait_s in ((0, 0.5), (SECOND // 4, 0.25), (SECOND, 0.0)):
        assert seconds(table, "c", at) == wait_s
        assert seconds(table, "d", at) == wait_s + 0.5  # loads take turns
    table.report(AdapterReport("w", 2, ("a", "b"), 0.5))  # older than the load
    assert seconds(table, "c", SECOND) == 0.0
    table.report(AdapterReport("w", 2, ("a", "b"), 0.5))
    assert seconds(table, "c", SECOND) == 0.5
    assert seconds(table, "a", SECOND) == 0.0


def seconds(table: AdapterTable, adapter: str, now: int) -> float:
    prices = table.prices(adapter, ["w", "unknown"], now)
    assert prices is not None
    assert prices.load_s[1] == 0.0
    return float(prices.load_s[0])


def test_the_placement_gives_hot_adapters_copies_and_fills_all_slots() -> None:
    table = AdapterTable()
    for index in range(3):
        table.report(AdapterReport(f"w{index}", 2, (), 0.5))
    assert table.placement(0) == {}
    for name, count in {"hot": 60, "a": 10, "b": 8, "c": 6, "d": 1}.items():
        for _ in range(count):
            table.routed("r", name, (), 0)
    placed = table.placement(0)
    copies = [name for names in placed.values() for name in names]
    assert sorted(copies) == ["a", "b", "c", "hot", "hot", "hot"]
    assert all(len(names) == len(set(names)) == 2 for names in placed.values())


def test_without_reports_nothing_changes() -> None:
    plane = ControlPlane(ControlConfig(policy="toll", max_decisions=2))
    plane.observe(WorkerUp(Worker("w0", "http://x")), 0)
    route(plane, "a", "x", 0)
    seen = plane.decision("a")
    assert seen is not None
    assert "toll_adapter" not in seen.parts
