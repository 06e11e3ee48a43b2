"""D2LPM: a tenant's service on each worker, work conservation, and who may go where."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.admission.deficit_orders import D2lpm
from pigou.control.admission.queue_order import QueuedRequest, load
from pigou.control.messages import Ended, PrefillDone, Queue, Route, WorkerDown, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Role, Worker

IDS = ("w0", "w1", "w2")
QUANTUM, LONGEST, OUTPUT, PARALLEL = 40.0, 30, 10, 3


class Dispatcher:
    """A gateway that sends a tenant's requests to a favourite of the workers it may use."""

    def __init__(self, seed: int) -> None:
        self.order: D2lpm = load({"order": "d2lpm", "worker_quantum": QUANTUM, "quantum": 50.0})  # type: ignore[assignment]
        self.rng, self.count = Random(seed), 0
        self.running: list[tuple[Request, str]] = []
        self.service = Counter[tuple[str, str]]()

    def step(self, room: np.ndarray) -> None:
        """Send a request, and end some so that a worker has at most `PARALLEL` of a tenant."""
        rng, tenant = self.rng, self.rng.choice("ab")
        self.count += 1
        request = Request(f"r{self.count}", rng.randint(1, LONGEST), OUTPUT, tenant=tenant)
        waiting = QueuedRequest(request, 0, request.prompt, serial=self.count)
        self.order.add(waiting)
        allowed = self.order.allowed(request, IDS, room)
        assert allowed.any()
        assert not (allowed & ~room).any()
        worker = IDS[np.flatnonzero(allowed)[0]]  # a cached prefix draws all to the first
        self.order.began(request, worker, 0)
        self.order.taken(waiting, request.prompt)
        self.service[tenant, worker] += request.prompt
        self.running.append((request, worker))
        mine = [pair for pair in self.running if (pair[0].tenant, pair[1]) == (tenant, worker)]
        if len(mine) >= PARALLEL:
            self.end(mine[0])

    def end(self, pair: tuple[Request, str]) -> None:
        request, worker = pair
        output = self.rng.randint(0, OUTPUT)
        self.order.served(request, output)
        self.order.ended(request, 0)
        self.service[request.tenant, worker] += 2 * output
        self.running.remove(pair)


BOUND = QUANTUM + LONGEST + 2 * OUTPUT * PARALLEL


@pytest.mark.parametrize("gateways", [1, 2, 4])
def test_a_tenants_service_of_two_workers_with_room_differs_by_at_most_the_bound(
    gateways: int,
) -> None:
    """Q_w + w_p L + w_q M for each gateway, whose deficits are its own."""
    sending = [Dispatcher(seed) for seed in range(gateways)]
    everywhere, worst = np.ones(3, dtype=np.bool_), 0.0
    for _ in range(400):
        for gateway in sending:
            gateway.step(everywhere)
        total = sum((gateway.service for gateway in sending), Counter[tuple[str, str]]())
        for tenant in "ab":
            had = [total[tenant, worker] for worker in IDS]
            worst = max(worst, max(had) - min(had))
    assert 0.25 * BOUND < worst <= gateways * BOUND


def test_deficits_of_a_worker_stay_between_the_bounds_however_room_changes() -> None:
    gateway = Dispatcher(7)
    for _ in range(600):
        room = np.array([gateway.rng.random() < 0.5 for _ in IDS])
        room[gateway.rng.randrange(3)] = True
        gateway.step(room)
        for tenant in "ab":
            known: Any = gateway.order._tenants.get(tenant)
            for left in known.workers.values() if known else ():
                assert -(BOUND - QUANTUM) <= left <= QUANTUM


def plane(workers: int, roles: tuple[Role, ...] = (), **admission: float) -> ControlPlane:
    chosen = {"order": "d2lpm", **admission}
    made = ControlPlane(ControlConfig(policy="toll", admission=chosen, max_inflight=2))
    for number in range(workers):
        role = roles[number] if roles else Role.BOTH
        worker = Worker(f"w{number}", "u", role, blocks=4096, max_seqs=2, events=False)
        made.observe(WorkerUp(worker), 0)
    return made


