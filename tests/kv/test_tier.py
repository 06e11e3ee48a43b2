"""The laws of a tier hold under any sequence of operations, with every policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from eviction_names import KINDS, policy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.kv.block import ROOT, Block, IntegrityError, chain_of, keys_of
from pigou.kv.tier import Tier
from pigou.request import NEVER

NAMES = sorted(KINDS)


def chain(name: str, count: int, size: int = 1, expiry: int = NEVER) -> list[Block]:
    """Blocks whose keys tell their whole path, as hashes do: a prefix of `name` is one chain."""
    keys = [name[: i + 1].encode().ljust(16, b".") for i in range(count)]
    return [Block(k, keys[i - 1] if i else ROOT, i, size, expiry) for i, k in enumerate(keys)]


def keys(blocks: list[Block]) -> list[bytes]:
    return [block.key for block in blocks]


def tier(cap: int, name: str = "lru", rooted: bool = True) -> Tier:
    return Tier(cap, policy(name, cap), rooted)


def admit_all(one: Tier, blocks: list[Block]) -> None:
    """Offer until it is in: some policies want to see a block more than once."""
    for now in range(4):
        one.admit(blocks, now)


PATHS = st.text("ab", min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "use", "admit", "drop", "pin", "unpin", "expire"]),
        PATHS,
        st.integers(1, 3),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", NAMES)
@given(STEPS, st.integers(0, 14), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=examples(60))
def test_the_laws_hold_after_every_step(
    name: str, steps: list[tuple[str, str, int]], cap: int, rooted: bool, random: Any
) -> None:
    one = tier(cap, name, rooted)
    pinned: list[list[bytes]] = []
    for now, (what, path, size) in enumerate(steps):
        expiry = NEVER if size < 3 else now + random.randrange(20)
        blocks = [
            Block(b.key, b.parent, b.depth, len(b.key.strip(b".")) % 3 + 1, expiry)
            for b in chain(path, len(path))
        ]
        before = {block.key: block for block in one.blocks()}
        gone: set[bytes]
        safe = {key for each in pinned for key in each}
        if what in ("use", "admit"):
            found = one.find(keys(blocks), now)
            if what == "use":
                one.hit(keys(blocks)[:found], now)
            taken, evicted = one.admit(blocks[0 if rooted else random.randrange(len(path)) :], now)
            assert not {block.key for block in evicted} & safe
            gone = set()
            for block in evicted:
                gone.add(block.key)
                assert not [
                    b for b in before.values() if b.parent == block.key and b.key not in gone
                ]
            assert set(keys(list(one.blocks()))) == (before.keys() | set(taken)) - gone
        elif what == "drop":
            one.drop([blocks[-1].key], now)
            if rooted and blocks[-1].key in before:
                assert not [key for key in before if key in one and key.startswith(path.encode())]
        elif what == "pin":
            held = [key for key in keys(blocks) if key in one]
            one.pin(held)
            pinned.append(held)
        elif what == "unpin" and pinned:
            one.unpin(pinned.pop(random.randrange(len(pinned))), now)
        elif what == "expire":
            one.expire(now)
            assert all(block.expiry > now for block in one.blocks())
        one.check()
    for each in pinned:
        one.unpin(each, len(steps))
    one.check()
    one.drop(keys(list(one.blocks())), len(steps))
    one.check()
    assert one.used_bytes == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "price"])
def test_whatever_is_free_can_be_evicted(name: str) -> None:
    one = tier(8, name)
    for path in ("aaaa", "aabb", "b"):
        admit_all(one, chain(path, len(path)))
    full = one.used_bytes
    for now in range(4, 44):
        new = chain(chr(ord("c") + now % 20) * 8, 8)
        one.admit(new, now)
        one.check()
    assert full >= 7
    assert one.find(keys(chain("aaaa", 4)), 50) == 0, "the old is still there"


def test_a_hit_is_as_long_as_what_is_held() -> None:
    one = tier(10)
    blocks = chain("abcdef", 6)
    assert one.find(keys(blocks), 0) == 0
    one.admit(blocks[:4], 0)
    assert one.find(keys(blocks), 0) == 4
    assert one.used_bytes == 4


def test_an_inner_block_outlives_its_children() -> None:
    one = tier(4)
    one.admit(chain("ab", 2), 1)
    one.admit(chain("cd", 2), 2)
    evicted = one.admit(chain("e", 1), 3).evicted
    assert [block.key.strip(b".") for block in evicted] == [b"ab"]
    assert one.admit(chain("fg", 2), 4).evicted[0].key.strip(b".") == b"a"


def test_a_parent_is_as_young_as_its_youngest_child() -> None:
    one = tier(4)
    one.admit(chain("ab", 2), 1)
    one.admit(chain("cd", 2), 2)
    one.hit(keys(chain("ab", 2)), 3)
    one.drop([chain("ab", 2)[1].key], 4)
    entry = one.entry(chain("a", 1)[0].key)
    assert entry is not None
    assert (entry.last, entry.uses) == (3, 1)


def test_what_does_not_fit_whole_comes_in_from_its_beginning() -> None:
    one = tier(3)
    taken, evicted = one.admit(chain("abcdef", 6), 1)
    assert [key.strip(b".") for key in taken] == [b"a", b"ab", b"abc"]
    assert not evicted


def test_a_rooted_tier_takes_no_orphans_and_another_does() -> None:
    blocks = chain("abc", 3)
    assert tier(5).admit(blocks[1:], 1).admitted == []
    other = tier(5, rooted=False)
    other.admit(blocks[2:], 1)
    other.admit(blocks[1:2], 2)
    other.check()
    entry = other.entry(blocks[1].key)
    assert entry is not None
    assert not entry.free, "it has a child"
    assert len(other.drop([blocks[1].key], 3)) == 2


def test_a_pinned_block_stays_and_makes_the_newcomer_wait() -> None:
    one = tier(2)
    old = chain("ab", 2)
    one.admit(old, 1)
    one.pin(keys(old))
    assert one.admit(chain("cd", 2), 2) == ([], [])
    one.unpin(keys(old), 3)
    assert len(one.admit(chain("cd", 2), 4).evicted) == 2


def test_bytes_of_a_block_dropped_while_read_come_back_with_its_pin() -> None:
    one = tier(2)
    old = chain("a", 1, size=2)
    one.admit(old, 1)
    one.pin(keys(old))
    assert one.drop(keys(old), 2) == []
    assert one.find(keys(old), 2) == 0
    assert one.used_bytes == 2
    assert one.admit(old, 3).admitted == [], "its bytes are still being read"
    assert one.unpin(keys(old), 4) == keys(old)
    assert one.used_bytes == 0
    assert one.admit(old, 5).admitted == keys(old)


def test_what_expired_is_neither_found_nor_taken() -> None:
    one = tier(9)
    blocks = chain("ab", 2, expiry=100)
    one.admit(blocks, 1)
    assert one.find(keys(blocks), 99) == 2
    assert one.find(keys(blocks), 100) == 0
    assert sorted(one.expire(100)) == sorted(keys(blocks))
    assert one.admit(blocks, 100).admitted == []
    assert one.used_bytes == 0


def test_unpinning_more_often_than_pinning_is_refused() -> None:
    one = tier(2)
    one.admit(chain("a", 1), 1)
    with pytest.raises(ValueError, match="not pinned"):
        one.unpin(keys(chain("a", 1)), 2)
    with pytest.raises(KeyError):
        one.pin(keys(chain("b", 1)))


def test_a_broken_law_is_found() -> None:
    one = tier(4)
    one.admit(chain("ab", 2), 1)
    one.used_bytes += 1
    with pytest.raises(IntegrityError, match="counted"):
        one.check()


def test_keys_are_the_digests_that_hashes_were_made_of() -> None:
    hashes = np.array([[1, 2], [2**64 - 1, 3]], dtype=np.uint64)
    first, second = keys_of(hashes)
    assert first == (1).to_bytes(8) + (2).to_bytes(8)
    assert second == b"\xff" * 8 + (3).to_bytes(8)
    blocks = chain_of(hashes, 7, start=4, parent=b"p" * 16)
    assert [block.depth for block in blocks] == [4, 5]
    assert [block.parent for block in blocks] == [b"p" * 16, first]
