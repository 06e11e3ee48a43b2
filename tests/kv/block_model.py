"""The laws of blocks in plain Python, to compare the compiled kernels against."""

from __future__ import annotations

from dataclasses import dataclass, field

Hash = tuple[int, int]


@dataclass
class BlockModel:
    """Blocks as lists and dictionaries.

    Attributes:
        blocks: how many there are.
        refs: reference counts.
        free: blocks without a reference, in the order in which they are handed out.
        cached: hash to block.
        parent: hash to the hash before it, None at the beginning.
    """

    blocks: int
    refs: list[int] = field(init=False)
    free: list[int] = field(init=False)
    cached: dict[Hash, int] = field(default_factory=dict)
    parent: dict[Hash, Hash | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.refs = [0] * self.blocks
        self.free = list(range(self.blocks))

    def hash_of(self, block: int) -> Hash | None:
        return next((h for h, b in self.cached.items() if b == block), None)

    def claim(self, block: int) -> set[Hash]:
        self.free.remove(block)
        self.refs[block] = 1
        found = self.hash_of(block)
        return self.uncache(found) if found else set()

    def uncache(self, root: Hash) -> set[Hash]:
        gone = {root}
        for child in [h for h, parent in self.parent.items() if parent == root]:
            gone |= self.uncache(child)
        del self.cached[root], self.parent[root]
        return gone

    def match(self, hashes: list[Hash]) -> list[int]:
        found = []
        for each in hashes:
            if each not in self.cached:
                break
            found.append(self.cached[each])
        return found

    def take(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def cache_full_blocks(
        self, table: list[int], hashes: list[Hash], start: int, stop: int
    ) -> list[Hash]:
        new: list[Hash] = []
        for i in range(start, stop):
            parent = hashes[i - 1] if i else None
            if hashes[i] == (0, 0) or (parent is not None and parent not in self.cached):
                break
            if hashes[i] not in self.cached:
                self.cached[hashes[i]] = table[i]
                self.parent[hashes[i]] = parent
                new.append(hashes[i])
        return new

    def release(self, table: list[int], start: int, hashes: list[Hash]) -> int:
        freed = 0
        for i in reversed(range(len(table))):
            block = table[i]
            if i >= start:
                self.refs[block] -= 1
                if self.refs[block] == 0:
                    freed += 1
                    at = len(self.free) if self.hash_of(block) else 0
                    self.free.insert(at, block)
            duplicate = self.cached.get(hashes[i]) if i < len(hashes) else None
            if duplicate is not None and duplicate != block and self.refs[duplicate] == 0:
                self.free.remove(duplicate)
                self.free.append(duplicate)
        return freed

    def release_chain(self, table: list[int]) -> int:
        first = len(table)
        while first:
            found = self.hash_of(table[first - 1])
            on_it = {self.cached[h] for h, above in self.parent.items() if found and above == found}
            if self.refs[table[first - 1]] != 1 or not on_it <= set(table[first : first + 1]):
                break
            first -= 1
        for block in table:
            self.refs[block] -= 1
        last = [block for block in reversed(table[:first]) if not self.refs[block]]
        self.free = [*reversed(table[first:]), *self.free, *last]
        return len(last) + len(table) - first
