"""An oracle with stores below the device: what a move copies is what lies there when it is made."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core_oracle import POISON, Oracle, Slot

from pigou.engine.plan import Effects, Plan, Result
from pigou.kv.block import Block, chain_of, keys_of
from pigou.kv.offload import DEVICE, NOWHERE, Move
from pigou.kv.tiers import Tiers
from pigou.request import AllBlocksCleared, BlockRemoved, Medium


@dataclass
class TierOracle(Oracle):
    """Device, host and stores of one engine.

    Attributes:
        stores: of each tier, blocks by key.
        links: of each tier, moves to it and deletions in it that are not done, in order.
        most: of each tier, blocks that its store has room for.
        down: tiers whose store fails at whatever it is asked.
        found: of each tier whose store was not empty at the start, what is said to be there.
        doubtful: blocks that were said to be there, and were gone when that was heard.
        silent: blocks of before the start, of which nobody is told before they are restored.
        told: by KV events, media and keys of what is there.
    """

    stores: list[dict[bytes, list[Slot]]] = field(default_factory=list)
    links: list[deque[Move]] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    silent: set[bytes] = field(default_factory=set)
    told: set[tuple[Medium, bytes]] = field(default_factory=set)
    down: set[int] = field(default_factory=set)
    found: dict[int, list[Block]] = field(default_factory=dict)
    doubtful: set[tuple[int, bytes]] = field(default_factory=set)
    _heard: set[int] = field(default_factory=set)

    @property
    def tiers(self) -> Tiers:
        assert self.core.tiers is not None
        return self.core.tiers

    def execute(self, plan: Plan, most: int = 1_000_000) -> Result:
        """Queue the plan's moves too; nothing void is counted on, or read."""
        now = self.core._state.unix_ns
        for tier in self.tiers.tiers:
            assert all(block.expiry > now for block in tier.blocks()), (
                "a tier counts on what is void"
            )
        for load in plan.loads:
            stream = self.streams.get(load.request)  # None where a session is only expected back
            void = stream is not None and stream.request.expiry <= now
            assert not (void and len(load.tiers)), "what is void is restored"
        for move in plan.moves:
            at = move.source if move.target == NOWHERE else move.target
            self.links[at].append(move)
        self._heard = {tier for tier in self._heard if self.links[tier]}
        return super().execute(plan, most)

    # --- before the start -----------------------------------------------------------------------

    def leave(self, tier: int, tokens: list[int], expiry: int) -> list[Block]:
        """Put a chain's blocks in a store, as if before the start; returns what they are."""
        hashes = self.hashes(tokens, expiry)
        size = self.core.config.block_size
        chain = chain_of(hashes, self.tiers._bytes, expiry) if len(hashes) else []
        for block in chain:
            start = block.depth * size
            content = [tuple(tokens[: i + 1]) for i in range(start, start + size)]
            self.stores[tier][block.key] = content
        return chain

    def recover(self, tier: int) -> Effects:
        """Tell the engine what a store was found to have, some time ago."""
        blocks = self.found.pop(tier)
        self.silent |= {block.key for block in blocks}
        gone = {(tier, block.key) for block in blocks if block.key not in self.stores[tier]}
        going = [
            *self.links[tier],
            *self.tiers._transfers._decided,
        ]  # deletions that were decided meanwhile
        self.doubtful |= gone | {
            (tier, key)
            for move in going
            if (move.source, move.target) == (tier, NOWHERE)
            for key in move.keys
        }
        self._heard.add(tier)
        self.tiers.recover(tier, blocks, self.core._state.unix_ns)
        return Effects()

    def unsure(self, tier: int) -> bool:
        """Whether a store may still hold what its tier has not heard of, or told it to delete."""
        return tier in self.found or tier in self._heard

    # --- moves ----------------------------------------------------------------------------------

    def make(self, tier: int, fails: bool) -> Effects:
        """Make the next move to a tier, or delete there."""
        move = self.links[tier].popleft()
        store = self.stores[tier]
        if move.target == NOWHERE:
            for key in move.keys:
                store.pop(key, None)
            return Effects()
        fails |= bool(self.down & {tier, move.source})
        good = []
        for i, key in enumerate(move.keys):
            if move.source == DEVICE:
                content = list(self.device[move.device[i]])
            else:
                content = self.stores[move.source].get(key)
            full = key not in store and len(store) >= self.most[tier]
            assert not full or self.unsure(tier), "a store would hold more than it may"
            skipped = fails and (i % 2 == len(move.keys) % 2 or tier in self.down)
            good.append(not (skipped or full or content is None))
            if good[-1]:
                store[key] = content
        return self.core.on_transfer_done(move.number, good)

    def restore(self, name: str, missing: int) -> Effects:
        """End a load from tiers; its block number `missing` cannot be read, if there is one."""
        load = self.loads.pop(name)
        size = self.core.config.block_size
        self.write(load.blocks, 0, [POISON] * (len(load.blocks) * size))
        good = min(missing, len(load.blocks))
        keys = keys_of(load.hashes)
        failed = False
        for i, (tier, key) in enumerate(zip(load.tiers.tolist(), keys, strict=True)):
            there = key in self.stores[tier]
            assert there or (tier, key) in self.doubtful, "what is read is not there"
            if i >= good or not there or tier in self.down:
                good = min(good, i)
                failed = tier in self.down
                break
            self.write(load.blocks, i * size, self.stores[tier][key])
        held = [
            self.tiers.tiers[tier].entry(key) for tier, key in zip(load.tiers, keys, strict=True)
        ]
        effects = self.core.loaded(name, good * size, failed)
        for tier, key, entry in zip(load.tiers, keys, held, strict=True):
            if failed and entry is not None:
                assert key in self.tiers.tiers[tier], "what could not be read was forgotten"
        return effects

    def observe(self, effects: Effects) -> None:
        super().observe(effects)
        for event in effects.events:
            if isinstance(event, AllBlocksCleared):
                self.told.clear()
                continue
            keys = keys_of(event.hashes)
            if isinstance(event, BlockRemoved):
                self.told -= {(event.medium, key) for key in keys}
                continue
            if event.medium is not Medium.DEVICE:
                assert event.request == ""
                known = {key for _, key in self.told}
                assert known.issuperset(set(keys) - self.silent), "of what?"
            self.told |= {(event.medium, key) for key in keys}

    def _check_told(self) -> None:
        """Check that the world knows what can be read, and of nothing that is gone."""
        told = set(self.told)
        for event in self.tiers.events._pending:  # not yet taken
            named = {(event.medium, key) for key in event.keys}
            told = told | named if event.stored else told - named
        media, there = self.tiers.events.media, set()
        for tier, medium in enumerate(media):
            keys = {block.key for block in self.tiers.tiers[tier].blocks()}
            now = {(medium, key) for key in keys if self.tiers.readable(tier, key, 0)}
            unsaid = {(medium, key) for key in self.silent}
            assert now - unsaid <= told, "what can be read was not told"
            going = self.tiers._leaving[tier] | set(self.tiers.tiers[tier]._doomed)
            there |= {(medium, key) for key in keys | going}
        assert {each for each in told if each[0] is not Medium.DEVICE} <= there, "it is gone"

    def check(self) -> None:
        """Check also that stores have what tiers think, and nothing under a wrong key."""
        super().check()
        self._check_told()
        size = self.core.config.block_size
        for tier, store in enumerate(self.stores):
            for key, content in store.items():
                high, low = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
                history = self.content[high, low]
                expected = [history[: i + 1] for i in range(len(history) - size, len(history))]
                assert content == expected, "a store has something else under this key"
            for block in self.tiers.tiers[tier].blocks():
                coming = block.key in self.tiers._incoming[tier]
                there = block.key in store or (tier, block.key) in self.doubtful
                assert coming or there, "a tier counts on what its store has not"

    def check_over(self) -> None:
        """Check that what stores have is what tiers have, once nothing is under way."""
        for tier, store in enumerate(self.stores):
            held = {block.key for block in self.tiers.tiers[tier].blocks()}
            assert store.keys() <= held, "a store has what no tier knows of"
            assert self.tiers.tiers[tier].used_bytes == len(held) * self.tiers._bytes
