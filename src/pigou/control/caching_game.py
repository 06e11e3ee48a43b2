"""Caching game: cost of the current block placement relative to the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pigou.control.latency_model.estimates import Estimates
from pigou.control.prefix_index.holder_table import RUN
from pigou.games.replication import ReplicationGame
from pigou.request import BlockKeys

Floats = NDArray[np.float64]

#: Objects of a game: the branches whose later accesses would take longest to recompute. Other
#: branches are ignored, and take no room.
OBJECTS = 64
#: Most entries of a placement (workers x objects); large fleets have fewer objects.
ENTRIES = 2048
#: Cost of a block in host memory and in storage over computing it: one less Dynamo 1.x's default
#: weights of such hits. Workers do not report their own costs.
HOST, STORAGE = 0.25, 0.75
#: A worker has learned no slope where its tokens take less than this part of a prompt's base.
_FLAT = 0.05


class Prompt(NamedTuple):
    """A prompt sent to a worker."""

    worker: str
    tokens: int
    keys: BlockKeys  # keys of the full blocks, (blocks,)
    cached: int  # leading blocks cached on this worker
    known: int  # leading blocks cached on any worker
    weight: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Result of a caching game, in seconds of prefill."""

    poa: float  # `cost` over `best`, at least 1; 1 where there is nothing to compute
    cost: float  # seconds under the present placement
    best: float  # seconds under the best placement
    # the part of both that no placement changes: blocks that no worker had when they came first,
    # tokens outside of full blocks, and seconds apart from tokens.
    unavoidable: float
    # seconds with the caches at the prompts' arrival; `cost` is of caches that have just served
    # them. Over `best` it may be below 1, as placements changed meanwhile.
    met: float
    prompts: int
    objects: int  # branches in the game
    exact: bool  # True if these are all reused branches


@dataclass(frozen=True, slots=True)
class CachingFleet:
    """The workers of a game, in row order."""

    workers: Sequence[str]  # their ids
    block_size: int  # tokens in a block, the same for all
    capacity: Floats  # KV blocks on the device, (workers,)
    estimates: Estimates
    # seconds a token from another worker's cache, (workers,); infinite where no worker reads
    # another's.
    links: Floats


