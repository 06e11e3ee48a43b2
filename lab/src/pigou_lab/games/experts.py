"""Experts as games: requests choose workers and their tokens choose copies of experts.

Nested so, it is one routing game on a series-parallel network, whose Price of Anarchy has the bound
of its latencies' class at any depth (Roughgarden 2003): 4/3 for affine ones. Decode is another
class, since an expert's weights are read once for all its tokens:

| symbol | meaning |
|---|---|
| n_r, h_r | tokens on rank r, and experts that they hit there |
| c, a | seconds to compute a token, and to read an expert |
| l_r = max(c n_r, a h_r) | seconds of rank r; a layer takes those of the slowest |
| n_r (l_r' - l_r) | toll of a token that joins: n_r c in prefill; n_r a or 0 in decode |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from pigou.games import Floats, Indices
from pigou.models.gpus import gpu as find_gpu
from pigou.models.read import architecture
from pigou.placement.expert_placement import ExpertRanks, balance
from pigou.sim.timing_experts import inclusion, read_expert_loads
from pigou_lab.games.nonatomic import Cost, Edge, FlowNetwork

#: Best responses of each token at most.
_ROUNDS = 50
_BETTER = 1.0 - 1e-12


def affine(slope: float, base: float) -> Cost:
    """Return the latency slope x + base."""
    return lambda flow: slope * flow + base


def nested_pigou() -> FlowNetwork:
    """Return the known case: worker A costs x plus Pigou's network of copies, worker B costs 2."""
    edges: list[Edge] = [
        ("requests", "A", affine(1, 0)), ("A", "done", affine(1, 0)), ("A", "done", affine(0, 1)),
        ("requests", "done", affine(0, 2)),
    ]  # fmt: skip
    return FlowNetwork(edges, {("requests", "done"): 1.0})


def nested_game(depth: int, rng: np.random.Generator) -> FlowNetwork:
    """Return a random affine game of `depth` choices one after the other, two ways each."""

    def below(node: str, level: int) -> Iterator[Edge]:
        for way in "ab":
            slope, base = rng.permutation([0.0, rng.uniform(0.1, 2)]).tolist()  # flat, or not
            head = node + way if level > 1 else "done"
            yield node, head, affine(slope, base)
            if level > 1:
                yield from below(head, level - 1)

    return FlowNetwork(list(below("r", depth)), {("r", "done"): 1.0})


