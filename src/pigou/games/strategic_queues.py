"""Strategic queues: each sends its oldest packet to a server of its choice (Gaitonde and Tardos).

| symbol | meaning |
|---|---|
| lambda_i, mu_j | chance that a packet comes to queue i, that server j completes one, in a step |
| c = min_k (mu_1 + .. + mu_k) / (lambda_1 + .. + lambda_k) | capacity factor, both sorted down |

One scheduler keeps all queues short iff c > 1. Learners without regret do iff c > 2 (given priority
to older packets), patient ones iff c > e / (e - 1) (EC 2020; JACM 2023).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, checked

Strategy = Literal["uniform", "exp3", "hedge"]
Priority = Literal["oldest", "random"]
#: Factors from which learners without regret, and patient queues, are stable.
NO_REGRET_FACTOR, PATIENT_FACTOR = 2.0, math.e / (math.e - 1.0)


def capacity_factor(arrivals: ArrayLike, services: ArrayLike) -> float:
    """Return by how much arrivals could grow under one scheduler; infinity without arrivals."""
    rates, speeds = _rates(arrivals, services)
    size = max(len(rates), len(speeds))
    needed, served = (
        np.cumsum(np.pad(np.sort(own)[::-1], (0, size - len(own)))) for own in (rates, speeds)
    )
    positive = needed > 0
    return float((served[positive] / needed[positive]).min(initial=np.inf))


def uniform_service_rate(queues: int, servers: int, service: float = 1.0) -> float:
    """Return packets served of each queue and step, all backlogged, each choosing at random.

    mu m / n (1 - (1 - 1/m)^n); of as many servers as queues 1 - (1 - 1/n)^n, at least 1 - 1/e.
    """
    if queues < 1 or servers < 1 or not 0.0 <= service <= 1.0:
        raise ValueError(
            f"queues={queues}, servers={servers}, service={service}: give one or more of both, "
            "and a chance from 0 to 1"
        )
    return service * servers / queues * (1.0 - (1.0 - 1.0 / servers) ** queues)


class Learners:
    """Multiplicative weights of players over arms; losses are from 0 to 1.

    With `learn` of one arm's loss this is EXP3 (Auer et al. 2002), with that of all arms Hedge.
    `explore` is the share of random choices; `share` of a weight goes to all arms at each step, so
    that players follow what changes (EXP3.S).
    """

    def __init__(
        self, players: int, arms: int, *, rate: float = 0.05, explore: float = 0.05,
        share: float = 0.0,
    ) -> None:  # fmt: skip
        for name, value in (("rate", rate), ("explore", explore), ("share", share)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value}: give a number from 0 to 1")
        self.rate, self.explore, self.share = rate, explore, share
        self.log_weights = np.zeros((players, arms))

    def chances(self, players: slice | int | list[int] = slice(None)) -> Floats:
        """Return the chances of arms, (players, arms) or (arms,)."""
        log = self.log_weights[players]
        weight = np.exp(log - log.max(axis=-1, keepdims=True))
        chances: Floats = weight / weight.sum(axis=-1, keepdims=True)
        chances *= 1.0 - self.explore
        chances += self.explore / chances.shape[-1]
        return chances

    def learn(self, charges: Floats, players: slice | int | list[int] = slice(None)) -> None:
        """Charge charges; for EXP3 those of the chosen arm over its chance, of others 0."""
        log = self.log_weights[players] - self.rate * charges
        log -= log.max(axis=-1, keepdims=True)
        if self.share:
            weight = np.exp(log)
            total = weight.sum(axis=-1, keepdims=True) / weight.shape[-1]
            log = np.log((1.0 - self.share) * weight + self.share * total)
        self.log_weights[players] = log


@dataclass(frozen=True, slots=True)
class QueueRun:
    """A run; `growth` is packets that the queues gained in its second half, over arrivals then."""

    backlog: Floats  # packets at the end, (queues,)
    served: Floats  # packets a step, (queues,)
    mean_backlog: float  # packets of all queues, over the second half
    growth: float

    def stable(self, tolerance: float = 0.05) -> bool:
        """True if queues no longer grow; a run shows it only if it is long enough."""
        return self.growth <= tolerance


def simulate_queues(
    arrivals: ArrayLike, services: ArrayLike, *, steps: int, strategy: Strategy = "exp3",
    priority: Priority = "oldest", buffers: int = 0, rate: float = 0.05, explore: float = 0.05,
    seed: int = 0,
) -> QueueRun:  # fmt: skip
    """Simulate queues that choose servers; a server tries one packet, failures return.

    With `buffers` a server keeps accepted packets, and takes one a step while there is room.
    """
    rates, speeds = _rates(arrivals, services)
    _check_run(strategy, priority, steps, buffers)
    rng = np.random.default_rng(seed)
    n, m = len(rates), len(speeds)
    learners = Learners(n, m, rate=rate, explore=explore if strategy == "exp3" else 0.0)
    queues: list[deque[int]] = [deque() for _ in range(n)]
    held, served, total = np.zeros(m, np.int64), np.zeros(n), 0
    sizes = np.zeros(steps)
    for step in range(steps):
        arrived = np.flatnonzero(rng.random(n) < rates).tolist()
        total += len(arrived) if step >= steps // 2 else 0
        for i in arrived:
            queues[i].append(step)
        chances = learners.chances()
        choice = (chances.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1).clip(max=m - 1)
        works = rng.random(m) < speeds
        if buffers:
            held -= works & (held > 0)
        takes = held < buffers if buffers else works
        order = rng.permutation(n).tolist()
        if priority == "oldest":
            order.sort(key=lambda i: queues[i][0] if queues[i] else step + 1)
        taken = np.full(m, -1)
        sending = [i for i in order if queues[i]]
        for i in sending:
            if taken[choice[i]] < 0:
                taken[choice[i]] = i
        if strategy != "uniform":
            rank = np.argsort(order)
            first = np.where(taken >= 0, rank[taken], n)
            charges = (~(takes & (first >= rank[:, None]))[sending]).astype(np.float64)
            if strategy == "exp3":
                chosen = np.arange(m) == choice[sending, None]
                charges = np.where(chosen, charges / chances[sending], 0.0)
            learners.learn(charges, sending)
        for j in np.flatnonzero(takes & (taken >= 0)).tolist():
            queues[taken[j]].popleft()
            served[taken[j]] += 1
            held[j] += 1 if buffers else 0
        sizes[step] = sum(map(len, queues))
    grown = sizes[-steps // 20 :].mean() - sizes[steps // 2 : steps // 2 + steps // 20 + 1].mean()
    backlog = np.array([len(queue) for queue in queues], dtype=np.float64)
    late = float(sizes[steps // 2 :].mean())
    return QueueRun(backlog, served / steps, late, float(grown / max(1, total)))


def _check_run(strategy: Strategy, priority: Priority, steps: int, buffers: int) -> None:
    for name, value, known in (("strategy", strategy, Strategy), ("priority", priority, Priority)):
        if value not in get_args(known):
            raise ValueError(f"{name} is {value!r}: give one of {', '.join(get_args(known))}")
    if steps < 2 or buffers < 0:
        raise ValueError(f"steps={steps}, buffers={buffers}: give 2 steps or more, buffers from 0")


def _rates(arrivals: ArrayLike, services: ArrayLike) -> tuple[Floats, Floats]:
    both = checked("arrivals", arrivals, (None,)), checked("services", services, (None,))
    if not len(both[1]):
        raise ValueError("services is empty: give the chance of one server at least")
    for name, chances in zip(("arrivals", "services"), both, strict=True):
        if (chances > 1).any():
            raise ValueError(f"{name} has {chances.max():g}: give chances of a step, from 0 to 1")
    return both
