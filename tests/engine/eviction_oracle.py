"""An oracle whose rows give up entries: any that may go, in each KV head others.

A slot holds one token history for each head, or one history where they are equal. What a head has
is compared as a set: entries that were given up leave holes that others fill.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from core_oracle import POISON, Oracle, Slot, Stream
from tier_oracle import TierOracle

from pigou.engine.plan import Compaction, Plan, Recomputation, Result

HEADS = 2


def join(heads: list[Slot]) -> Slot:
    return heads[0] if all(head == heads[0] for head in heads) else ("heads", *heads)


def split(slot: Slot) -> list[Slot]:
    return list(slot[1:]) if slot[:1] == ("heads",) else [slot] * HEADS  # type: ignore[arg-type]


@dataclass
class EvictionOracle(Oracle):
    """Rows may give up entries.

    Attributes:
        rng: chooses victims and worths.
        mute: share of the appraisals that are not answered.
        kept: positions that each head has of a request's; all of them where it is not there.
        given: entries given up.
        revived: entries computed again.
    """

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    mute: float = 0.0
    kept: dict[str, list[set[int]]] = field(default_factory=dict)
    given: int = 0
    revived: int = 0

    # --- what rows have -------------------------------------------------------------------------

    def begin(self, stream: Stream, blocks: np.ndarray, computed: int) -> None:
        name = stream.request.id
        seq = self.core._state.sequences[name]
        if not seq.dropped:
            self.kept.pop(name, None)
        self._check_entries(stream, blocks, computed, computed - seq.dropped)

    def attend(self, stream: Stream, blocks: np.ndarray, start: int, kv: int) -> None:
        self._check_entries(stream, blocks, start, kv)
        for positions in self.kept.get(stream.request.id, ()):
            positions.add(start)  # who gave up entries computes one token at a time

    def _check_entries(self, stream: Stream, blocks: np.ndarray, start: int, kv: int) -> None:
        kept = self.kept.get(stream.request.id)
        if kept is None:
            super().attend(stream, blocks, start, kv)
            return
        assert all(len(positions) == kv for positions in kept)
        assert max(map(max, kept)) == start - 1
        self._compare(stream, self.read(blocks, kv), kept)

    def _compare(self, stream: Stream, slots: list[Slot], kept: list[set[int]]) -> None:
        history = self.history(stream, len(stream.tokens))
        for head in range(HEADS):
            held = Counter(split(slot)[head] for slot in slots)
            assert held == Counter(history[p] for p in kept[head]), "foreign KV"

    def truncate(self, name: str, tokens: int) -> None:
        """Forget a request's last tokens."""
        stream, size = self.streams[name], self.core.config.block_size
        del stream.tokens[-tokens:]
        stream.generated -= tokens
        computed = len(stream.tokens) - 1
        stream.known = min(stream.known, max(stream.request.prompt, computed) // size)
        for positions in self.kept.get(name, ()):
            positions.difference_update(range(computed, computed + tokens))

    # --- compaction -----------------------------------------------------------------------------

    def _move(self, plan: Plan) -> None:
        assert len({each.row for each in plan.compactions}) == len(plan.compactions)
        assert not {each.row for each in plan.compactions} & {r.row for r in plan.recomputations}
        for compaction in plan.compactions:
            self._compact(compaction)
        super()._move(plan)
        for revival in plan.recomputations:
            self._revive(revival)

    def _compact(self, plan: Compaction) -> None:
        config, size = self.core.config.eviction, self.core.config.block_size
        assert config is not None
        stream = self.streams[self.rows[plan.row]]
        assert not stream.request.hold, "what is held for a pull is given up"
        computed = len(stream.tokens) - 1
        kept = self.kept.setdefault(stream.request.id, [set(range(computed)) for _ in range(HEADS)])
        assert len(plan.blocks) == -(-plan.entries // size)
        assert plan.drop > 0
        assert plan.drop % size == plan.first % size == 0
        slots = [split(slot) for slot in self.read(plan.blocks, plan.entries)]
        history = self.history(stream, computed)
        self._compare(stream, [join(slot) for slot in slots], kept)
        left = plan.entries - plan.drop
        assert left >= config.least
        for head in range(HEADS):
            column = [slot[head] for slot in slots]
            places = {history[p]: p for p in kept[head]}
            may = [
                i for i in range(plan.first, plan.entries)
                if config.sinks <= places[column[i]] < computed - config.recent
            ]  # fmt: skip
            gone = self.rng.sample(may, plan.drop)
            kept[head] -= {places[column[i]] for i in gone}
            live = [column[i] for i in range(left, plan.entries) if i not in gone]
            holes = [i for i in gone if i < left]
            self.rng.shuffle(holes)
            for i, slot in zip(holes, live, strict=True):
                slots[i][head] = slot
        self.write(plan.blocks, 0, [join(slot) for slot in slots[:left]])
        for block in plan.blocks[-(plan.drop // size) :]:
            self.device[block] = [POISON] * size
        self.given += plan.drop

    def _revive(self, plan: Recomputation) -> None:
        size = self.core.config.block_size
        stream = self.streams[self.rows[plan.row]]
        kept = self.kept[stream.request.id]
        computed = len(stream.tokens) - 1
        assert all(len(positions) == plan.entries for positions in kept)
        assert len(plan.blocks) == -(-(plan.entries + plan.count) // size)
        assert plan.count % size == 0
        back = []
        for positions in kept:
            chosen = self.rng.sample(sorted(set(range(computed)) - positions), plan.count)
            positions.update(chosen)
            back.append(chosen)
        history = self.history(stream, computed)
        slots = [join([history[p] for p in places]) for places in zip(*back, strict=True)]
        self.write(plan.blocks, plan.entries, slots)
        self.revived += plan.count

    # --- appraisal ------------------------------------------------------------------------------

    def execute(self, plan: Plan, most: int = 1_000_000) -> Result:
        result = super().execute(plan, most)
        for row, first, blocks in plan.to_score.tolist():
            assert first % self.core.config.block_size == 0
            assert blocks > 0
            if self.rng.random() < self.mute:
                continue
            short = self.rng.choice([0, 0, 0, 1])
            result.lost_returns[row] = self._curve(max(blocks - short, 0))
            gone = int(self.core._state.rows.dropped[row]) // self.core.config.block_size
            if gone:
                result.regained_returns[row] = self._curve(gone)[::-1].copy()
        return result

    def _curve(self, count: int) -> np.ndarray:
        return np.sort([self.rng.choice([0.0, 0.01, 0.5, 1.0, 2.0]) for _ in range(count)])


@dataclass
class EvictionTierOracle(EvictionOracle, TierOracle):
    """With tiers below."""
