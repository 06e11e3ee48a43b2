"""The lane of long prompts: reserved tokens of each step, rows and KV blocks, lent when idle.

| what | long prompts | short requests |
|---|---|---|
| tokens of a step | first `tokens`; alone `idle_tokens` | the rest; `yields` times in a row all |
| rows | `seqs`; more without short requests | all but those owed to long prompts that wait |
| blocks | `kv_share`; more without short requests | all but those owed likewise |

A token's attention takes time with its context: after `halved_at` tokens a chunk has half of the
tokens, and ever fewer, so that each takes the same time. The first long prompt starts whatever it
needs. Lent rows and blocks come back as requests end.
"""

from __future__ import annotations

from pigou.config import LaneConfig
from pigou.engine.block_table import Rows
from pigou.engine.sequence import Sequence, WaitingQueue
from pigou.request import Ints

#: Numbers of the lanes in the waiting queue.
SHORT, LONG = 0, 1


class LongLane:
    """Says what either lane may take."""

    def __init__(self, config: LaneConfig, blocks: int) -> None:
        self.config = config
        self.blocks = int(config.kv_share * blocks)  # reserved for long prompts
        self.rows: list[Sequence] = []  # long prompts with rows
        self._yielded = 0  # successive steps whose tokens went to short prompts

    def of(self, seq: Sequence) -> int:
        """Return a sequence's lane."""
        return LONG if self.config.is_long(seq.request.prompt) else SHORT

    def enter(self, seq: Sequence) -> None:
        """Record that a sequence has a row."""
        if self.of(seq) == LONG:
            self.rows.append(seq)

    def leave(self, seq: Sequence) -> None:
        """Record that a sequence lost its row."""
        if seq in self.rows:
            self.rows.remove(seq)

    def held(self, blocks: Ints) -> int:
        """Return the blocks of long prompts; `blocks` are those by row."""
        return sum(blocks.item(seq.row) for seq in self.rows)

    def step_tokens(
        self, rows_used: int, waiting: WaitingQueue, budget: int, prefilling: list[Sequence]
    ) -> int:
        """Return the tokens that long prompts may compute in a step, at the start of a prompt."""
        short = waiting.head(skip=LONG) is not None
        idle = rows_used <= 1 and not short
        short = short or any(self.of(seq) == SHORT for seq in prefilling)
        if short and self._yielded < self.config.yields:
            self._yielded += 1
            return 0
        self._yielded = 0
        tokens = (self.config.idle_tokens or budget) if idle else self.config.tokens
        return min(tokens, budget)

    def chunk(self, tokens: int, context: int) -> int:
        """Return how many tokens after `context` others take the time of `tokens` first ones."""
        half = self.config.halved_at
        return max(1, tokens * half // (half + context)) if half and tokens else tokens

    def has_row(self, seq: Sequence, rows: Rows, block_size: int, waiting: WaitingQueue) -> bool:
        """True if a lane has a row for a waiting sequence, and a long prompt its blocks."""
        seqs, running = self.config.seqs, len(self.rows)
        if self.of(seq) == LONG:
            idle = rows.used == running and waiting.head(skip=LONG) is None
            needed = self.held(rows.blocks) + -(-seq.length // block_size)
            return not running or idle or (running < seqs and needed <= self.blocks)
        owed = seqs - running if waiting.head(skip=SHORT) is not None else 0
        return rows.free > max(0, owed)

    def reserve(self, seq: Sequence, block_size: int, blocks: Ints, waiting: WaitingQueue) -> int:
        """Return the blocks that a waiting long prompt keeps from a short sequence."""
        head = waiting.head(skip=SHORT)
        if head is None or self.of(seq) == LONG:
            return 0
        needed = -(-head.length // block_size)
        return max(0, min(self.blocks - self.held(blocks), needed))

    def victims(self, running: list[Sequence], blocks: Ints) -> list[Sequence]:
        """Return the sequences of the lane that is over its share of blocks; all if only one is."""
        over = LONG if self.held(blocks) > self.blocks else SHORT
        return [seq for seq in running if self.of(seq) == over] or running
