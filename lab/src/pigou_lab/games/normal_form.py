"""Games in normal form: equilibria, optimum, price of anarchy and of stability, commitment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, Indices
from pigou_lab.games import improves

#: Bases of a best-response polytope beyond which mixed equilibria are refused.
MAX_BASES = 200_000
_CHUNK = 10_000
#: Numbers of payoffs scaled to 1 to 2 that count as equal.
_CLOSE = 1e-9
Profile = tuple[int, ...]


@dataclass(frozen=True)
class MixedEquilibrium:
    """An extreme equilibrium of two players: their probabilities and expected payoffs."""

    rows: Floats  # probabilities of the first player's strategies
    columns: Floats
    payoffs: tuple[float, float]  # or costs, in a game of costs
    social: float  # expected welfare, or social cost


@dataclass(frozen=True)
class Commitment:
    """A leader's best commitment, with what follows it."""

    strategy: Floats  # probabilities of the leader's strategies
    replies: Profile  # choices of the followers
    payoffs: tuple[float, ...]  # expected, or costs, of all players
    social: float


class NormalFormGame:
    """Players who each choose a strategy; player i is paid ``payoffs[i][choices]``.

    ``payoffs`` holds an array per player, with a dimension per player. With ``costs`` they are
    paid instead of earned. The optimum is of the players' sum, or of ``social`` where given.
    Raises ValueError for shapes that differ, or values that are not finite.
    """

    def __init__(
        self, payoffs: Sequence[ArrayLike], *, costs: bool = False, social: ArrayLike | None = None
    ) -> None:
        try:
            given = [np.asarray(one, dtype=np.float64) for one in payoffs]
        except (TypeError, ValueError):
            raise ValueError("payoffs must be numbers in rows of equal length") from None
        shapes = {one.shape for one in given}
        if not given or shapes != {given[0].shape} or given[0].ndim != len(given):
            raise ValueError(
                f"{len(given)} players have payoffs of shape {', '.join(map(str, shapes))}: give "
                "each player an array with one dimension a player, all alike"
            )
        if not given[0].size or not all(np.isfinite(one).all() for one in given):
            raise ValueError("payoffs must be finite, and every player needs a strategy")
        self.costs = costs
        self.shape = given[0].shape
        #: Payoffs, or costs negated, of each player.
        self.values: list[Floats] = [-one if costs else one for one in given]
        total: Floats = np.sum(given, axis=0) if social is None else np.asarray(social, np.float64)
        if total.shape != self.shape or not np.isfinite(total).all():
            raise ValueError(f"social has shape {total.shape}: give finite numbers {self.shape}")
        self.social = total

    @property
    def players(self) -> int:
        """Number of players."""
        return len(self.values)

    def payoffs(self, profile: Profile) -> tuple[float, ...]:
        """Return what each player is paid, or pays, in a profile of pure strategies."""
        return tuple(self._signed(float(one[profile])) for one in self.values)

    def pure_equilibria(self) -> list[Profile]:
        """Return every profile that no player gains by leaving alone."""
        stays = np.ones(self.shape, dtype=bool)
        for player, own in enumerate(self.values):
            best = own.max(axis=player, keepdims=True)
            stays &= own >= best - _CLOSE * np.maximum(1.0, np.abs(best))
        return [tuple(map(int, profile)) for profile in np.argwhere(stays)]

    def optimum(self) -> Profile:
        """Return the profile of largest welfare, or of least social cost."""
        at = int(self.social.argmin() if self.costs else self.social.argmax())
        return tuple(map(int, np.unravel_index(at, self.shape)))

    @cached_property
    def equilibria(self) -> list[MixedEquilibrium]:
        """The extreme equilibria of two players, all of them, degenerate games included.

        They are the pairs of vertices of both best-response polytopes with all labels (Mangasarian
        1964; Avis, Rosenberg, Savani and von Stengel 2010). In a game that is not degenerate these
        are all equilibria, one a pair of supports. In a degenerate one all others are mixtures of
        these, and no better nor worse than the best and worst. Raises ValueError for other numbers
        of players, and beyond 200,000 bases.
        """
        if self.players != 2:
            raise ValueError(
                f"{self.players} players: mixed equilibria are enumerated for two; use "
                "pure_equilibria()"
            )
        rows, columns = self.shape
        first, second = (_scaled(one) for one in self.values)
        xs, x_labels = _vertices(second.T, False)
        ys, y_labels = _vertices(first, True)
        pairs = np.argwhere((x_labels[:, None] | y_labels[None]) == 2 ** (rows + columns) - 1)
        return [self._mixed(xs[i], ys[j]) for i, j in pairs.tolist()]

    def price_of_anarchy(self, *, pure: bool = False) -> float:
        """Return how many times better the optimum is than the worst equilibrium."""
        worst = max if self.costs else min
        return self._price(worst(self._socials(pure)))

    def price_of_stability(self, *, pure: bool = False) -> float:
        """Return how many times better the optimum is than the best equilibrium."""
        best = min if self.costs else max
        return self._price(best(self._socials(pure)))

    def commitment(self) -> Commitment:
        """Return the first player's best pure commitment; the others choose in order after it.

        Ties go the leader's way (a strong Stackelberg equilibrium). Raises ValueError for one
        player.
        """
        self._check_followers()
        profile = self._replies(())
        chosen = np.zeros(self.shape[0])
        chosen[profile[0]] = 1.0
        return Commitment(chosen, profile[1:], self.payoffs(profile), float(self.social[profile]))

    def mixed_commitment(self) -> Commitment:
        """Return the first of two players' best mixed commitment: a linear program a reply.

        Conitzer and Sandholm, "Computing the optimal strategy to commit to" (EC 2006).
        """
        from scipy.optimize import linprog  # half of the command's import time

        self._check_followers()
        if self.players != 2:
            raise ValueError(f"{self.players} players: a mixed commitment takes two")
        leader, follower = self.values
        best: tuple[float, Floats, int] | None = None
        for reply in range(self.shape[1]):
            worse = (follower - follower[:, [reply]]).T  # the follower must not gain by another
            made = linprog(
                -leader[:, reply], A_ub=worse, b_ub=np.zeros(len(worse)),
                A_eq=np.ones((1, self.shape[0])), b_eq=[1.0], bounds=(0.0, 1.0), method="highs",
            )  # fmt: skip
            if made.status == 0 and (best is None or improves(made.fun, -best[0])):
                best = -float(made.fun), made.x, reply
        assert best is not None, "a best reply to any commitment is one of the replies"
        _, strategy, reply = best
        column = np.zeros(self.shape[1])
        column[reply] = 1.0
        made_of = self._mixed(strategy, column)
        return Commitment(strategy, (reply,), made_of.payoffs, made_of.social)

    def _signed(self, value: float) -> float:
        return 0.0 - value if self.costs else value

    def _mixed(self, rows: Floats, columns: Floats) -> MixedEquilibrium:
        own, other = (self._signed(float(rows @ one @ columns)) for one in self.values)
        return MixedEquilibrium(rows, columns, (own, other), float(rows @ self.social @ columns))

    def _socials(self, pure: bool) -> list[float]:
        if not pure and self.players == 2:
            return [equilibrium.social for equilibrium in self.equilibria]
        found = [float(self.social[profile]) for profile in self.pure_equilibria()]
        if not found:
            raise ValueError("no pure equilibrium: the price is not defined")
        return found

    def _price(self, reached: float) -> float:
        best = float(self.social[self.optimum()])
        over, under = (reached, best) if self.costs else (best, reached)
        if under > 0:
            return over / under
        if math.isclose(over, under, abs_tol=1e-12):
            return 1.0
        raise ValueError(
            f"the {'optimum costs' if self.costs else 'equilibrium is worth'} {under:g}: a ratio "
            "needs more than 0; compare differences"
        )

    def _check_followers(self) -> None:
        if self.players < 2:
            raise ValueError("a commitment needs a follower: give two players or more")

    def _replies(self, chosen: Profile) -> Profile:
        """The whole profile that follows these choices, each player's by backward induction."""
        player = len(chosen)
        if player == self.players:
            return chosen
        best: Profile | None = None
        for choice in range(self.shape[player]):
            made = self._replies((*chosen, choice))
            if best is None or self._prefers(player, made, best):
                best = made
        assert best is not None
        return best

    def _prefers(self, player: int, new: Profile, old: Profile) -> bool:
        own = self.values[player]
        if improves(-own[new], -own[old]):
            return True
        if improves(-own[old], -own[new]):
            return False
        return improves(-self.values[0][new], -self.values[0][old])