def caching_game(
    window: Iterable[Prompt], fleet: CachingFleet, look: Callable[[BlockKeys], NDArray[np.int64]]
) -> Placement | None:
    """Play the game on a window of prompts, earliest first; None if it has none."""
    row = {worker: index for index, worker in enumerate(fleet.workers)}
    tree = Prefixes()
    own = [prompt for prompt in window if prompt.worker in row]
    if not own:
        return None
    fleet = _with_slope(fleet, own)
    for prompt in own:
        tree.add(prompt.keys, prompt.worker, prompt.weight, prompt.known)
    bare, met = _met(own, row, fleet)
    unavoidable = bare + _new([branch for branch in tree.branches if branch.first], row, fleet)
    again = [branch for branch in tree.branches if branch.again]
    if not again:
        return Placement(1.0, unavoidable, unavoidable, unavoidable, met, len(own), 0, True)
    demand = _demand(again, row)
    compute = _seconds(again, fleet)
    max_objects = max(1, min(OBJECTS, ENTRIES // len(fleet.workers)))
    hottest = np.argsort(-(demand * compute).sum(axis=0), kind="stable")[:max_objects]
    hot = [again[k] for k in hottest.tolist()]
    held, host, storage = _held(hot, look)
    demand, compute = demand[:, hottest], compute[:, hottest]
    blocks = np.array([branch.blocks for branch in hot], dtype=np.float64)
    tokens = blocks * fleet.block_size
    below = host * (1.0 - HOST) + storage * (1.0 - STORAGE)
    game = ReplicationGame(
        demand,
        blocks,
        np.maximum(fleet.capacity, (held * blocks).sum(axis=1)),
        compute * (1.0 - below),
        fleet.links[:, None] * tokens,
    )
    cost = unavoidable + game.social_cost(held)
    best = min(cost, unavoidable + game.optimum()[1])
    poa = cost / best if best > 0.0 else 1.0
    exact = len(hot) == len(again)
    return Placement(poa, cost, best, unavoidable, met, len(own), len(hot), exact)


def _with_slope(fleet: CachingFleet, window: Sequence[Prompt]) -> CachingFleet:
    """Return the fleet with base seconds spread over tokens if no slope was learned."""
    known = fleet.estimates
    left = [prompt.tokens - prompt.cached * fleet.block_size for prompt in window]
    computed = [tokens for tokens in left if tokens > fleet.block_size]
    if not computed:
        return fleet
    mean = sum(computed) / len(computed)
    flat = known.prefill_token * mean < _FLAT * known.prefill_base
    flat &= known.prefill_pair * mean * mean / 2 < _FLAT * known.prefill_base
    if not flat.any():
        return fleet
    table = known.table.copy()
    made = Estimates(table)
    made.prefill_token[flat] = known.prefill_base[flat] / mean
    made.prefill_base[flat] = 0.0
    return replace(fleet, estimates=made)


def _met(window: Sequence[Prompt], row: dict[str, int], fleet: CachingFleet) -> tuple[float, float]:
    """Return the seconds outside full blocks, and the seconds spent at arrival."""
    rows = np.array([row[prompt.worker] for prompt in window])
    weights = np.array([prompt.weight for prompt in window])
    blocks = np.array([(prompt.cached, len(prompt.keys)) for prompt in window], dtype=np.float64)
    tokens = np.array([prompt.tokens for prompt in window]) - blocks[:, 1] * fleet.block_size
    known = fleet.estimates
    bare = known.prefill_base[rows] + known.prefill_token[rows] * np.maximum(tokens, 1.0)
    missed = bare + _computing(fleet, rows, *blocks.T)
    return _weighted_sum(weights, bare), _weighted_sum(weights, missed)


def _weighted_sum(weights: Floats, seconds: Floats) -> float:
    """Return the sum of products in a fixed order, independent of the BLAS."""
    return float((weights * seconds).sum())


def _new(branches: Sequence[Branch], row: dict[str, int], fleet: CachingFleet) -> float:
    """Return the seconds of new blocks, computed where they arrived."""
    if not branches:
        return 0.0
    firsts = [branch.first for branch in branches if branch.first]
    rows = np.array([row[worker] for worker, _ in firsts])
    weights = np.array([weight for _, weight in firsts])
    return _weighted_sum(weights, _computing(fleet, rows, *_spans(branches)))


def _demand(branches: Sequence[Branch], row: dict[str, int]) -> Floats:
    """Return the reuses of each branch per worker, (workers, branches)."""
    weights = np.zeros((len(row), len(branches)))
    for index, branch in enumerate(branches):
        for worker, weight in branch.again.items():
            weights[row[worker], index] = weight
    return weights


def _seconds(branches: Sequence[Branch], fleet: CachingFleet) -> Floats:
    """Return the seconds to compute each branch, (workers, branches)."""
    rows = np.arange(len(fleet.workers))[:, None]
    return _computing(fleet, rows, *_spans(branches))


def _spans(branches: Sequence[Branch]) -> Floats:
    """Return the first and last block of branches, (2, branches)."""
    return np.array([(branch.start, branch.end) for branch in branches], dtype=np.float64).T


def _computing(
    fleet: CachingFleet, rows: NDArray[np.integer], first: Floats, last: Floats
) -> Floats:
    """Return the seconds to compute blocks `first` to before `last` of a prompt."""
    low, high = first * fleet.block_size, np.maximum(first, last) * fleet.block_size
    known = fleet.estimates
    pairs = (high - low) * 0.5 * (low + high)
    token, pair = known.prefill_token[rows], known.prefill_pair[rows]
    seconds: Floats = np.maximum(token * (high - low) + pair * pairs, 0.0)
    return seconds


def _held(
    branches: Sequence[Branch], look: Callable[[BlockKeys], NDArray[np.int64]]
) -> tuple[Floats, Floats, Floats]:
    """Return each worker's share of each branch on device, host and storage, as three arrays."""
    seen = [look(branch.keys[: branch.end])[:RUN] for branch in branches]
    runs = np.cumsum(np.stack(seen, axis=-1), axis=0)  # (tiers, workers, branches)
    start, end = _spans(branches)
    parts = np.clip((runs - start) / (end - start), 0.0, 1.0)
    return parts[0], parts[1] - parts[0], parts[2] - parts[1]


@dataclass(slots=True, eq=False)
class Branch:
    """Consecutive blocks shared by the same prompts, from `start` to before `end`."""

    keys: BlockKeys  # keys of a prompt with this branch, from the prompt's first block on
    start: int
    end: int
    # worker that computed it first, and that prompt's weight; None if it was cached before the
    # earliest of these prompts.
    first: tuple[str, float] | None
    # weights of the other prompts by worker.
    again: dict[str, float] = field(default_factory=dict)
    # branches that follow, by the key of their first block.
    below: dict[int, Branch] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.end - self.start

    def split(self, at: int) -> None:
        """Split before block `at`; the rest becomes a child."""
        rest = Branch(self.keys, at, self.end, self.first, dict(self.again), self.below)
        self.end, self.below = at, {int(self.keys[at]): rest}


class Prefixes:
    """Prefix tree of prompts by block keys."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []
        self._roots: dict[int, Branch] = {}

    def add(self, keys: BlockKeys, worker: str, weight: float, known: int = 0) -> None:
        """Add a prompt, earliest first, with `weight` above 0.

        `keys`, (blocks,), may end in zeros, which are ignored; `known` leading blocks were cached.
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
        """Add a new branch: blocks cached before, and new ones."""
        if known > at:
            old = level[int(keys[at])] = Branch(keys, at, min(known, blocks), None, dict([by]))
            self.branches.append(old)
            level = old.below
        if known < blocks:
            at = max(at, known)
            new = level[int(keys[at])] = Branch(keys, at, blocks, by)
            self.branches.append(new)


def _same(one: BlockKeys, other: BlockKeys, low: int, high: int) -> int:
    """Return the length of the common prefix of two chains, between `low` and `high`."""
    if one[high - 1] == other[high - 1]:
        return high
    while low < high:  # blocks before `low` are equal, block `high - 1` and later ones are not
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
