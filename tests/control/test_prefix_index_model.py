"""The index answers as a plain dictionary would, whatever workers say in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.control.prefix_index import PrefixIndex, chain
from pigou.control.prefix_index.holder_table import ON_DEVICE, ON_HOST, ON_STORAGE, RUN
from pigou.request import BlockRemoved, BlockStored, Medium
from pigou.wire.kv_event_decoding import Cleared, Removed, Stored, WireEvent

WORKERS = ("a", "b", "c")
TIERS = ("GPU", "CPU", "STORAGE")
SIZES = (2, 3)
#: Sequences that share their first half.
SEQUENCES = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6, 70, 80, 90, 11, 12, 13])


@dataclass
class Block:
    key: int | None
    media: set[str]


@dataclass
class Model:
    """What the workers hold: engine's hash -> key and media."""

    held: dict[str, dict[int, Block]] = field(default_factory=lambda: {w: {} for w in WORKERS})

    def apply(self, worker: str, event: WireEvent) -> None:
        blocks = self.held[worker]
        if isinstance(event, Cleared):
            blocks.clear()
        elif isinstance(event, Removed):
            for name in event.hashes:
                assert isinstance(name, int)
                if name in blocks:
                    blocks[name].media.discard(event.medium or "GPU")
                    if not blocks[name].media:
                        del blocks[name]
        elif isinstance(event, Stored):
            for name, key in zip(event.hashes, self.keys(blocks, event), strict=True):
                assert isinstance(name, int)
                block = blocks.setdefault(name, Block(None, set()))
                block.media.add(event.medium or "GPU")
                block.key = key if block.key is None else block.key

    def keys(self, blocks: dict[int, Block], event: Stored) -> list[int | None]:
        unknown: list[int | None] = [None] * len(event.hashes)
        parent = None
        if not event.token_ids:
            return unknown
        if event.parent is not None:
            assert isinstance(event.parent, int)
            before = blocks.get(event.parent)
            if before is None or before.key is None:
                return unknown
            parent = before.key
        found: list[int | None] = chain(
            event.token_ids, event.block_size, event.salt or "", parent
        ).tolist()
        return found

    def overlap(self, worker: str, keys: list[int]) -> tuple[int, ...]:
        """Blocks of the run that are best held in each tier."""
        counts = dict.fromkeys(TIERS, 0)
        for key in keys:
            media = {m for b in self.held[worker].values() if b.key == key for m in b.media}
            if not media:
                break
            counts[next(tier for tier in TIERS if tier in media)] += 1
        return tuple(counts.values())


@st.composite
def events(draw: st.DrawFn) -> WireEvent:
    """Something that an engine could say; its hashes are (sequence, size, twin, index)."""
    size = draw(st.sampled_from(SIZES))
    which, twin = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    tokens = SEQUENCES[which]
    blocks = len(tokens) // size
    first = draw(st.integers(0, blocks - 1))
    stop = draw(st.integers(first, blocks))
    names = [1000 * which + 100 * size + 10 * twin + i for i in range(blocks)]
    medium = draw(st.sampled_from([*TIERS, None]))
    kind = draw(st.sampled_from(["stored"] * 6 + ["hidden", "removed", "removed", "cleared"]))
    if kind == "cleared":
        return Cleared()
    if kind == "removed":
        return Removed(tuple(draw(st.permutations(names[first:stop]))), medium)
    return Stored(
        hashes=tuple(names[first:stop]),
        parent=names[first - 1] if first else None,
        token_ids=tuple(tokens[first * size : stop * size]) if kind == "stored" else (),
        block_size=size,
        medium=medium,
    )


Step = tuple[str, WireEvent | str]
steps = st.lists(
    st.tuples(
        st.sampled_from(WORKERS), st.one_of(events(), events(), st.sampled_from(["lost", "drop"]))
    ),
    max_size=40,
)


