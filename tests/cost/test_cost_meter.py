"""Bills add up: of random fleets, and of a journal that is replayed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pigou.config import ControlConfig
from pigou.control.journal import JournalEntry, JournalRecorder, decode, encode, replay_call
from pigou.control.messages import (
    Ended,
    FirstToken,
    PrefillDone,
    Route,
    Tokens,
    WorkerDown,
    WorkerUp,
)
from pigou.cost.cost_meter import CostMeter, MeteredControlPlane
from pigou.cost.fleet_bill import FleetBill
from pigou.cost.usage import WorkerRate
from pigou.models.gpus import PowerModel
from pigou.request import SECOND, FinishReason, Rehearsed, Request, Role, Worker

KV = 131_072.0
RATE = WorkerRate(
    usd_per_s=2.5 / 3600, storage_usd_per_s=1e-5, power=PowerModel(700.0), weight_bytes=16e9,
    kv_bytes=KV, bytes_per_s=3.35e12, flops=989e12, token_flops=16e9,
)  # fmt: skip


def cost_meter(rate: WorkerRate = RATE) -> CostMeter:
    return CostMeter(lambda _: rate, lambda _: "m", lambda request: f"p{request.priority}")


def play(  # noqa: PLR0912 (one branch an event)
    seed: int, meter: CostMeter, write: list[bytes] | None = None
) -> tuple[FleetBill, int]:
    """Let a random fleet serve random requests; return its bill, and when it ended."""
    rng = random.Random(seed)
    plane = MeteredControlPlane(ControlConfig(policy="random", seed=seed), meter)
    entries: list[bytes] = [] if write is None else write
    calls = JournalRecorder(plane, lambda entry: entries.append(encode(entry)))
    now, number = SECOND, 0
    roles = rng.choices((Role.BOTH, Role.PREFILL, Role.DECODE), k=3)
    for index, role in enumerate((Role.BOTH, *roles)):
        calls.observe(WorkerUp(Worker(f"w{index}", "", role)), now)
    waiting: list[Route] = []
    prefilled: list[str] = []
    running: list[str] = []
    for _ in range(rng.randrange(100, 250)):
        now += int(rng.expovariate(1 / 0.05) * SECOND)
        event = rng.random()
        if event < 0.3:
            number += 1
            request = Request(
                f"r{number}", rng.randrange(1, 4000), 200, tenant=f"t{rng.randrange(3)}",
                priority=rng.randrange(2), arrival=now,
            )  # fmt: skip
            decision = calls.submit(request, now)
            if isinstance(decision, Route):
                waiting.append(decision)
        elif event < 0.5 and waiting:
            route = waiting.pop(rng.randrange(len(waiting)))
            if route.choice.prefill is not None:
                calls.observe(PrefillDone(route.request), now)
            prefilled.append(route.request)
        elif event < 0.6 and prefilled:
            running.append(prefilled.pop())
            calls.observe(FirstToken(running[-1]), now)
        elif event < 0.8 and running:
            for request_id in rng.sample(running, rng.randrange(1, len(running) + 1)):
                count(plane, calls, request_id, rng.randrange(1, 9), now)
        elif event < 0.85:
            for group in (running, prefilled):
                if group:
                    calls.observe(Ended(group.pop(), FinishReason.STOP), now)
        elif event < 0.86:
            calls.observe(WorkerDown("w1"), now)
        else:
            calls.tick(now)
    return meter.bill(now), now


def count(
    plane: MeteredControlPlane, calls: JournalRecorder, request: str, tokens: int, now: int
) -> None:
    slot = plane.slot(request)
    if slot >= 0:
        calls.on_tokens(np.array([slot]), np.array([tokens]), now)


@pytest.mark.parametrize("rate", [RATE, WorkerRate(1e-3)], ids=["modelled", "unknown model"])
def test_allocations_of_tenants_are_what_any_fleet_costs(rate: WorkerRate) -> None:
    for seed in range(25):
        bill, _ = play(seed, cost_meter(rate))
        whole = bill.total
        parts = [bill.allocation(usage, whole) for usage in bill.by("tenant").values()]
        assert whole.usd > 0.0
        assert sum(usd for usd, _ in parts) == pytest.approx(bill.usd, rel=1e-9)
        assert sum(joules for _, joules in parts) == pytest.approx(bill.joules, rel=1e-9)
        assert whole.usd + bill.idle_usd + bill.open_usd == pytest.approx(bill.gpu_usd, rel=1e-9)
        assert whole.marginal_usd <= whole.usd * (1 + 1e-9)


def test_a_replayed_journal_gives_the_same_bill() -> None:
    lines: list[bytes] = []
    bill, now = play(7, cost_meter(), lines)
    plane = MeteredControlPlane(ControlConfig(policy="random", seed=7), cost_meter())
    for line in lines:
        entry = decode(line)
        assert isinstance(entry, JournalEntry)
        assert replay_call(plane, entry)[0] == entry.out
    again = plane.cost_meter.bill(now)
    assert again == bill
    whole = again.total
    tenants = sum(again.allocation(usage, whole)[0] for usage in again.by("tenant").values())
    assert abs(tenants / again.usd - 1.0) < 1e-3


def test_bills_of_requests_add_up_to_those_of_tenants() -> None:
    meter = cost_meter()
    bill, _ = play(3, meter)
    assert sum(one.usd for one in meter.bills.values()) == pytest.approx(bill.total.usd)


def test_measured_joules_replace_those_of_the_model() -> None:
    meter, up = cost_meter(), WorkerUp(Worker("w0", ""))
    meter.follow(up, (), 0)
    meter.measured("w0", 0.0)
    meter.settle(SECOND // 2)  # between two reports: as the model has it
    meter.measured("w0", 123.0)
    assert meter.bill(SECOND).joules == pytest.approx(123.0)
    meter.settle(SECOND * 3 // 2)  # as the counter had it before
    assert meter.bill(2 * SECOND).joules == pytest.approx(246.0, rel=0.3)
    meter.measured("w0", 77.0)
    bill = meter.bill(3 * SECOND)
    assert bill.joules == bill.idle_joules == pytest.approx(246.0, rel=0.3)


@pytest.mark.parametrize("ends_early", [False, True], ids=["by its profile", "by its end"])
def test_the_first_reply_in_one_piece_pays_its_prompts_seconds_as_its_worker_measured_them(
    ends_early: bool,
) -> None:
    """Nobody sees where its prompt ends: a guess of 0.1 ms a token was a third of the truth."""
    meter = CostMeter(lambda _: WorkerRate(usd_per_s=1.0))
    plane = MeteredControlPlane(ControlConfig(policy="random"), meter)
    profile = (Rehearsed(128, 0, 1, 0.04), Rehearsed(512, 0, 1, 0.16))
    plane.observe(WorkerUp(Worker("w", "", Role.BOTH, rehearsed=profile)), 0)
    for number in range(3):  # of a guess nothing is learned
        began, name = number * 10 * SECOND, f"r{number}"
        route = plane.submit(Request(name, 400, 50, arrival=began, streamed=False), began)
        assert isinstance(route, Route)
        end = began + (SECOND // 10 if ends_early else SECOND)
        for now in range(began, end, SECOND // 3):
            plane.tick(now)
        meter.follow(Tokens(((name, 20),)), (), end)
        plane.observe(Ended(name, FinishReason.STOP), end)
        meter.settle(end)
        usage = meter.bills[name]
        expected_s = 0.1 if ends_early else 0.125
        assert usage.prefill_gpu_s == pytest.approx(expected_s, abs=0.002)
        assert usage.uncached_tokens == 400
        assert usage.decode_gpu_s == pytest.approx((end - began) / SECOND - expected_s, abs=0.002)


def test_kv_is_billed_for_as_long_as_it_is_held_and_shared_in_equal_parts() -> None:
    """A slow reader pays for 10 s what a quick one pays for 1 s; a common prefix is halved."""
    meter = cost_meter()
    plane = MeteredControlPlane(ControlConfig(policy="random"), meter)
    plane.observe(WorkerUp(Worker("w", "")), 0)
    keys = {16: np.arange(1, 17, dtype=np.uint64)}  # 256 tokens
    for name in ("slow", "quick"):
        plane.submit(Request(name, 300, 10, tenant=name, keys=keys), 0)
    plane.observe(Ended("quick", FinishReason.STOP), SECOND)
    meter.settle(4 * SECOND)
    assert meter.bills["slow"].kv_token_s == pytest.approx(4 * 44 + 128 + 3 * 256)
    plane.observe(Ended("slow", FinishReason.ABORT), 10 * SECOND)
    usages = {key.tenant: usage for key, usage in meter.bill(20 * SECOND).usages.items()}
    assert usages["quick"].kv_token_s == pytest.approx(44 + 128)
    assert usages["slow"].kv_token_s == pytest.approx(10 * 44 + 128 + 9 * 256)
    assert meter.bills["slow"].kv_token_s == usages["slow"].kv_token_s


def test_written_tokens_pay_for_the_cached_ones_that_they_push_out() -> None:
    meter = cost_meter()
    plane = MeteredControlPlane(ControlConfig(policy="random"), meter)
    plane.observe(WorkerUp(Worker("w", "")), 0)
    meter.displaced = {"w": 0.25}
    plane.submit(Request("r", 100, 10, sequences=3), 0)
    plane.on_tokens(np.array([plane.slot("r")]), np.array([8]), SECOND)
    assert meter.bills["r"].displaced_tokens == 27.0
    assert (meter.bills["r"].requests, meter.bills["r"].sequences) == (1, 3)
