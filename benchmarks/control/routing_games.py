"""Random routing games: what greedy choice costs over the optimum, with tolls and without.

    python -m benchmarks.control.routing_games [--games 3000] [--seed 0] [--plot FILE.svg]

Every game has 2-6 workers with unequal latency laws, and 2-16 requests in random order. Half of
the games give all requests the same overlaps, half give each its own. The optimum is the
min-cost flow's; wherever brute force can go (up to 20,000 assignments) it is checked against it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pigou.games.latency import LatencyLaw
from pigou_lab.games.routing import RoutingGame

BRUTE = 20_000
OPTIMAL = 1 + 1e-9
QUANTILES = (0.5, 0.9, 0.99)
COLOURS = {False: "#b8442f", True: "#2f6fb8"}


@dataclass
class Outcome:
    """Cost over optimum of each game, by whether overlaps are equal and tolls charged."""

    ratios: dict[tuple[bool, bool], list[float]]
    compared: int = 0
    agreed: int = 0


def random_game(rng: np.random.Generator, *, equal: bool) -> RoutingGame:
    workers, requests = int(rng.integers(2, 7)), int(rng.integers(2, 17))
    laws = [
        LatencyLaw(
            rng.uniform(0, 0.05),
            rng.uniform(0.02, 0.1),
            rng.uniform(0, 0.5),
            rng.uniform(3, 20),
            rng.uniform(0.5, 2),
        )
        for _ in range(workers)
    ]
    overlaps = np.broadcast_to(rng.random((1 if equal else requests, workers)), (requests, workers))
    omega = min(law.b for law in laws)  # a whole prefix saves at most all of the base latency
    return RoutingGame(laws, overlaps, omega)


def brute_force(game: RoutingGame) -> float:
    """Least social cost of all assignments, looked at together."""
    shape = (game.workers,) * game.requests
    every = np.indices(shape).reshape(game.requests, -1)
    counts = np.arange(game.requests + 1)
    totals = np.zeros((game.workers, game.requests + 1))
    totals[:, 1:] = game.latency * counts[1:]
    cost = -game.savings[np.arange(game.requests)[:, None], every].sum(axis=0)
    for worker in range(game.workers):
        cost += totals[worker, (every == worker).sum(axis=0)]
    return float(cost.min())


def play(games: int, seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    outcome = Outcome({(e, t): [] for e in (True, False) for t in (False, True)})
    for index in range(games):
        equal = index % 2 == 0
        game = random_game(rng, equal=equal)
        best = game.social_cost(game.optimum())
        if game.workers**game.requests <= BRUTE:
            outcome.compared += 1
            outcome.agreed += bool(np.isclose(brute_force(game), best, rtol=1e-9))
        order = rng.permutation(game.requests)
        for tolls in (False, True):
            cost = game.social_cost(game.greedy(order, tolls=tolls))
            outcome.ratios[equal, tolls].append(cost / best)
    return outcome


def report(outcome: Outcome) -> None:
    print(f"flow equals brute force in {outcome.agreed} of {outcome.compared} games small enough")
    heads = ["overlaps", "choice", "games", "optimal", "mean", "p50", "p90", "p99", "max"]
    print(" ".join(f"{h:>12}" if i < 2 else f"{h:>8}" for i, h in enumerate(heads)))
    for (equal, tolls), ratios in outcome.ratios.items():
        array = np.array(ratios)
        names = ["equal" if equal else "unequal", "with tolls" if tolls else "plain"]
        figures = [array.mean(), *np.quantile(array, QUANTILES), array.max()]
        optimal = (array <= OPTIMAL).mean()
        print(
            " ".join(f"{n:>12}" for n in names)
            + f" {len(array):>8} {optimal:>8.1%} "
            + " ".join(f"{f:>8.4f}" for f in figures)
        )


def panel(title: str, series: dict[bool, NDArray[np.float64]], left: float) -> str:
    """One plot: the share of games (up) that cost at most so much over the optimum (right)."""
    width, height, bottom = 320.0, 220.0, 260.0
    top = max(float(np.quantile(s, 0.99)) for s in series.values())
    span = max(top - 1.0, 0.01)
    parts = [
        f'<text x="{left}" y="24" font-size="14">{title}</text>',
        f'<rect x="{left}" y="{bottom - height}" width="{width}" height="{height}" '
        'fill="none" stroke="#999"/>',
    ]
    for tick in np.linspace(0, 1, 5):
        x, y = left + tick * width, bottom - tick * height
        parts.append(
            f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{1 + tick * span:.2f}</text>'
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick:.0%}</text>'
        )
    for row, (tolls, ratios) in enumerate(series.items()):
        share = np.linspace(0, 1, 201)
        cost = np.maximum(np.quantile(ratios, share), 1.0)
        line = " ".join(
            f"{left + min((c - 1) / span, 1) * width:.1f},{bottom - s * height:.1f}"
            for c, s in zip(cost, share, strict=True)
        )
        name = "with tolls" if tolls else "plain"
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{COLOURS[tolls]}" stroke-width="2"/>'
            f'<text x="{left + width - 8}" y="{bottom - 28 + 16 * row}" text-anchor="end" '
            f'fill="{COLOURS[tolls]}">{name}: mean {ratios.mean():.4f}</text>'
        )
    return "\n".join(parts)


def plot(outcome: Outcome, path: Path) -> None:
    """Write the distributions as an SVG picture."""
    panels = [
        panel(
            f"{'Equal' if equal else 'Unequal'} overlaps",
            {t: np.array(outcome.ratios[equal, t]) for t in (False, True)},
            60.0 + 400.0 * index,
        )
        for index, equal in enumerate((True, False))
    ]
    caption = "Share of games whose greedy assignment costs at most so much over the optimum"
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 310" '
        'font-family="sans-serif" font-size="11">\n<rect width="820" height="310" fill="#fff"/>\n'
        + "\n".join(panels)
        + f'\n<text x="410" y="302" text-anchor="middle">{caption}</text>\n</svg>\n',
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", type=int, default=3000, help="how many games (3000)")
    parser.add_argument("--seed", type=int, default=0, help="of the games (0)")
    parser.add_argument("--plot", type=Path, help="write the distributions to this SVG file")
    options = parser.parse_args()
    begun = time.perf_counter()
    outcome = play(options.games, options.seed)
    report(outcome)
    print(f"{options.games} games in {time.perf_counter() - begun:.1f} s")
    if options.plot:
        plot(outcome, options.plot)


if __name__ == "__main__":
    main()
