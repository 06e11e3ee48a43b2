"""Prefixes: recent prompts as a tree, whose branches are the objects of the caching game."""

from __future__ import annotations

from dataclasses import dataclass, field

from pigou.request import BlockKeys


@dataclass(slots=True, eq=False)
class Branch:
    """Consecutive blocks that the same prompts have: from block `start` to before block `end`.

    Attributes:
        keys: of a prompt that has it, from the prompt's first block on.
        start, end: its blocks.
        first: who computed it when it came for the first time, and how much that counts; None
            where it was known before the earliest of these prompts.
        again: the weights of the others, by whom they were sent to.
        below: branches that follow, by the key of their first block.
    """

    keys: BlockKeys
    start: int
    end: int
    first: tuple[str, float] | None
    again: dict[str, float] = field(default_factory=dict)
    below: dict[int, Branch] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return self.end - self.start

    def split(self, at: int) -> None:
        """Cut it before block `at`; what is behind becomes a branch below."""
        rest = Branch(self.keys, at, self.end, self.first, dict(self.again), self.below)
        self.end, self.below = at, {int(self.keys[at]): rest}


class Prefixes:
    """A tree of prompts; blocks are equal where their keys are, as a key tells all before it."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []
        self._roots: dict[int, Branch] = {}

    def add(self, keys: BlockKeys, worker: str, weight: float, known: int = 0) -> None:
        """Add a prompt; earlier ones come first.

        Args:
            keys: of its full blocks, shape (blocks,); those of 0 come last, and are left out.
            worker: that it was sent to.
            weight: how much it counts, above 0.
            known: leading blocks that somebody had when it came.
        """
        blocks = len(keys)
        if blocks and not keys[-1]:
            blocks = int((keys == 0).argmax())
        at, level = 0, self._roots
        while at < blocks:
            branch = level.get(int(keys[at]))
            if branch is None:
                self._grow(level, keys, at, blocks, (worker, weight), known)
                return
            at = _same(branch.keys, keys, at + 1, min(branch.end, blocks))
            if at < branch.end:
                branch.split(at)
                self.branches.extend(branch.below.values())
            branch.again[worker] = branch.again.get(worker, 0.0) + weight
            level = branch.below

    def _grow(
        self, level: dict[int, Branch], keys: BlockKeys, at: int, blocks: int,
        by: tuple[str, float], known: int,
    ) -> None:  # fmt: skip
        """Add what no earlier prompt of the tree has: what was known, and what was new."""
        if known > at:
            old = level[int(keys[at])] = Branch(keys, at, min(known, blocks), None, dict([by]))
            self.branches.append(old)
            level = old.below
        if known < blocks:
            at = max(at, known)
            new = level[int(keys[at])] = Branch(keys, at, blocks, by)
            self.branches.append(new)


def _same(one: BlockKeys, other: BlockKeys, low: int, high: int) -> int:
    """Return up to where two chains are equal, which are so before `low`; at most `high`."""
    if one[high - 1] == other[high - 1]:
        return high
    while low < high:  # blocks before `low` are equal, block `high - 1` and later ones are not
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