def check(index: PrefixIndex, model: Model) -> None:
    for tokens in SEQUENCES:
        for size in SIZES:
            keys = chain(tokens, size)
            told = index.overlaps(WORKERS, keys)
            for row, worker in enumerate(WORKERS):
                expected = model.overlap(worker, keys.tolist())
                assert (told[ON_DEVICE, row], told[ON_HOST, row], told[ON_STORAGE, row]) == expected
                assert index.overlap(worker, keys) == sum(expected)
    for worker, blocks in model.held.items():
        cache = index.cache(worker)
        assert cache.blocks == len(blocks)
        assert cache.held == sum(block.key is not None for block in blocks.values())
    held = {b.key for blocks in model.held.values() for b in blocks.values()} - {None}
    assert (index.keys, index.blocks) == (len(held), sum(map(len, model.held.values())))


def crowd(index: PrefixIndex, medium: str | None) -> None:
    """Let 200 others come, store a block and go: numbers, and the table's rows, become longer."""
    others = [f"other {number}" for number in range(200)]
    for other in others:
        index.apply(other, [Stored((9,), None, (90, 91), 2, medium=medium)])
    for other in others:
        index.drop(other)


@settings(max_examples=examples(300))
@given(steps, st.integers(0, 12), st.sampled_from([None, "CPU"]))
def test_the_index_answers_as_dictionaries_would(
    story: list[Step], before: int, medium: str | None
) -> None:
    index, model = PrefixIndex(), Model()
    for place, (worker, event) in enumerate(story):
        if place == before:
            crowd(index, medium)
        if event == "lost":
            index.lost(worker)
            model.held[worker].clear()
        elif event == "drop":
            index.drop(worker)
            model.held[worker].clear()
        else:
            assert not isinstance(event, str)
            index.apply(worker, [event])
            model.apply(worker, event)
        check(index, model)


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(WORKERS), st.booleans(), st.integers(1, 40), st.sampled_from(Medium)
        )
    )
)
def test_core_events_answer_as_sets_would(story: list[tuple[str, bool, int, Medium]]) -> None:
    index = PrefixIndex()
    truth: dict[str, set[tuple[int, Medium]]] = {worker: set() for worker in WORKERS}
    hashes = np.arange(2, 82, dtype=np.uint64).reshape(40, 2)
    for worker, store, stop, medium in story:
        part = hashes[:stop] if store else hashes[stop - 1 : stop]
        named = {(key, medium) for key in part[:, 1].tolist()}
        if store:
            index.apply(worker, [BlockStored("r", 0, part, hashes[:0], medium)])
            truth[worker] |= named
        else:
            index.apply(worker, [BlockRemoved(part, medium)])
            truth[worker] -= named
    told = index.overlaps(WORKERS, hashes[:, 1])
    for row, worker in enumerate(WORKERS):
        held = {key for key, _ in truth[worker]}
        run = next((i for i, key in enumerate(hashes[:, 1].tolist()) if key not in held), 40)
        assert told[RUN, row] == run
    assert index.keys == len({key for held in truth.values() for key, _ in held})


@settings(max_examples=examples(100))
@given(steps, st.integers(1, 9), st.integers(1, 16))
def test_limits_hold_and_what_is_matched_was_stored(
    story: list[Step], most: int, total: int
) -> None:
    index, model = PrefixIndex(max_blocks=most, max_total=total), Model()
    for worker, event in story:
        if isinstance(event, str):
            index.drop(worker)
            model.held[worker].clear()
        else:
            index.apply(worker, [event])
            model.apply(worker, event)
        sizes = [index.cache(each).blocks for each in WORKERS]
        assert max(sizes) <= most
        assert sum(sizes) == index.blocks <= total
        for tokens in SEQUENCES:
            keys = chain(tokens, 2)
            for row, each in enumerate(WORKERS):
                whole = sum(model.overlap(each, keys.tolist()))
                assert index.overlaps(WORKERS, keys)[RUN, row] <= whole
    for worker in WORKERS:
        index.drop(worker)
    assert (index.blocks, index.keys) == (0, 0)