def test_pareto_no_worker_with_room_is_idle_while_a_request_waits() -> None:
    """Also where a tenant owes service to every worker that has room, or a worker goes down."""
    fleet, rng, running, queued = plane(3, worker_quantum=1.0), Random(3), [], 0
    for number in range(60):
        request = Request(f"r{number}", rng.randint(1, 900), 50, tenant=rng.choice("aab"))
        decision = fleet.submit(request, number * SECOND)
        if number == 30:
            fleet.observe(WorkerDown("w1"), number * SECOND)
            running = [one for one in running if one in fleet.state.requests]
        running += [request.id] * isinstance(decision, Route)
        queued += isinstance(decision, Queue)
        if len(running) > 4 or rng.random() < 0.3:
            gone = running.pop(rng.randrange(len(running)))
            fleet.observe(PrefillDone(gone), number * SECOND)
            for route in fleet.observe(Ended(gone, FinishReason.STOP), number * SECOND):
                assert isinstance(route, Route)
                running.append(route.request)
        for one in running:
            fleet.observe(PrefillDone(one), number * SECOND)
        room = fleet.state.columns.decode_requests < 2
        assert not (len(fleet.queue) and (room & fleet.state.columns.decodes).any())
    assert queued


def test_a_shared_prefix_draws_a_tenant_to_one_worker_only_up_to_its_deficit() -> None:
    """Under `dlpm` all go where the prefix is cached; under `d2lpm` others get their part."""
    spread = {}
    for quantum in (50.0, 1e9):
        fleet, keys = plane(2, worker_quantum=quantum), np.arange(1, 65, dtype=np.uint64)
        counts = Counter[str]()
        for number in range(40):
            request = Request(f"r{number}", 1024, 8, tenant="a", keys={16: keys})
            route = fleet.submit(request, number * SECOND)
            assert isinstance(route, Route)
            counts[route.choice.decode] += 1
            fleet.observe(PrefillDone(request.id), number * SECOND)
            fleet.observe(Ended(request.id, FinishReason.STOP), number * SECOND)
        spread[quantum] = min(counts["w0"], counts["w1"])
    assert spread[1e9] <= 2
    assert spread[50.0] >= 10


def test_a_request_goes_where_it_must_though_its_tenant_owes_there() -> None:
    fleet = plane(2, worker_quantum=1.0)
    for number in range(8):
        bound = Request(f"r{number}", 500, 8, tenant="a", eligible=frozenset({"w1"}))
        route = fleet.submit(bound, number * SECOND)
        assert isinstance(route, Route)
        assert route.choice.decode == "w1"
        fleet.observe(PrefillDone(bound.id), number * SECOND)
        fleet.observe(Ended(bound.id, FinishReason.STOP), number * SECOND)


def test_a_fleet_of_prefill_and_decode_workers_shares_out_those_that_decode() -> None:
    fleet = plane(3, (Role.PREFILL, Role.DECODE, Role.DECODE), worker_quantum=1.0)
    counts = Counter[str]()
    for number in range(12):
        route = fleet.submit(Request(f"r{number}", 300, 8, tenant="a"), number * SECOND)
        assert isinstance(route, Route)
        counts[route.choice.decode] += 1
        fleet.observe(PrefillDone(f"r{number}"), number * SECOND)
        fleet.observe(Ended(f"r{number}", FinishReason.STOP), number * SECOND)
    assert counts == {"w1": 6, "w2": 6}


def test_a_quantum_of_a_worker_must_be_above_0() -> None:
    with pytest.raises(ConfigError, match="worker_quantum"):
        load({"order": "d2lpm", "worker_quantum": 0})
