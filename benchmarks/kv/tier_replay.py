"""Replays of a trace through one tier or two, and Belady's choice as the bound."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.kv.tier_traces import Event, Replay
from pigou.kv.block import Block, Entry
from pigou.kv.offload import RecomputeCost
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.lru import LruEviction, RankedEviction
from pigou.kv.tier_eviction.policy import EvictionPolicy, TierSetting, load, make
from pigou.models.gpus import GPUS
from pigou.models.read import architecture
from pigou.request import NEVER
from pigou.sim.timing import RooflineTiming, StepShape

MODEL, GPU = "llama-3.1-8b", "h200"
#: Bytes a second from host memory: PCIe 5 x16, at about 80% of its 63 GB/s.
HOST_LINK = 50e9


#: Tokens of the chunk that is timed; what a block takes of it is its part.
CHUNK = 512


def worth(tokens: int, link: float = HOST_LINK) -> RecomputeCost:
    """Seconds that a block of `tokens` tokens saves, which counts as one byte here.

    The roofline's time of a chunk of prompt after d chunks is a line in d. A block of a part p of
    the chunk takes p of its base, and p * p of its slope, which is for each block before it.
    """
    model = architecture(MODEL)
    timing = RooflineTiming(model, GPUS[GPU])
    depths = np.arange(0, 128, 16)
    took = [
        timing.durations(
            StepShape(np.array([CHUNK], np.int32), np.array([d * CHUNK], np.int32), np.array([0])),
            1,
        )[0]
        for d in depths
    ]
    slope, base = np.polyfit(depths, np.array(took) * 1e-9, 1)
    part = tokens / CHUNK
    return RecomputeCost(float(base * part), float(slope * part**2), model.kv_bytes * tokens / link)


class Future:
    """When each block is used, to look ahead."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._uses: dict[bytes, list[int]] = defaultdict(list)
        for event in events:
            if event.asks:
                for key in event.keys:
                    self._uses[key].append(event.at)

    def after(self, key: bytes, now: int) -> int:
        """The next use after now, `NEVER` for none."""
        uses = self._uses.get(key, [])
        place = bisect_right(uses, now)
        return uses[place] if place < len(uses) else NEVER


