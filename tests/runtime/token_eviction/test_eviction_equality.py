"""A compacted cache computes what the full one does with the given-up entries masked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from checkpoints import BUNDLED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from masked import SIZE, Bench, Kept, attend_in_full, bench, near, pairs, random_tokens
from tests.lib.examples import examples

from pigou.engine.plan import Started
from pigou.runtime.models.load import LoadedModel

Find = Callable[[str], LoadedModel]
#: Compiled kernels, and torch.
PATHS = pytest.mark.parametrize("plain", [False, True], ids=["kernels", "torch"])


def check(bench: Bench, model: LoadedModel, row: int, seen: dict[int, Kept]) -> None:
    tokens = bench.tokens[row][: bench.computed[row]]
    logits, _ = attend_in_full(model, tokens, seen)
    assert near(bench.logits[row], logits[-1])


@PATHS
@pytest.mark.parametrize("family", ["qwen3", BUNDLED])
def test_decodes_and_chunks_after_a_compaction_see_what_was_kept(
    family: str, plain: bool, loaded: Find
) -> None:
    model = loaded(family)
    b = bench(model, plain=plain)
    b.start(0, random_tokens(150))
    b.run([(0, 100)])
    b.run([(0, 1)], compactions=[b.compaction(0, 48)])
    kept = [[head - {100} for head in layer] for layer in b.kept(0)]
    assert len({frozenset(head) for layer in kept for head in layer}) > 1
    assert all(len(head) == 52 for layer in kept for head in layer)
    seen = {100: kept}
    check(b, model, 0, seen)
    b.run([(0, 1)])
    check(b, model, 0, seen)
    b.run([(0, 23)])
    check(b, model, 0, seen)
    b.run([(0, 1)], compactions=[b.compaction(0, 32)])
    seen[125] = [[head - {125} for head in layer] for layer in b.kept(0)]
    check(b, model, 0, seen)


@PATHS
def test_sinks_and_recent_tokens_stay(plain: bool, loaded: Find) -> None:
    b = bench(loaded("llama"), plain=plain, sinks=3, recent=20, least=23)
    b.start(1, random_tokens(90))
    b.run([(1, 70)])
    b.run([], compactions=[b.compaction(1, 32)])
    b.run([], compactions=[b.compaction(1, 0)])
    for head in (head for layer in b.kept(1) for head in layer):
        assert head >= {0, 1, 2, *range(50, 70)}


@PATHS
def test_a_shared_prefix_stays_for_those_who_share_it(plain: bool, loaded: Find) -> None:
    model = loaded("qwen3")
    b = bench(model, plain=plain)
    tokens = random_tokens(110)
    b.start(0, tokens)
    b.run([(0, 90)])
    other = tokens[:48] + random_tokens(60, seed=1)
    b.tables[1, :3] = b.tables[0, :3]
    b.start(1, other, cached=48)
    b.run([(1, 52)])
    b.run([(0, 1), (1, 1)], compactions=[b.compaction(1, 16, first=48)])
    check(b, model, 0, {})
    seen = {100: [[head - {100} for head in layer] for layer in b.kept(1)]}
    assert all(head >= set(range(48)) for layer in seen[100] for head in layer)
    check(b, model, 1, seen)
    # More than its own blocks hold: the shared ones are copied first.
    spare = 4 * 16
    copies = pairs(*((int(b.tables[1, i]), spare + i) for i in range(3)))
    b.tables[1, :3] = copies[:, 1]
    b.run([(0, 1), (1, 1)], compactions=[b.compaction(1, 48, copies=copies)])
    check(b, model, 0, {})
    seen[101] = [[head - {101} for head in layer] for layer in b.kept(1)]
    assert any(not head >= set(range(48)) for layer in seen[101] for head in layer)
    check(b, model, 1, seen)


@PATHS
def test_a_compacted_row_goes_on_elsewhere_after_a_swap(plain: bool, loaded: Find) -> None:
    model = loaded("qwen3")
    b, alone = bench(model, "h2o", plain=plain, host=16), bench(model, "h2o", plain=plain)
    tokens = random_tokens(140)
    for each in (b, alone):
        each.start(0, tokens)
        each.run([(0, 100)])
        each.run([(0, 1)], compactions=[each.compaction(0, 48)])
    used = -(-b.entries[0] // SIZE)
    out = pairs(*((int(b.tables[0, i]), 3 + i) for i in range(used)))
    b.run([], swap_out=out)
    b.start(1, random_tokens(50, seed=3))  # writes where the other one was
    b.tables[1, :4] = b.tables[0, :4]
    b.run([(1, 50)])
    b.computed[2], b.entries[2], b.tokens[2] = b.computed[0], b.entries[0], b.tokens[0]
    back = pairs(*((3 + i, int(b.tables[2, i])) for i in range(used)))
    b.run([(2, 1)], swap_in=back, started=[Started("r0", 2, b.computed[0])])
    alone.run([(0, 1)])
    assert torch.equal(b.logits[2], alone.logits[0])
    for step in range(3):
        b.run([(2, 4)], compactions=[b.compaction(2, 16)] if step == 1 else [])
        alone.run([(0, 4)], compactions=[alone.compaction(0, 16)] if step == 1 else [])
    assert b.kept(2) == alone.kept(0)
    assert torch.equal(b.logits[2], alone.logits[0])


@PATHS
def test_a_neighbour_does_not_feel_a_compaction(plain: bool, loaded: Find) -> None:
    model = loaded("llama")
    b, alone = bench(model, plain=plain), bench(model, plain=plain)
    tokens = random_tokens(80, seed=5)
    b.start(0, random_tokens(120))
    b.run([(0, 100)])
    for each in (b, alone):
        each.start(1, tokens)
        each.run([(1, 40)])
    freed = b.compaction(0, 64)
    b.tables[1, 3:6] = freed.blocks[-3:]
    b.run([(1, 40)], compactions=[freed])
    alone.run([(1, 40)])
    assert torch.equal(b.logits[1], alone.logits[1])


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_course_of_compactions_is_that_of_masks(data: st.DataObject, loaded: Find) -> None:
    model = loaded("qwen3")
    plain = data.draw(st.booleans())
    b = bench(model, data.draw(st.sampled_from(["random", "h2o", "fifo"])), plain=plain)
    b.start(0, random_tokens(200, seed=data.draw(st.integers(0, 5))))
    b.run([(0, data.draw(st.integers(60, 110)))])
    seen: dict[int, Kept] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        room = (b.entries[0] - 10) // SIZE
        drop = data.draw(st.integers(0, room)) * SIZE
        count, at, before = data.draw(st.integers(1, 20)), b.computed[0], b.evictor.moved
        tasks = [b.compaction(0, drop)] if drop else []
        heads = model.config.layers * model.config.kv_heads
        b.run([(0, count)], compactions=tasks)
        assert b.evictor.moved - before <= heads * min(drop, b.entries[0] - count)
        new = set(range(at, at + count))
        seen[at] = [[head - new for head in layer] for layer in b.kept(0)]
        check(b, model, 0, seen)


def test_more_than_may_go_is_refused(loaded: Find) -> None:
    b = bench(loaded("llama"))
    b.start(0, random_tokens(40))
    b.run([(0, 40)])
    with pytest.raises(ValueError, match="only 30 may go"):
        b.run([], compactions=[b.compaction(0, 32)])
    wrong = b.compaction(0, 16)
    with pytest.raises(ValueError, match="it has 40"):
        b.run([], compactions=[wrong])


def test_hole_filling_moves_live_entries_of_the_tail_alone(loaded: Find) -> None:
    b = bench(loaded("llama"), "fifo")
    b.start(0, random_tokens(100))
    b.run([(0, 96)])
    before = b.executor.cache.data.clone()
    b.run([], compactions=[b.compaction(0, 32)])
    changed = (b.executor.cache.data != before).flatten(1).any(1).nonzero().flatten().tolist()
    # Tokens 2 to 33 go; those of the last two blocks, 64 to 95, take their places.
    assert set(changed) == {int(block) for block in b.tables[0, :3]}
    assert b.evictor.moved == 32 * 2 * 2
    assert np.array_equal(np.sort(list(b.kept(0)[0][0])), [0, 1, *range(34, 96)])
