"""Prefill and decode on different workers: loads, holds, and what ends them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pigou.config import EngineConfig
from pigou.engine.checks import DuplicateRequest
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan, Result
from pigou.kv.hashing import chain
from pigou.request import BlockStored, FinishReason, Request

HASHES = chain(list(range(16)), 4, b"s")


def engine(**fields: Any) -> EngineCore:
    base = {"blocks": 12, "block_size": 4, "max_seqs": 4, "max_model_len": 64}
    return EngineCore(EngineConfig(**{**base, **fields}))


def loading(core: EngineCore, prompt: int = 14, remote: int = 14) -> Plan:
    core.add(Request("a", prompt, 3, HASHES[: prompt // 4], remote=remote))
    return core.schedule(0)


@pytest.mark.parametrize(
    ("prompt", "remote", "blocks"),
    [(14, 14, 3), (16, 16, 3), (13, 13, 3), (14, 9, 2), (16, 99, 3), (5, 5, 1)],
)
def test_offered_blocks_below_the_last_token_are_loaded(
    prompt: int, remote: int, blocks: int
) -> None:
    core = engine()
    plan = loading(core, prompt, remote)
    assert not plan
    assert not plan.started
    (load,) = plan.loads
    assert (load.first, len(load.blocks)) == (0, blocks)
    assert core.tables[load.row, :blocks].tolist() == load.blocks.tolist()
    core.check_integrity()


def test_nothing_is_computed_before_the_load_has_come() -> None:
    core = engine()
    loading(core)
    assert not core.schedule(0)
    assert (core.running, core.loading, core.waiting) == (1, 1, 0)
    effects = core.loaded("a", 12)
    (stored,) = effects.events
    assert isinstance(stored, BlockStored)
    assert stored.first == 0
    assert np.array_equal(stored.hashes, HASHES[:3])
    plan = core.schedule(0)
    assert [(s.request, s.computed) for s in plan.started] == [("a", 12)]
    assert plan.counts.tolist() == [2]
    assert core.loading == 0


@pytest.mark.parametrize(("arrived", "left"), [(0, 14), (4, 10), (7, 7), (12, 2)])
def test_what_did_not_arrive_is_computed_here(arrived: int, left: int) -> None:
    core = engine()
    loading(core)
    core.loaded("a", arrived)
    plan = core.schedule(0)
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([arrived], [left])
    core.apply(plan, Result())
    core.check_integrity()


def test_only_what_was_not_hit_is_loaded() -> None:
    core = engine()
    core.add(Request("before", 8, 1, HASHES[:2]))
    core.apply(core.schedule(0), Result())
    (load,) = loading(core).loads
    assert (load.first, len(load.blocks)) == (2, 1)
    core.loaded("a", 4)
    core.apply(core.schedule(0), Result(steps=1))
    core.schedule(0)


def test_an_offer_is_declined_when_everything_was_hit() -> None:
    core = engine()
    core.add(Request("before", 14, 1, HASHES[:3]))
    core.apply(core.schedule(0), Result())
    plan = loading(core)
    (load,) = plan.loads
    assert len(load.blocks) == 0
    assert [(s.request, s.computed) for s in plan.started] == [("a", 12)]
    assert plan.counts.tolist() == [2]


def test_more_than_was_asked_for_cannot_arrive() -> None:
    core = engine()
    loading(core)
    with pytest.raises(ValueError, match="13 tokens were loaded; it must be 0 to 12"):
        core.loaded("a", 13)


def test_blocks_of_an_aborted_load_stay_until_nothing_writes_to_them() -> None:
    core = engine()
    (load,) = loading(core).loads
    effects = core.abort("a")
    assert [f.reason for f in effects.finished] == [FinishReason.ABORT]
    assert effects.freed == 0
    core.check_integrity()
    core.add(Request("b", 30, 1))
    assert set(core.tables[core.schedule(0).rows[0], :8]).isdisjoint(load.blocks.tolist())
    assert core.loaded("a", 0).freed == 4
    core.check_integrity()


def test_loads_take_their_time_while_others_decode() -> None:
    core = engine()
    core.add(Request("b", 4, 5))
    core.apply(core.schedule(0), Result())
    plan = loading(core)
    assert plan.rows.tolist() == [0]
    core.apply(plan, Result())
    core.loaded("a", 12)
    plan = core.schedule(0)
    assert plan.counts.tolist() == [1, 2]


def test_the_full_blocks_of_a_held_prompt_stay_until_released() -> None:
    core = engine()
    core.add(Request("p", 14, 1, HASHES[:3], hold=True))
    plan = core.schedule(0)
    expected = core.tables[0, :3].tolist()
    (finished,) = core.apply(plan, Result()).finished
    assert finished.held.tolist() == expected
    assert core.free_blocks == 9
    core.check_integrity()
    core.clear_cache()
    core.add(Request("other", 30, 6))
    core.schedule(0)
    assert set(core.tables[0, :8].tolist()).isdisjoint(expected)
    assert core.release("p").freed == 3
    assert core.release("p").freed == 0
    core.check_integrity()


def test_nothing_is_held_of_what_was_aborted() -> None:
    core = engine()
    core.add(Request("p", 14, 3, hold=True))
    core.apply(core.schedule(0), Result())
    (finished,) = core.abort("p").finished
    assert finished.held.size == 0
    assert core.free_blocks == 12


def test_a_full_hit_copies_the_last_block_and_computes_one_token() -> None:
    core = engine()
    core.add(Request("before", 16, 1, HASHES))
    core.apply(core.schedule(0), Result())
    core.add(Request("a", 16, 4, HASHES))
    plan = core.schedule(0)
    core.check_integrity()
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([15], [1])
    assert plan.copies.tolist() == [[3, core.tables[plan.rows[0], 3]]]
    assert core.tables[plan.rows[0], 3] != 3
    core.apply(plan, Result())
    core.check_integrity()


def test_a_full_hit_computes_a_block_where_a_copy_does_not_fit() -> None:
    core = engine(blocks=4)
    core.add(Request("before", 16, 1, HASHES))
    core.apply(core.schedule(0), Result())
    core.add(Request("a", 16, 1, HASHES))
    plan = core.schedule(0)
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([12], [4])
    assert not len(plan.copies)
    core.apply(plan, Result())
    assert core.free_blocks == 4


def test_a_load_never_writes_to_the_source_of_a_copy() -> None:
    core = engine(blocks=6)
    core.add(Request("before", 8, 1, HASHES[:2]))
    core.apply(core.schedule(0), Result())
    core.add(Request("hit", 8, 4, HASHES[:2]))
    core.add(Request("far", 9, 1, remote=9))
    core.add(Request("farther", 5, 1, remote=5))
    plan = core.schedule(0)
    ((source, _),) = plan.copies.tolist()
    assert source not in [block for load in plan.loads for block in load.blocks]
    core.check_integrity()
    assert core.free_blocks == 3
    core.apply(plan, Result())
    assert core.free_blocks == 4


def test_a_request_aborted_after_its_load_never_starts() -> None:
    core = engine()
    loading(core)
    core.loaded("a", 12)
    core.abort("a")
    core.check_integrity()
    assert not core.schedule(0).started
    assert core.free_blocks == 12


def cached(core: EngineCore, blocks: int = 3) -> None:
    """Leave a prompt of so many blocks in the cache."""
    core.add(Request("first", 4 * blocks, 1, HASHES[:blocks]))
    core.apply(core.schedule(0), Result())
    assert core.cached_blocks == blocks


def asked(name: str = "peer", blocks: int = 4, **fields: Any) -> Request:
    return Request(name, 4 * blocks, 1, HASHES[:blocks], **fields)


def test_a_cached_prefix_is_held_without_being_computed() -> None:
    core = engine()
    cached(core)
    held = core.hold_cached(asked(), 0)
    assert len(held) == 3
    assert (core.held, core.free_blocks, core.running, core.waiting) == (1, 9, 0, 0)
    core.check_integrity()
    assert core.release("peer").freed == 3
    assert (core.held, core.free_blocks, core.cached_blocks) == (0, 12, 3)


def test_what_is_held_is_not_handed_out_and_can_still_be_hit() -> None:
    core = engine(max_seqs=2)
    cached(core)
    held = core.hold_cached(asked(), 0)
    core.add(Request("big", 36, 1))  # all the other blocks
    core.add(Request("same", 12, 1, HASHES[:3]))
    plan = core.schedule(0)
    (started,) = plan.started
    assert not set(core.tables[started.row, :9].tolist()) & set(held.tolist())
    core.apply(plan, Result())
    (started,) = core.schedule(0).started
    assert started.computed == 11


def test_nothing_is_held_where_nothing_is_cached() -> None:
    core = engine()
    assert len(core.hold_cached(asked(), 0)) == 0
    assert core.held == 0
    core.hold_cached(asked(), 0)  # the id is still free


def test_of_blocks_that_nobody_uses_half_of_the_spare_ones_are_held() -> None:
    core = engine(blocks=4)
    cached(core)
    assert len(core.hold_cached(asked(), 0)) == 2
    assert len(core.hold_cached(asked("again"), 0)) == 3  # two of them are in use by now


def test_nothing_is_kept_from_who_waits_for_blocks() -> None:
    core = engine(blocks=8, max_seqs=2)
    cached(core)
    core.add(Request("runs", 16, 4))
    core.schedule(0)
    core.add(Request("waits", 28, 4))
    core.apply(core._plan, Result())
    core.schedule(0)
    assert core.waiting == 1
    assert len(core.hold_cached(asked(), 0)) == 0


def test_what_is_void_is_not_held() -> None:
    core = engine()
    cached(core)
    assert len(core.hold_cached(asked(expiry=5), 5)) == 0
    assert len(core.hold_cached(asked(expiry=6), 5)) == 3


def test_an_id_in_use_cannot_be_held_under() -> None:
    core = engine()
    cached(core)
    core.hold_cached(asked(), 0)
    with pytest.raises(DuplicateRequest):
        core.hold_cached(asked(), 0)
    with pytest.raises(DuplicateRequest):
        core.add(asked())


def test_blocks_that_the_plan_under_way_will_write_to_are_not_held() -> None:
    core = engine(max_repeat=32, headroom=0)
    cached(core)
    core.add(Request("later", 16, 1, chain(list(range(16)), 4, b"t")))
    core.apply(core.schedule(0), Result())
    core.add(Request("runs", 8, 20))
    core.apply(core.schedule(0), Result())
    plan = core.schedule(0)
    blocks = core._state.prefix.match(HASHES[:3], 3).blocks.tolist()
    foreseen = set(core._ahead.blocks.tolist())
    assert [block in foreseen for block in blocks] == [False, True, True]
    assert core.hold_cached(asked(), 0).tolist() == blocks[:1]
    core.apply(plan, Result(steps=plan.repeat))
    core.check_integrity()
