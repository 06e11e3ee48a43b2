"""The ledger of decisions: why each request went where it went."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.control.messages import Choice
from pigou.control.routing.policy import CostParts, CostTable
from pigou.control.routing.remote_kv_fetch import RemoteFetches
from pigou.control.routing.view import Candidates

Costs = NDArray[np.float64]


class Explanation(msgspec.Struct, eq=False):  # each decision makes one; most are never read
    """One decision: every candidate, what it would have cost, and why.

    It keeps the arrays that the decision was made of; the rest is computed when it is asked for.
    """

    request: str  # id of the request
    at: int  # when, in nanoseconds
    policy: str
    temperature: float
    regime: str
    prompt: int  # tokens of the prompt
    chosen: int  # index of the candidate that was taken
    workers: tuple[str, ...]  # ids of the fleet's workers, which the candidates index
    candidates: Candidates  # pairs of workers
    held: NDArray[np.int64]  # tokens of the prompt that each worker holds, (workers,)
    costs: Costs  # in the policy's own unit, (candidates,)
    split: CostParts | None  # parts of the costs; None where the policy has none
    # parts of what each candidate costs its request and all others, in seconds
    # (`pigou.control.routing.toll.policy`).
    priced: CostTable
    choice: Choice
    # what each worker would have read from another's cache; None where none.
    reads: RemoteFetches | None = None
    tenant: str = ""  # whose request it is; empty without keys

    @property
    def cached(self) -> NDArray[np.int64]:
        """Tokens of the prompt that the worker which computes it holds, (candidates,)."""
        cached: NDArray[np.int64] = self.held[self.candidates.computes]
        return cached

    @property
    def read(self) -> NDArray[np.int64]:
        """Tokens that a remote KV fetch would spare the computing worker, (candidates,)."""
        if self.reads is None:
            return np.zeros(len(self.candidates), dtype=np.int64)
        read = np.where(self.reads.source < 0, 0, self.reads.ready)
        tokens: NDArray[np.int64] = read[self.candidates.computes]
        return tokens

    @property
    def parts(self) -> CostParts:
        """Parts of the costs by name, (candidates,) each; empty where the policy has none."""
        return {} if self.split is None else self.split

    @property
    def prices(self) -> CostParts:
        """Parts of the prices by name, (candidates,) each."""
        return self.priced

    @property
    def price(self) -> Costs:
        """Seconds that each candidate costs its request and all others, (candidates,)."""
        return self.priced.total

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
    def regret(self) -> float:
        """Seconds that the choice costs everybody more than the best candidate would have."""
        price = self.price
        return float(price[self.chosen] - price.min())


class DecisionLedger:
    """The last decisions, by request; a request that was routed again has the latest.

    Attributes:
        max_decisions: that are kept; 0 where no caller asks for them.
    """

    def __init__(self, max_decisions: int) -> None:
        self.max_decisions = max_decisions
        self._decisions: OrderedDict[str, Explanation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, explanation: Explanation) -> None:
        """Keep a decision, and drop the oldest when there are too many."""
        decisions = self._decisions
        if explanation.request in decisions:
            del decisions[explanation.request]  # to come last
        decisions[explanation.request] = explanation
        if len(decisions) > self.max_decisions:
            decisions.popitem(last=False)

    def get(self, request: str) -> Explanation | None:
        """Return the decision on a request; None when it was never made, or has been dropped."""
        return self._decisions.get(request)

    def latest(self) -> Iterator[Explanation]:
        """The decisions, the latest first."""
        return iter(list(reversed(self._decisions.values())))