class Belady(RankedEviction):
    """The block that is used again last goes, or stays out (Belady 1966), leaf first.

    The bound of hits at this cap, as blocks are of one size and a parent is always used no later
    than its child. For seconds it is a mark, no bound: it does not weigh what a hit saves.
    """

    def __init__(self, setting: TierSetting, future: Future) -> None:
        super().__init__(setting)
        self._future = future

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        """Return for each whether it is used again."""
        return [self._future.after(block.key, now) < NEVER for block in blocks]

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Return the block that is used again last, if that is later than the newcomer."""
        entry = super().victim(newcomer, now)
        later = entry is not None and -entry.rank > self._future.after(newcomer.key, now)
        return entry if later else None

    def rank(self, entry: Entry, now: int) -> float:
        """Return the next use, the latest first."""
        return -self._future.after(entry.block.key, now)


@dataclass
class Outcome:
    """What a replay came to; `hit` of blocks of prompts, seconds saved, `written` of blocks."""

    hits: int = 0
    saved_s: float = 0.0
    written: int = 0
    cpu_s: float = 0.0


def one_tier(replay: Replay, cap: int, policy: EvictionPolicy, gains: RecomputeCost) -> Outcome:
    """A tier that is offered all that is computed, and read for each prompt."""
    tier = Tier(cap, policy)
    found = Outcome()
    begin = time.process_time()
    for event in replay.events:
        held = tier.find(event.keys, event.at)
        if event.asks:
            found.hits += held
            found.saved_s += gains.recompute(0, held) - gains.restore * held
            tier.hit(event.keys[:held], event.at)
        if held < len(event.keys):
            found.written += len(tier.admit(event.blocks[held:], event.at).admitted)
    found.cpu_s = time.process_time() - begin
    tier.check()
    return found


def policy_of(
    name: str, cap: int, gains: RecomputeCost, future: Future, **params: Any
) -> EvictionPolicy:
    """A policy by name, or `belady`."""
    setting = TierSetting(cap, gains)
    return Belady(setting, future) if name == "belady" else load(name, setting, params)


#: Ways to fill the lower tier: what it is offered, and its policy.
MODES = {
    "write-through": ("computed", "lru"),
    "victims": ("evicted", "lru"),
    "kvbm": ("computed", "kvbm"),
    "price at once": ("computed", "price"),
    "price": ("last call", "price"),
}


#: Gives the lower tier an event, with the blocks of it in the upper tier and in both tiers; returns
#: the blocks written to the lower tier.
Way = Callable[[Tier, Tier, Event, int, int], int]


def two_tiers(replay: Replay, caps: tuple[int, int], mode: str, gains: RecomputeCost) -> Outcome:
    """A device tier, LRU, above another one; hits below come up, and cost the link's time.

    `computed`: the lower one is offered what of a prompt or an answer it lacks, and told of the
    hits in what it holds. `evicted`: it gets what the upper one evicts, and gives up what comes up
    (but not a block that others in it stand on). `last call`: while it has room it is offered what
    is computed; then what the upper one is about to give up, with all before it that it lacks.
    """
    offered, name = MODES[mode]
    device = Tier(caps[0], make(LruEviction, TierSetting(caps[0])))
    lower = Tier(caps[1], load(name, TierSetting(caps[1], gains)), rooted=offered != "evicted")
    if offered == "last call":
        lower.policy.above = device.__contains__
    ways: dict[str, Way] = {
        "computed": _computed, "evicted": _evicted, "last call": LastCall(replay),
    }  # fmt: skip
    run = ways[offered]
    found = Outcome()
    begin = time.process_time()
    for event in replay.events:
        own = device.find(event.keys, event.at)
        total = own + lower.find(event.keys[own:], event.at)
        if event.asks:
            found.hits += total
            found.saved_s += gains.recompute(0, total) - gains.restore * (total - own)
        found.written += run(device, lower, event, own, total)
    found.cpu_s = time.process_time() - begin
    device.check()
    lower.check()
    return found


def _computed(device: Tier, lower: Tier, event: Event, own: int, _total: int) -> int:
    below = lower.find(event.keys, event.at)
    if event.asks:
        device.hit(event.keys[:own], event.at)
        lower.hit(event.keys[:below], event.at)
    if own < len(event.keys):
        device.admit(event.blocks[own:], event.at)
    if below < len(event.keys):
        return len(lower.admit(event.blocks[below:], event.at).admitted)
    return 0


def _evicted(device: Tier, lower: Tier, event: Event, own: int, total: int) -> int:
    if event.asks:
        device.hit(event.keys[:own], event.at)
        lower.hit(event.keys[own:total], event.at)
    came_up, victims = _bring_up(device, event, own)
    up = set(came_up)
    for block in reversed(event.blocks[own:total]):
        entry = lower.entry(block.key)
        if block.key in up and entry is not None and entry.down is None:
            lower.drop([block.key], event.at)
    return sum(len(lower.admit([block], event.at).admitted) for block in victims)


def _bring_up(device: Tier, event: Event, own: int) -> tuple[list[bytes], list[Block]]:
    """Let the device have a chain; return what came, and what it has no room for.

    Chains may be longer than the device; of these, too, the rest goes down.
    """
    new = event.blocks[own:]
    if not new:
        return [], []
    came, evicted = device.admit(new, event.at)
    return came, [*evicted, *(block for block in new if block.key not in device)]


class LastCall:
    """Fills the lower tier with what the upper one gives up, in whole prefixes.

    A chain is offered when its end is given up, and what is refused then, not before it was used
    again.
    """

    def __init__(self, replay: Replay) -> None:
        self._known = {block.key: block for event in replay.events for block in event.blocks}
        self._offered: set[bytes] = set()

    def __call__(self, device: Tier, lower: Tier, event: Event, own: int, _total: int) -> int:
        """Return how many blocks were written to the lower tier."""
        self._offered.difference_update(event.keys)
        if event.asks:
            device.hit(event.keys[:own], event.at)
        _, victims = _bring_up(device, event, own)
        if event.asks:
            below = lower.use(event.blocks, event.at)
        else:  # blocks of an answer; the prompt was used when it came
            below = lower.find(event.keys, event.at)
            lower.policy.on_miss(event.blocks[below:], event.at)
        room = lower.cap_bytes - lower.used_bytes
        written = 0
        if room and below < len(event.keys):
            first = event.blocks[below : below + room]
            written = len(lower.admit(first, event.at, used=False).admitted)
        return written + self._give_up(device, lower, victims, event.at)

    def _give_up(self, device: Tier, lower: Tier, victims: list[Block], now: int) -> int:
        written = 0
        for block in sorted(victims, key=lambda block: -block.depth):
            if block.key in self._offered or block.key in device:
                continue
            path: list[Block] = []
            at: Block | None = block
            while at is not None and at.key not in lower:
                path.append(at)
                at = self._known.get(at.parent)
            self._offered.update(step.key for step in path)
            if path:
                written += len(lower.admit(path[::-1], now, used=False).admitted)
        return written
