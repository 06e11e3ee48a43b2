"""What tiers tell the world, in any order of moves: nothing comes up that had been forgotten."""

from __future__ import annotations

from random import Random

from eviction_names import policy
from hypothesis import given
from hypothesis import strategies as st

from pigou.kv.block import hashes_of, keys_of
from pigou.kv.offload import DEVICE, NOWHERE, Move
from pigou.kv.tier import Tier
from pigou.kv.tiers import Tiers
from pigou.request import NEVER, SECOND, BlockHashes, BlockRemoved, Ints, Medium

BYTES = 10
Told = set[tuple[Medium, bytes]]


def tiers_of(caps: list[int], staging: int) -> Tiers:
    made = [Tier(cap * BYTES, policy("lru", cap * BYTES)) for cap in caps]
    return Tiers(made, BYTES, [staging] * len(caps), copies=99)


def chain(start: int, length: int) -> BlockHashes:
    """A chain of blocks, the same ones for an equal start; the first is everybody's."""
    keys = [f"{0 if i == 0 else start:8}{i:8}".encode() for i in range(length)]
    return hashes_of(keys)


def hear(tiers: Tiers, told: Told) -> None:
    """Take events in; a tier's block must be known from elsewhere."""
    for event in tiers.events.take():
        keys = keys_of(event.hashes)
        if isinstance(event, BlockRemoved):
            told -= {(event.medium, key) for key in keys}
        else:
            known = {key for _, key in told}
            assert known.issuperset(keys), "of what?"
            told |= {(event.medium, key) for key in keys}


def land(tiers: Tiers, move: Move, told: Told, now: int) -> None:
    tiers.on_transfer_done(move.number, [True] * len(move.keys), now)
    hear(tiers, told)
    if move.source == DEVICE:  # which hands the blocks out then
        told -= {(Medium.DEVICE, key) for key in move.keys}


@given(
    caps=st.lists(st.integers(1, 6), min_size=2, max_size=3),
    staging=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_what_is_told_is_known_from_somewhere(caps: list[int], staging: int, seed: int) -> None:
    tiers, random = tiers_of(caps, staging), Random(seed)
    told: Told = set()
    under: list[Move] = []
    for step in range(60):
        hashes = chain(random.randrange(1, 5), random.randrange(1, 6))
        device: Ints = hashes[:, 0].astype("int32")
        told |= {(Medium.DEVICE, key) for key in keys_of(hashes)}
        tiers.use(hashes, NEVER, step * SECOND)
        tiers.offer(hashes, device, NEVER, step * SECOND, 99)
        for _ in range(3):
            hear(tiers, told)
            under += [move for move in tiers.drain() if move.target != NOWHERE]
            if under and random.random() < 0.7:
                link = random.choice(under).target  # each makes its moves in order
                move = next(move for move in under if move.target == link)
                under.remove(move)
                land(tiers, move, told, step * SECOND)
    tiers.check()
