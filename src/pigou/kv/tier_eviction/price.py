"""Price-based eviction: a block stays while its value covers the tier's price."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

import msgspec

from pigou.config import check_bounds, check_fields
from pigou.kv.block import Block, Entry
from pigou.kv.memory_price import held_value
from pigou.kv.offload import RecomputeCost
from pigou.kv.tier_eviction.policy import EvictionPolicy, TierSetting
from pigou.kv.tier_eviction.reuse import AT_ONCE, ReuseModel, age_bin, use_class
from pigou.request import SECOND

#: Maximum age of the ranking, in nanoseconds.
_REBUILD = 10 * SECOND
#: Uses and last use of a new block.
_UNKNOWN = (0, -AT_ONCE)


class PriceParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `PriceEviction`."""

    eta: float = 0.5  # step of the price
    margin: float = 1.2  # ratio of a newcomer's value to its victim's, at least
    sample: int = 4  # one in this many blocks is sampled for reuse; a power of 2
    prior: float = 20.0  # weight of the lower class in a class's hazards, in lifetimes
    decay: float = 0.98  # factor on counts at each refresh of the hazards
    followed: int = 32_768  # maximum of sampled blocks
    remembered: int = 262_144  # maximum of blocks not held whose uses are remembered


class PriceEviction(EvictionPolicy):
    """Evicts the block of least value; admits blocks of higher value that pay the price.

        value = rate(uses, age) * (mean seconds saved by a block of its chain) / size
        mu <- mu * exp(eta * g / cap)                      (Token-PD, Eq. 2 to 5)

    The rate is `ReuseModel`'s, values are in seconds of prefill per byte and second. g is demand
    in bytes: positive if offered blocks and the cheapest held one pay mu, negative if the cheapest
    does not or bytes are free. Blocks that the tier above holds (`above`) have value 0.
    """

    Params = PriceParams
    exclusive = True

    def __init__(self, setting: TierSetting, params: PriceParams) -> None:
        super().__init__(setting, params)
        check_fields(params, "eta", "remembered", gt=0)
        check_bounds("margin", params.margin, ge=1)
        self.params = params
        self.price = 0.0
        self.reuse = ReuseModel(params.sample, params.prior, params.decay, params.followed)
        #: Blocks not held: uses, and time of the last use.
        self._uses: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        #: Blocks offered last: uses, time of the last use, and value.
        self._candidates: dict[bytes, tuple[int, int, float]] = {}
        self._heap: list[tuple[float, int, Entry]] = []
        self._number = count()
        self._held = self._used = self._evicted = 0
        self._built = (-1, -_REBUILD)

    def learn(self, cost: RecomputeCost) -> None:
        """Replace the recompute cost, and value held blocks again."""
        super().learn(cost)
        self._built = (-1, -_REBUILD)

    # --- values -------------------------------------------------------------------------------

    def value(self, uses: int, age: int, depth: int, size: int) -> float:
        """Return a block's value in s/(byte s); `age` in ns, `depth` of the chain's last block."""
        cost = self.setting.recompute_cost
        saved = cost.base + 0.5 * cost.slope * depth - cost.restore * size
        return held_value(self.reuse.rates[use_class(uses)][age_bin(age)], max(saved, 0.0), size)

    def _present_value(self, entry: Entry, now: int) -> float:
        block = entry.block
        if self.above is not None and self.above(block.key):
            return 0.0
        return self.value(entry.uses + entry.mark, now - entry.last, block.depth, block.size)

    # --- admission ----------------------------------------------------------------------------

    def on_miss(self, blocks: Sequence[Block], now: int) -> None:
        """Record a use for the reuse model."""
        uses_of, mask = self._uses, self.reuse.mask
        for block in blocks:
            key = block[0]
            if not key[-1] & mask:
                self.reuse.use(key, now)
            uses, last = uses_of.pop(key, _UNKNOWN)
            uses_of[key] = uses + (now - last >= AT_ONCE), now
        while len(uses_of) > self.params.remembered:
            uses_of.popitem(last=False)

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        """Return which offered blocks exceed both the price and the value of the victim."""
        self._value_candidates(blocks, now)
        size = sum(block.size for block in blocks)
        room = self.setting.cap_bytes - self._used
        if size <= room:
            self._move(-room)
            return [True] * len(blocks)
        cheapest = self._cheapest(now)
        values = [value for _, _, value in self._candidates.values()]
        if cheapest is None:
            return [room > 0] * len(blocks)
        self._bid(max(values), cheapest.rank, size)
        min_value = max(self.price, cheapest.rank * self.params.margin)
        return [room > 0 or value > min_value for value in values]

    def _value_candidates(self, blocks: Sequence[Block], now: int) -> None:
        deepest = blocks[-1].depth
        candidates = self._candidates = {}
        before, value = (0, 0, 0), 0.0
        for block in blocks:
            uses, last = self._uses.get(block[0], (1, now))
            if before != (uses, last, block.size):
                before = uses, last, block.size
                value = self.value(uses, now - last, deepest, block.size)
            candidates[block[0]] = uses, last, value

    def _remember(self, key: bytes, uses: int, last: int) -> None:
        self._uses[key] = uses, last
        if len(self._uses) > self.params.remembered:
            self._uses.popitem(last=False)

    def _bid(self, best: float, cheapest: float, size: int) -> None:
        if self.price == 0.0:
            self.price = cheapest
        if cheapest < self.price:
            self._move(-size)
        elif best >= self.price:
            self._move(size)

    def _move(self, excess: int) -> None:
        share = max(-1.0, min(1.0, excess / max(1, self.setting.cap_bytes)))
        self.price *= math.exp(self.params.eta * share)

    # --- going --------------------------------------------------------------------------------

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Return the free block of least value if the newcomer's is higher."""
        entry = self._cheapest(now)
        if entry is None:
            return None
        value = self._candidates[newcomer.key][2]
        return entry if value > entry.rank * self.params.margin else None

    def _cheapest(self, now: int) -> Entry | None:
        version, built = self._built
        stale = self._evicted * 8 > self._held or now - built > _REBUILD
        if stale or version != self.reuse.version:
            self._rebuild(now)
        heap = self._heap
        while heap:
            rank, _, entry = heap[0]
            if entry.rank != rank or not entry.free:
                heapq.heappop(heap)
                continue
            value = self._present_value(entry, now)
            if value <= rank:
                entry.rank = value
                heap[0] = (value, next(self._number), entry)
                return entry
            heapq.heappop(heap)
            self._push(entry, now)
        return None

    def _rebuild(self, now: int) -> None:
        """Rank all free blocks again: values fall with age, which a heap does not notice."""
        entries = {id(entry): entry for _, _, entry in self._heap if entry.free}
        self._heap = []
        for entry in entries.values():
            entry.rank = self._present_value(entry, now)
            self._heap.append((entry.rank, next(self._number), entry))
        heapq.heapify(self._heap)
        self._evicted = 0
        self._built = self.reuse.version, now

    def _push(self, entry: Entry, now: int) -> None:
        entry.rank = self._present_value(entry, now)
        heapq.heappush(self._heap, (entry.rank, next(self._number), entry))

    # --- notes --------------------------------------------------------------------------------

    def insert(self, entry: Entry, now: int) -> None:
        """Rank an admitted block, with its remembered uses."""
        entry.mark, entry.last, _ = self._candidates[entry.block.key]
        self._uses.pop(entry.block.key, None)
        self._held += 1
        self._used += entry.block.size
        if entry.free:
            self._push(entry, now)

    def hit(self, entry: Entry, now: int) -> None:
        """Rank the block again; record a use of its whole path."""
        if entry.free:
            self._push(entry, now)
        mask = self.reuse.mask
        above: Entry | None = entry
        while above is not None:
            if not above.block[0][-1] & mask:
                self.reuse.use(above.block[0], now)
            above = above.up

    def freed(self, entry: Entry, now: int) -> None:
        """Rank a block that became free."""
        self._push(entry, now)

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Forget a block, but remember its uses."""
        self._held -= 1
        self._used -= entry.block.size
        self._evicted += 1
        self._remember(entry.block.key, entry.uses + entry.mark, entry.last)