@dataclass(frozen=True)
class ActivationGame:
    """Tokens of a layer choose copies of their experts."""

    tokens: Indices  # tokens of each expert, (experts,)
    slots: Indices  # expert of each slot; ranks have as many each, in order
    ranks: int
    token_s: float  # c
    read_s: float  # a

    def rank_s(self, counts: Indices) -> Floats:
        """Return the seconds of each rank by tokens in each slot."""
        by_rank = counts.reshape(self.ranks, -1)
        hit = (by_rank > 0).sum(axis=1)
        seconds: Floats = np.maximum(self.token_s * by_rank.sum(axis=1), self.read_s * hit)
        return seconds

    def layer_s(self, counts: Indices) -> float:
        """Return the seconds of the slowest rank."""
        return float(self.rank_s(counts).max())

    def even(self) -> Indices:
        """Split each expert's tokens evenly over its copies, as EPLB's routing does."""
        counts = np.zeros(len(self.slots), dtype=np.intp)
        for expert in np.flatnonzero(self.tokens):
            own = np.flatnonzero(self.slots == expert)
            counts[own] = self.tokens[expert] // len(own)
            counts[own[: self.tokens[expert] % len(own)]] += 1
        return counts

    def settled(self, counts: Indices, *, tolled: bool, whole: bool = False) -> Indices:
        """Return an equilibrium reached from `counts` by best responses, with tolls or without.

        Players are tokens; with `whole`, all tokens of an expert on a rank move as one.
        """
        counts, size = counts.copy(), len(self.slots) // self.ranks
        grid = counts.reshape(self.ranks, size)  # a view
        sums, hit = grid.sum(axis=1), (grid > 0).sum(axis=1)
        copies = [np.flatnonzero(self.slots == expert) for expert in range(len(self.tokens))]

        def price(slot: int, players: int) -> float:  # for each of the tokens that join
            n, h = int(sums[slot // size]), int(hit[slot // size])
            before = max(self.token_s * n, self.read_s * h)
            after = max(self.token_s * (n + players), self.read_s * (h + (counts[slot] == 0)))
            return float(after + (n * (after - before) / players if tolled else 0.0))

        def move(slot: int, by: int) -> None:
            was_hit = counts[slot] > 0
            counts[slot] += by
            sums[slot // size] += by
            hit[slot // size] += int(counts[slot] > 0) - int(was_hit)

        def respond(slot: int, own: Indices) -> bool:
            players = int(counts[slot]) if whole else 1
            move(slot, -players)
            prices = [price(int(other), players) for other in own]
            best = int(own[int(np.argmin(prices))])
            stays = min(prices) >= price(slot, players) * _BETTER
            move(slot if stays else best, players)
            return not stays

        for _ in range(_ROUNDS):
            moved = False
            for own in copies:
                for slot in own.tolist() if len(own) > 1 else ():
                    while counts[slot] and respond(slot, own):
                        moved = True
            if not moved:
                break
        return counts

    def optimum(self) -> float:
        """Return the fewest seconds of a layer, by trying all splits; small games only."""
        splits = []
        for expert, count in enumerate(self.tokens.tolist()):
            own = np.flatnonzero(self.slots == expert)
            splits.append([(own, parts) for parts in _parts(count, len(own))])
        fewest = np.inf
        counts = np.zeros(len(self.slots), dtype=np.intp)
        for choice in product(*splits):
            for own, parts in choice:
                counts[own] = parts
            fewest = min(fewest, self.layer_s(counts))
        return float(fewest)


def _parts(count: int, ways: int) -> Iterator[Sequence[int]]:
    if ways == 1:
        yield (count,)
        return
    for first in range(count + 1):
        yield from ((first, *rest) for rest in _parts(count - first, ways - 1))


def herding(copies: int) -> ActivationGame:
    """Return `copies` experts with a copy on each of as many ranks, and as many tokens each.

    Tokens spread evenly are at an equilibrium, in which every rank reads every expert. The optimum
    reads one on each: the Price of Anarchy of activation is the number of copies.
    """
    slots = np.tile(np.arange(copies), copies)
    return ActivationGame(np.full(copies, copies), slots, copies, token_s=0.0, read_s=1.0)


def worst_nested(depth: int, trials: int, seed: int) -> float:
    """Return the highest Price of Anarchy of random affine games of a depth."""
    rng = np.random.default_rng(seed)
    return max(nested_game(depth, rng).price_of_anarchy() for _ in range(trials))


def activation_rows(
    model: str, gpu: str, ranks: int, copies: Sequence[int], batches: Sequence[int], load: str
) -> list[dict[str, float]]:
    """Return microseconds of a layer's slowest rank by tokens of a rank and further copies.

    Tokens go evenly to copies, or where selfish tokens, tolled tokens and tolled experts settle.
    """
    shape, device = architecture(model), find_gpu(gpu)
    layer = next(kind for kind in shape.kinds if any(m.copies > 1 for m in kind.matrices))
    matrices = [m for m in layer.matrices if m.copies > 1]
    read_s = sum(m.size / m.copies for m in matrices) / (device.bandwidth * device.streaming)
    flops = sum(2.0 * m.inner * m.outer for m in matrices)
    token_s = flops / (device.peak(shape.compute_dtype) * device.compute)
    loads = read_expert_loads(load, shape.experts)
    weights = np.ones(shape.experts) if loads is None else loads[0]
    rows, rng = [], np.random.default_rng(0)
    for more in copies:
        slots = balance(weights, ExpertRanks(ranks, shape.experts + more)).astype(np.intp)
        for batch in batches:
            tokens = rng.binomial(batch * ranks, inclusion(weights, shape.active)).astype(np.intp)
            game = ActivationGame(tokens, slots, ranks, token_s, read_s)
            even = game.even()
            tolled = game.settled(even, tolled=True)
            ways = {
                "even": even, "selfish": game.settled(even, tolled=False), "tolled": tolled,
                "tolled_experts": game.settled(tolled, tolled=True, whole=True),
            }  # fmt: skip
            seconds = {name: 1e6 * game.layer_s(counts) for name, counts in ways.items()}
            saved = 1.0 - seconds["tolled_experts"] / seconds["even"]
            rows.append({"copies": more, "tokens_of_a_rank": batch, **seconds, "saved": saved})
    return rows
