"""Hot experts in the price planner: advice where ranks are uneven and copies pay."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pigou.control.planner.price.explanation import _uneven, hot_experts
from pigou.fleet.worker_report import read_report
from pigou.placement.expert_placement import ExpertRanks, balance, imbalance, rank_loads
from pigou.request import Role
from pigou.windows.planner_window import ExpertWindow, PlannerWindow, PoolWindow, WorkerWindow


def window(experts: ExpertWindow | None, streams: float = 100.0) -> PlannerWindow:
    worker = WorkerWindow(id="decode-0", mean_running=streams, experts=experts)
    pool = PoolWindow(name="decode", role=Role.DECODE, workers=(worker,))
    return PlannerWindow(now_ns=0, seconds=10.0, pools=(pool,))


def experts(loads: np.ndarray, ranks: int, **changes: object) -> ExpertWindow:
    placement = balance(loads, ExpertRanks(ranks, len(loads)))
    made = ExpertWindow(
        loads=tuple(loads), placement=tuple(placement.tolist()), ranks=ranks, busy=0.5, move_s=0.1
    )
    return msgspec.structs.replace(made, **changes)


HOT = np.array([900.0, *[100.0] * 31])


def test_even_ranks_and_workers_without_experts_get_no_advice() -> None:
    assert hot_experts(window(None), 600.0) == []
    assert hot_experts(window(experts(np.ones(32), 8)), 600.0) == []


def test_copies_of_a_hot_expert_are_proposed_at_the_value_of_the_wait_they_save() -> None:
    seen = experts(HOT, 8)
    before = imbalance(rank_loads(np.array(seen.placement), HOT, 8))
    (advice,) = hot_experts(window(seen), 600.0)
    assert advice.chosen
    assert advice.move == "copy 8 more experts of decode-0"
    assert "hottest: 0" in advice.reason
    after = imbalance(rank_loads(balance(HOT, ExpertRanks(8, 40)), HOT, 8))
    assert after <= 0.2 < before
    assert advice.value == pytest.approx(100.0 * 0.5 * (1.0 - (1.0 + after) / (1.0 + before)))


def test_copies_that_do_not_pay_back_in_time_are_shown_and_not_chosen() -> None:
    (slow,) = hot_experts(window(experts(HOT, 8, move_s=60.0)), 600.0)
    (short,) = hot_experts(window(experts(HOT, 8)), 1.0)
    assert not slow.chosen
    assert not short.chosen
    assert short.price > short.value > 0.0


def test_a_better_placement_of_the_same_slots_is_proposed_without_copies() -> None:
    loads = np.array([8.0, 8, 8, 8, 1, 1, 1, 1])
    (advice,) = hot_experts(window(experts(loads, 2, placement=(0, 1, 2, 3, 4, 5, 6, 7))), 600.0)
    assert advice.move == "move 4 experts of decode-0"
    assert advice.chosen


def test_a_live_worker_that_tells_its_imbalance_alone_gets_advice_above_a_fifth() -> None:
    advice = []
    for uneven in (b"0.58", b"0.1"):
        report = read_report(b"pigou_expert_rank_imbalance " + uneven + b"\n", 0)
        worker = WorkerWindow(id="decode-0", rank_imbalance=report.rank_imbalance)
        pool = PoolWindow(name="decode", role=Role.DECODE, workers=(worker,))
        advice.append(list(_uneven(PlannerWindow(now_ns=0, seconds=10.0, pools=(pool,)))))
    (reason,), none = advice
    assert "58% above the mean" in reason
    assert none == []
