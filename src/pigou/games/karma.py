"""Karma: credits for slices that a user leaves to others (Vuppalapati et al., OSDI 2023).

| symbol | meaning |
|---|---|
| f_i | fair share of user i, in slices a quantum; the pool is their sum |
| alpha | part of it that is guaranteed, as in the paper; its code's `alpha` is 1 minus this |

A quantum: (1) everybody earns f_i - alpha f_i credits. (2) Each gets min(demand, alpha f_i) and
donates the remainder of alpha f_i. (3) Slice by slice, the borrower with most credits borrows one
and pays; the donor with fewest credits earns 1 for it. Shared slices go last and pay nobody.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, spread


@dataclass(slots=True)
class _Account:
    share: int
    guaranteed: int
    credits: float


class Karma:
    """Allocates one quantum after the other; users come and go between quanta.

    A slice costs mean(f) / f_i credits, which is 1 for equal shares. Ties go to the user that
    joined first. A newcomer starts with the mean of all credits, the first one with `credits`:
    give enough that nobody runs out. Raises ValueError for what it cannot take.
    """

    def __init__(self, alpha: float = 0.5, credits: float = 1000.0) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha is {alpha}: give the guaranteed part, from 0 to 1")
        if not 0.0 <= credits < math.inf:
            raise ValueError(f"credits is {credits}: give a finite number of at least 0")
        self.alpha = alpha
        self._initial = float(credits)
        self._users: dict[Hashable, _Account] = {}

    @property
    def credits(self) -> dict[Hashable, float]:
        """Credits of each user, in order of joining."""
        return {name: user.credits for name, user in self._users.items()}

    @property
    def slices(self) -> int:
        """Slices of the pool."""
        return sum(user.share for user in self._users.values())

    def join(self, user: Hashable, fair_share: float, credits: float | None = None) -> None:
        """Add a user, or change the fair share of one, who keeps its credits."""
        if not fair_share >= 0 or fair_share % 1:
            raise ValueError(f"fair_share is {fair_share!r}: give whole slices, at least 0")
        known = self._users.get(user)
        if credits is None:
            every = [other.credits for other in self._users.values()]
            credits = sum(every) / len(every) if every else self._initial
            credits = known.credits if known else credits
        guaranteed = math.floor(self.alpha * fair_share + 1e-9)
        self._users[user] = _Account(int(fair_share), guaranteed, float(credits))

    def leave(self, user: Hashable) -> None:
        """Remove a user and its credits."""
        if self._users.pop(user, None) is None:
            raise ValueError(f"user {user!r} is unknown: it never joined, or has left")

    def allocate(self, demands: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """Return the slices of one quantum by user, and move credits; absent demands are 0."""
        for name, demand in demands.items():
            if name not in self._users:
                raise ValueError(f"demands has {name!r}, which has not joined: call join first")
            if not demand >= 0 or demand != int(demand):
                raise ValueError(f"demands[{name!r}] is {demand}: give whole slices, at least 0")
        users, given = list(self._users.values()), []
        for name, user in self._users.items():
            user.credits += user.share - user.guaranteed
            given.append(min(int(demands.get(name, 0)), user.guaranteed))
        price = [self.slices / len(users) / u.share if u.share else math.inf for u in users]
        wanted = [int(demands.get(name, 0)) for name in self._users]
        donors = [
            (user.credits, i)
            for i, user in enumerate(users)
            if given[i] < user.guaranteed
        ]  # fmt: skip
        donated = [user.guaranteed - got for user, got in zip(users, given, strict=True)]
        shared = sum(user.share - user.guaranteed for user in users)
        borrowers = [
            (-user.credits, i)
            for i, user in enumerate(users)
            if given[i] < wanted[i] and user.credits > 0 and user.share
        ]
        heapq.heapify(donors)
        heapq.heapify(borrowers)
        while borrowers and (donors or shared):
            if donors:
                _, donor = donors[0]
                users[donor].credits += 1.0
                donated[donor] -= 1
                if donated[donor]:
                    heapq.heapreplace(donors, (users[donor].credits, donor))
                else:
                    heapq.heappop(donors)
            else:
                shared -= 1
            i = borrowers[0][1]
            given[i] += 1
            users[i].credits -= price[i]
            if given[i] < wanted[i] and users[i].credits > 0:
                heapq.heapreplace(borrowers, (-users[i].credits, i))
            else:
                heapq.heappop(borrowers)
        return dict(zip(self._users, given, strict=True))


def karma(
    demands: ArrayLike, fair_share: int | Sequence[int], *, alpha: float = 0.5,
    credits: float = 1000.0,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return allocations and credits after each quantum, (quanta, users) both."""
    rows = np.asarray(demands, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(f"demands has shape {rows.shape}: give (quanta, users)")
    shares = spread("fair_share", fair_share, rows.shape[1]).tolist()
    pool, given, left = Karma(alpha, credits), [], []
    for user, share in enumerate(shares):
        pool.join(user, share, credits)
    for row in rows.tolist():
        given.append(list(pool.allocate(dict(enumerate(row))).values()))
        left.append(list(pool.credits.values()))
    shape = rows.shape
    return np.array(given, np.float64).reshape(shape), np.array(left, np.float64).reshape(shape)