def _scaled(values: Floats) -> Floats:
    """Payoffs moved and scaled to 1 to 2, which leaves the equilibria."""
    low, high = float(values.min()), float(values.max())
    return 1.0 + (values - low) / ((high - low) or 1.0)


def _vertices(replies: Floats, swapped: bool) -> tuple[Floats, Indices]:
    """Vertices of {x >= 0, replies x <= 1} but 0, as probabilities, and their labels as bits.

    ``replies`` (other's strategies, own): the other's scaled payoffs. Labels are the first player's
    strategies, then the second's; ``swapped`` says that x is the second's.
    """
    others, own = replies.shape
    if (bases := math.comb(own + others, own)) > MAX_BASES:
        raise ValueError(f"{bases} bases of {own} + {others} strategies: give at most {MAX_BASES}")
    sides = np.vstack([-np.eye(own), replies])
    bounds = np.concatenate([np.zeros(own), np.ones(others)])
    found: dict[bytes, tuple[Floats, int]] = {}
    for tight in _chunks(combinations(range(own + others), own)):
        matrices = sides[tight]
        regular = np.linalg.svd(matrices, compute_uv=False)[:, -1] > _CLOSE
        points = np.linalg.solve(matrices[regular], bounds[tight[regular]][..., None])[..., 0]
        slack = bounds - points @ sides.T
        inside = (slack >= -_CLOSE).all(axis=1) & (points.sum(axis=1) > _CLOSE)
        for point, gaps in zip(points[inside], slack[inside], strict=True):
            zero, best = np.flatnonzero(gaps[:own] <= _CLOSE), np.flatnonzero(gaps[own:] <= _CLOSE)
            labels = (zero + others, best) if swapped else (zero, best + own)
            bits = sum(1 << int(label) for part in labels for label in part)
            mix = np.maximum(point, 0.0) / np.maximum(point, 0.0).sum()
            found.setdefault((np.round(mix, 8) + 0.0).tobytes(), (mix, bits))
    vertices = [vertex for vertex, _ in found.values()]
    return np.array(vertices), np.array([bits for _, bits in found.values()], dtype=np.intp)


