"""Laws that every routing policy keeps, whatever its formula."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from routing_fleets import alone, cheapest, product, split
from tests.lib.examples import examples

from pigou.control.latency_model.estimates import Estimates
from pigou.control.routing.policy import GROUP, load
from pigou.control.routing.pool_policy import PoolPolicy
from pigou.control.routing.selection import select
from pigou.control.routing.view import Candidates, FleetView
from pigou.control.state import PrefillBacklog
from pigou.request import Request

NAMES = sorted(entry_points(group=GROUP).names)
#: What they return depends on turns or draws.
STATEFUL = {"round-robin", "power-of-two", "ray-prefix", "llm-d-blend"}
OVERLAP_AWARE = [
    "aibrix-prefix",
    "dynamo",
    "dynamo-paper",
    "llm-d",
    "lmetric",
    "mooncake",
    "ray-prefix",
    "sglang-cache-aware",
]
STAGED = [each for each in NAMES if isinstance(load(each), PoolPolicy)]

COLUMNS = {
    "prefill_requests": 4,
    "prefill_tokens": 400_000,
    "decode_requests": 90,
    "decode_tokens": 90_000,
    "served": 1000,
    "device": 40,
    "host": 30,
    "storage": 20,
}


@st.composite
def lines(draw: st.DrawFn, workers: int) -> PrefillBacklog:
    """Prompts that are under way."""
    found = PrefillBacklog()
    for row in range(workers):
        found.up()
        tokens, since = draw(st.integers(1, 5000)), draw(st.integers(0, 100))
        found.add(row, "r", tokens, tokens * tokens // 2, since)
    return found


@st.composite
def fleets(draw: st.DrawFn, *, apart: bool | None = None) -> tuple[FleetView, Candidates]:
    workers = draw(st.integers(2, 7))
    columns: dict[str, Any] = {
        name: draw(st.lists(st.integers(0, most), min_size=workers, max_size=workers))
        for name, most in COLUMNS.items()
    }
    columns["overlap"] = np.sum([columns["device"], columns["host"], columns["storage"]], axis=0)
    columns["waiting"] = np.array(columns["prefill_requests"], dtype=float)
    columns["kv_usage"] = np.array(columns["served"], dtype=float) / 1000
    columns["output"] = 50.0
    columns["backlog"], columns["now"] = draw(lines(workers)), 100
    if apart if apart is not None else draw(st.booleans()):
        prefill = draw(st.integers(1, workers - 1))
        return split(prefill, workers, **columns), product(prefill, workers)
    return FleetView.of(workers, **columns), alone(workers)


requests = st.builds(Request, id=st.just("r"), prompt=st.integers(1, 2000), max_tokens=st.just(10))


def names(kind: Any) -> tuple[str, ...]:
    """Public fields of a view, its estimates or its candidates."""
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    return tuple(name for name in kind.__struct_fields__ if not name.startswith("_"))


def shuffled(fleet: FleetView, order: np.ndarray) -> FleetView:
    """The same fleet, its worker `order[i]` at row i."""

    def taken(kind: Any, one: Any, skip: set[str]) -> dict[str, Any]:
        return {name: getattr(one, name)[order] for name in names(kind) if name not in skip}

    known = Estimates(np.ascontiguousarray(fleet.estimates.table[:, order]))
    plain = {"ids", "estimates", "output", "fetches", "adapters", "backlog", "lengths", "now"}
    columns = taken(FleetView, fleet, plain)
    ids = tuple(fleet.ids[row] for row in order)
    return FleetView(
        ids=ids, estimates=known, output=fleet.output, backlog=lined(fleet.backlog, order),
        now=fleet.now, **columns,
    )  # fmt: skip


def lined(before: PrefillBacklog | None, order: np.ndarray) -> PrefillBacklog:
    """The same prompts, those of worker `order[i]` at row i."""
    assert before is not None
    found = PrefillBacklog()
    for row in order:
        found.up()
        tokens, pairs, since = (
            getattr(before, name).item(row) for name in ("tokens", "pairs", "since")
        )
        found.add(len(found.tokens) - 1, "r", tokens, pairs, since)
    return found


def worse(costs: np.ndarray, index: int) -> int:
    """How many are strictly cheaper."""
    return int((costs < costs[index] - 1e-9).sum())


def test_every_baseline_of_the_design_is_there() -> None:
    wanted = "random round-robin least-loaded power-of-two dynamo-paper dynamo lmetric"
    wanted += " sglang-cache-aware llm-d dynamo-conditional llm-d-conditional toll"
    assert set(wanted.split()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@given(case=fleets(), request=requests)
@settings(max_examples=examples(20))
def test_a_cost_for_each_candidate_and_one_may_be_chosen(
    name: str, case: tuple[FleetView, Candidates], request: Request
) -> None:
    fleet, offered = case
    costs = load(name).costs(request, fleet, offered)
    assert costs.shape == (len(offered),)
    assert not np.isnan(costs).any()
    assert costs.min() < np.inf


@pytest.mark.parametrize("name", NAMES)
@given(case=fleets(), request=requests)
@settings(max_examples=examples(15))
def test_parts_add_up_to_the_cost(
    name: str, case: tuple[FleetView, Candidates], request: Request
) -> None:
    fleet, offered = case
    one, other = load(name), load(name)
    if hasattr(other, "parts"):
        parts = other.parts(request, fleet, offered)
        assert all(part.shape == (len(offered),) for part in parts.values())
        assert sum(parts.values()) == pytest.approx(one.costs(request, fleet, offered))


@pytest.mark.parametrize("name", NAMES)
def test_the_view_is_not_written_to(name: str) -> None:
    fleet, offered = split(2, 5, overlap=[3, 0, 9, 9, 0]), product(2, 5)
    arrays = [
        value
        for part in (fleet, fleet.estimates, offered)
        for field in names(type(part))
        if isinstance(value := getattr(part, field), np.ndarray)
    ]
    before = [value.tobytes() for value in arrays]
    load(name).costs(Request("r", 800, 10), fleet, offered)
    assert [value.tobytes() for value in arrays] == before


@pytest.mark.parametrize("name", [each for each in NAMES if each not in STATEFUL])
@given(case=fleets(), request=requests, data=st.data())
@settings(max_examples=examples(15))
def test_permuted_workers_have_permuted_costs(
    name: str, case: tuple[FleetView, Candidates], request: Request, data: st.DataObject
) -> None:
    fleet, offered = case
    order = np.array(data.draw(st.permutations(range(len(fleet.ids)))))
    place = np.argsort(order).astype(np.int32)
    prefill = np.where(offered.local, np.int32(-1), place[offered.prefill])
    moved = Candidates(prefill.astype(np.int32), place[offered.decode])
    costs = load(name).costs(request, fleet, offered)
    assert load(name).costs(request, shuffled(fleet, order), moved) == pytest.approx(costs)


@pytest.mark.parametrize("name", OVERLAP_AWARE)
@given(case=fleets(apart=False), request=requests, data=st.data())
@settings(max_examples=examples(30))
def test_more_overlap_never_lowers_a_worker_in_the_order(
    name: str, case: tuple[FleetView, Candidates], request: Request, data: st.DataObject
) -> None:
    fleet, offered = case
    row = data.draw(st.integers(0, len(offered) - 1))
    more = data.draw(st.integers(1, 60))
    device, overlap = fleet.device.copy(), fleet.overlap.copy()
    device[row] += more
    overlap[row] += more
    warmer = replace(fleet, device=device, overlap=overlap)
    before = load(name).costs(request, fleet, offered)
    after = load(name).costs(request, warmer, offered)
    assert worse(after, row) <= worse(before, row)


@pytest.mark.parametrize("name", ["dynamo", "dynamo-paper", "lmetric", "mooncake", "toll"])
@given(case=fleets(), request=requests, data=st.data())
@settings(max_examples=examples(20))
def test_more_overlap_never_makes_a_candidate_dearer(
    name: str, case: tuple[FleetView, Candidates], request: Request, data: st.DataObject
) -> None:
    fleet, offered = case
    index = data.draw(st.integers(0, len(offered) - 1))
    row = int(offered.computes[index])
    device, overlap = fleet.device.copy(), fleet.overlap.copy()
    device[row] += 7
    overlap[row] += 7
    before = load(name).costs(request, fleet, offered)
    after = load(name).costs(request, replace(fleet, device=device, overlap=overlap), offered)
    # Costs of pairs count from the best prefill worker, so only differences between them mean
    # something: nobody who computes elsewhere may gain on this one. (Of those who compute here,
    # some gain more: a stream that is sent on to a busy worker waits there instead.)
    both = np.isfinite(before) & np.isfinite(after)
    elsewhere = both & (offered.computes != row)
    if not both[index] or not elsewhere.any():
        return
    gained = (after - after[index])[elsewhere] - (before - before[index])[elsewhere]
    assert (gained >= -1e-6 * np.abs(before[both]).max()).all()


@pytest.mark.parametrize("name", STAGED)
@given(case=fleets(apart=True), request=requests)
@settings(max_examples=examples(15))
def test_each_pool_is_chosen_from_by_itself(
    name: str, case: tuple[FleetView, Candidates], request: Request
) -> None:
    fleet, offered = case
    best = cheapest(np.round(load(name).costs(request, fleet, offered), 9), offered)
    prefill, decode = {p for p, _ in best}, {d for _, d in best}
    assert best == {(p, d) for p in prefill for d in decode}
    assert -1 not in prefill


@pytest.mark.parametrize("name", NAMES)
def test_cold_prompts_at_rest_reach_every_worker(name: str) -> None:
    """Paced sessions leave nothing in flight at each decision; ties must not all go one way."""
    policy, generator = load(name), np.random.default_rng(2)
    fleet, offered = FleetView.of(4), alone(4)
    got = np.zeros(4)
    for _ in range(400):
        pick = select(policy.costs(Request("r", 600, 10), fleet, offered), generator)
        assert pick is not None
        got[offered.decode[pick.index]] += 1
    assert got.min() > 60
