"""The ledger of decisions: why each request went where it went."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.control.messages import Choice
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request

Costs = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision: every candidate, what it would have cost, and why.

    Attributes:
        request: id of the request.
        at: when, in nanoseconds.
        policy: name of the policy.
        temperature: of the choice.
        regime: of the fleet then.
        prompt: tokens of the prompt.
        chosen: index of the candidate that was taken.
        workers: ids of the fleet's workers, which the candidates index.
        candidates: pairs of workers.
        cached: tokens of the prompt that whoever computes it holds, (candidates,).
        costs: in the policy's own unit, (candidates,).
        parts: of the costs, by name, (candidates,) each; empty where the policy has none.
        prices: parts of what each candidate costs its request and all others, in seconds
            (`pigou.control.routing.toll`), (candidates,) each.
    """

    request: str
    at: int
    policy: str
    temperature: float
    regime: str
    prompt: int
    chosen: int
    workers: tuple[str, ...]
    candidates: Candidates
    cached: NDArray[np.int64]
    costs: Costs
    parts: dict[str, Costs]
    prices: dict[str, Costs]

    @property
    def price(self) -> Costs:
        """Seconds that each candidate costs its request and all others, (candidates,)."""
        return sum(self.prices.values(), np.zeros(len(self.candidates)))

    @property
    def toll(self) -> Costs:
        """Those of them that the others pay, (candidates,)."""
        tolls = (part for name, part in self.prices.items() if name.startswith("toll_"))
        return sum(tolls, np.zeros(len(self.candidates)))

    @property
    def prefill(self) -> tuple[str, ...]:
        """Id of each candidate's prefill worker, "" where decode computes the prompt."""
        rows = self.candidates.prefill.tolist()
        return tuple("" if row < 0 else self.workers[row] for row in rows)

    @property
    def decode(self) -> tuple[str, ...]:
        """Id of each candidate's decode worker."""
        return tuple(self.workers[row] for row in self.candidates.decode.tolist())

    @property
    def choice(self) -> Choice:
        """Return what was chosen."""
        index = self.chosen
        prefill = int(self.candidates.prefill[index])
        return Choice(
            decode=self.workers[self.candidates.decode[index]],
            prefill=None if prefill < 0 else self.workers[prefill],
            cost=float(self.costs[index]),
            cached=int(self.cached[index]),
        )

    @property
    def regret(self) -> float:
        """Seconds that the choice costs everybody more than the best candidate would have."""
        price = self.price
        return float(price[self.chosen] - price.min())


def explain(
    request: Request,
    now: int,
    policy: str,
    temperature: float,
    regime: str,
    chosen: int,
    fleet: FleetView,
    found: Candidates,
    costs: Costs,
    parts: dict[str, Costs],
    prices: dict[str, Costs],
) -> Explanation:
    """Return the explanation of a decision; arrays of the fleet are not kept."""
    return Explanation(
        request=request.id,
        at=now,
        policy=policy,
        temperature=temperature,
        regime=regime,
        prompt=request.prompt,
        chosen=chosen,
        workers=fleet.ids,
        candidates=found,
        cached=fleet.cached(request.prompt)[found.computes],
        costs=costs,
        parts=parts,
        prices=prices,
    )


class Ledger:
    """The last decisions, by request; a request that was routed again has the latest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, Explanation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, explanation: Explanation) -> None:
        """Keep a decision, and drop the oldest when there are too many."""
        self._kept.pop(explanation.request, None)
        self._kept[explanation.request] = explanation
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def get(self, request: str) -> Explanation | None:
        """Return the decision on a request; None when it was never made, or has been dropped."""
        return self._kept.get(request)

    def latest(self) -> Iterator[Explanation]:
        """The decisions, the latest first."""
        return iter(list(reversed(self._kept.values())))