def _chunks(bases: Iterator[tuple[int, ...]]) -> Iterator[Indices]:
    while part := list(islice(bases, _CHUNK)):
        yield np.array(part, dtype=np.intp)


#: Known games by name: payoffs of both players, and names of strategies.
KNOWN: dict[str, tuple[list[list[list[float]]], list[list[str]]]] = {
    "prisoners-dilemma": (
        [[[3, 0], [5, 1]], [[3, 5], [0, 1]]], [["cooperate", "defect"]] * 2),
    "battle-of-the-sexes": ([[[2, 0], [0, 1]], [[1, 0], [0, 2]]], [["opera", "football"]] * 2),
    "matching-pennies": ([[[1, -1], [-1, 1]], [[-1, 1], [1, -1]]], [["heads", "tails"]] * 2),
    "rock-paper-scissors": (
        [[[0, -1, 1], [1, 0, -1], [-1, 1, 0]], [[0, 1, -1], [-1, 0, 1], [1, -1, 0]]],
        [["rock", "paper", "scissors"]] * 2),
    "stag-hunt": ([[[4, 0], [3, 3]], [[4, 3], [0, 3]]], [["stag", "hare"]] * 2),
    "chicken": ([[[0, -1], [1, -10]], [[0, 1], [-1, -10]]], [["swerve", "straight"]] * 2),
    # Conitzer and Sandholm (2006): commitment is worth 3 where the equilibrium is worth 2.
    "commitment": ([[[2, 4], [1, 3]], [[1, 0], [0, 1]]], [["up", "down"], ["left", "right"]]),
}  # fmt: skip
