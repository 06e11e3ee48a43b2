"""What the engine refuses, it names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pigou.config import EngineConfig
from pigou.engine.checks import (
    DuplicateRequest,
    OutOfTurn,
    QueueFull,
    RequestTooLarge,
    UnknownLoad,
)
from pigou.engine.core import EngineCore
from pigou.engine.plan import Finish, Result
from pigou.request import FinishReason, Request


def engine(**fields: Any) -> EngineCore:
    return EngineCore(EngineConfig(**{"blocks": 4, "block_size": 4, "max_model_len": 64, **fields}))


def test_a_request_larger_than_the_pool_is_refused_with_its_size() -> None:
    core = engine()
    with pytest.raises(RequestTooLarge, match=r"prompt 10 \+ max_tokens 8 need 5 blocks.*4"):
        core.add(Request("a", 10, 8))
    assert core.waiting == 0
    core.add(Request("a", 10, 7))


def test_a_request_longer_than_the_model_is_refused_with_its_size() -> None:
    with pytest.raises(RequestTooLarge, match=r"10 \+ max_tokens 7 = 17 tokens.*is 16"):
        engine(max_model_len=16).add(Request("a", 10, 7))


def test_a_request_that_fits_exactly_runs_alone_to_its_end() -> None:
    core = engine()
    core.add(Request("a", 10, 7))
    finished = []
    for _ in range(7):
        plan = core.schedule(0)
        finished += core.apply(plan, Result()).finished
        core.check_integrity()
    assert [(f.generated, f.preemptions, f.reason) for f in finished] == [
        (7, 0, FinishReason.LENGTH)
    ]


def test_one_more_than_may_wait_is_refused() -> None:
    core = engine(max_waiting=1)
    core.add(Request("a", 1, 1))
    with pytest.raises(QueueFull, match="1 requests wait"):
        core.add(Request("b", 1, 1))


def test_an_id_in_flight_or_held_is_refused() -> None:
    core = engine()
    core.add(Request("a", 4, 1, hold=True))
    with pytest.raises(DuplicateRequest, match="'a'"):
        core.add(Request("a", 1, 1))
    core.apply(core.schedule(0), Result())
    assert core.held == 1
    with pytest.raises(DuplicateRequest, match="'a'"):
        core.add(Request("a", 1, 1))
    core.release("a")
    core.add(Request("a", 1, 1))


@pytest.mark.parametrize("field", ["prompt", "max_tokens"])
def test_lengths_below_one_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0"):
        engine().add(Request("a", **{"prompt": 1, "max_tokens": 1, field: 0}))


def test_hashes_of_a_wrong_shape_or_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        engine().add(Request("a", 4, 1, np.zeros(4, dtype=np.uint64)))
    with pytest.raises(ValueError, match="int64"):
        engine().add(Request("a", 4, 1, np.zeros((1, 2), dtype=np.int64)))  # type: ignore[arg-type]


def test_plans_are_applied_in_turn() -> None:
    core = engine()
    core.add(Request("a", 1, 3))
    plan = core.schedule(0)
    with pytest.raises(OutOfTurn, match="apply the last plan"):
        core.schedule(0)
    core.apply(plan, Result())
    with pytest.raises(OutOfTurn, match="not the plan"):
        core.apply(plan, Result())


def test_finishes_that_do_not_fit_the_plan_are_refused() -> None:
    core = engine()
    core.add(Request("a", 1, 3))
    plan = core.schedule(0)
    with pytest.raises(ValueError, match="entry 1 finished; the plan has 1"):
        core.apply(plan, Result(finished=[Finish(1, FinishReason.STOP, 1)]))
    with pytest.raises(ValueError, match="finished after 2 of 1 steps"):
        core.apply(plan, Result(finished=[Finish(0, FinishReason.STOP, 2)]))
    core.apply(plan, Result())


def test_a_load_that_was_not_asked_for_is_refused() -> None:
    core = engine()
    with pytest.raises(UnknownLoad, match="'a'"):
        core.loaded("a", 0)
    core.add(Request("a", 1, 3))
    with pytest.raises(UnknownLoad, match="'a'"):
        core.loaded("a", 0)


def test_aborting_or_releasing_who_is_gone_changes_nothing() -> None:
    core = engine()
    for effects in (core.abort("a"), core.release("a")):
        assert not effects.finished
        assert not effects.events
        assert effects.freed == 0
