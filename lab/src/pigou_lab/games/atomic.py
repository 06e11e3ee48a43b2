"""Atomic congestion games, small enough to look at every profile (Rosenthal 1973)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from pigou_lab.games import improves

Cost = Callable[[float], float]
Profile = tuple[int, ...]

#: Beyond this many profiles, enumeration is refused.
MAX_PROFILES = 2_000_000


class AtomicGame:
    """Players who each pick one set of resources, and pay for each resource's load.

    ``costs`` maps resources to costs of load; ``strategies[i]`` lists player i's sets; ``weights``
    are loads (default 1). A profile holds a strategy index per player. Raises ValueError for
    unknown resources, no strategies, weights not above 0, or over two million profiles.
    """

    def __init__(
        self,
        costs: Mapping[Hashable, Cost],
        strategies: Sequence[Sequence[Collection[Hashable]]],
        weights: Sequence[float] | None = None,
    ) -> None:
        self.costs = dict(costs)
        self.strategies = [[tuple(dict.fromkeys(s)) for s in mine] for mine in strategies]
        self.weighted = weights is not None and any(w != 1 for w in weights)
        self.weights = [1.0] * len(strategies) if weights is None else [float(w) for w in weights]
        self._paid: dict[tuple[Hashable, float], float] = {}
        self._check()

    def _check(self) -> None:
        if len(self.weights) != len(self.strategies):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.strategies)} players: give one each"
            )
        if any(not w > 0 for w in self.weights):
            raise ValueError(f"weights are {self.weights}: give numbers above 0")
        for player, mine in enumerate(self.strategies):
            if not mine:
                raise ValueError(f"player {player} has no strategy: give at least one")
            for resource in {r for strategy in mine for r in strategy} - set(self.costs):
                raise ValueError(f"player {player} uses {resource!r}, which has no cost: add it")

    def profiles(self) -> Iterator[Profile]:
        """Yield every profile; raises ValueError when there are more than two million."""
        count = math.prod(len(mine) for mine in self.strategies)
        if count > MAX_PROFILES:
            raise ValueError(f"{count} profiles are too many to enumerate: use best_response()")
        return product(*(range(len(mine)) for mine in self.strategies))

    def loads(self, profile: Profile) -> dict[Hashable, float]:
        """Return the load on each used resource."""
        loads: dict[Hashable, float] = {}
        for mine, choice, weight in zip(self.strategies, profile, self.weights, strict=True):
            for resource in mine[choice]:
                loads[resource] = loads.get(resource, 0.0) + weight
        return loads

    def player_cost(self, profile: Profile, player: int) -> float:
        """Return a player's cost per unit weight: the sum over its resources."""
        loads = self.loads(profile)
        return sum(self._cost(r, loads[r]) for r in self.strategies[player][profile[player]])

    def social_cost(self, profile: Profile) -> float:
        """Return the sum over players of weight times cost: over resources, load times cost."""
        return sum(load * self._cost(r, load) for r, load in self.loads(profile).items())

    def potential(self, profile: Profile) -> float:
        """Return Rosenthal's potential; raises ValueError for a weighted game."""
        if self.weighted:
            raise ValueError("a weighted game has no exact potential in general: use no weights")
        return sum(
            self._cost(r, float(k))
            for r, load in self.loads(profile).items()
            for k in range(1, round(load) + 1)
        )

    def is_equilibrium(self, profile: Profile) -> bool:
        """Return whether no player gains by moving alone (pure Nash equilibrium)."""
        loads = self.loads(profile)
        return all(self._better(profile, loads, i) is None for i in range(len(profile)))

    def pure_equilibria(self) -> list[Profile]:
        """Return every pure Nash equilibrium."""
        return [profile for profile in self.profiles() if self.is_equilibrium(profile)]

    def optimum(self) -> Profile:
        """Return a profile of least social cost."""
        return min(self.profiles(), key=self.social_cost)

    def price_of_anarchy(self) -> float:
        """Return the social cost of the worst pure equilibrium over that of the optimum."""
        return self._price(max)

    def price_of_stability(self) -> float:
        """Return the social cost of the best pure equilibrium over that of the optimum."""
        return self._price(min)

    def better_choice(self, profile: Profile, player: int) -> int | None:
        """Return the player's best strategy, or None where it gains by none."""
        return self._better(profile, self.loads(profile), player)

    def best_response(self, profile: Profile, seed: int, rounds: int = 1000) -> Profile:
        """Return the equilibrium of random-order best responses; RuntimeError after ``rounds``."""
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            moved = False
            for player in rng.permutation(len(profile)).tolist():
                choice = self._better(profile, self.loads(profile), player)
                if choice is not None:
                    profile = (*profile[:player], choice, *profile[player + 1 :])
                    moved = True
            if not moved:
                return profile
        raise RuntimeError(f"no equilibrium after {rounds} rounds: a weighted game may have none")

    def _price(self, pick: Callable[..., float]) -> float:
        equilibria = self.pure_equilibria()
        if not equilibria:
            raise ValueError("no pure equilibrium: the price is not defined")
        best = self.social_cost(self.optimum())
        chosen = pick(self.social_cost(p) for p in equilibria)
        if best <= 0:
            if chosen == best == 0:
                return 1.0
            raise ValueError(f"the optimum costs {best}: a ratio needs a cost above 0")
        return chosen / best

    def _better(self, profile: Profile, loads: Mapping[Hashable, float], player: int) -> int | None:
        """The player's best strategy, or None where it has none better than its present one."""
        mine = self.strategies[player]
        present = set(mine[profile[player]])
        weight = self.weights[player]

        def cost(strategy: Collection[Hashable]) -> float:
            return sum(
                self._cost(r, loads[r] if r in present else loads.get(r, 0.0) + weight)
                for r in strategy
            )

        offers = [cost(strategy) for strategy in mine]
        best = min(range(len(mine)), key=offers.__getitem__)
        return best if improves(offers[best], offers[profile[player]]) else None

    def _cost(self, resource: Hashable, load: float) -> float:
        key = (resource, load)
        if key not in self._paid:
            self._paid[key] = float(self.costs[resource](load))
        return self._paid[key]
