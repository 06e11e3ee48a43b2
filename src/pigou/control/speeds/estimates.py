"""What is known of each worker's speed: the numbers that prices are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pigou.games.latency import LatencyLaw

Numbers = NDArray[np.float64]

#: Assumed of a fleet of which nothing was seen yet; the first observations replace it.
PRIOR_LAW = LatencyLaw(0.0005, 0.02)
#: Stands for a pole at infinity, which arithmetic on arrays could not bear.
_FAR = 1e12
#: A law that was only seen at one load is taken to rise by this part of f(1) a stream.
LEAST_SLOPE = 0.001
_PRIOR = {
    "prefill_base": 0.005,
    "prefill_token": 1e-4,
    "transfer_base": 0.005,
    "transfer_token": 1e-6,
    "arrivals": 0.0,
    "busy": 0.0,
}
#: Seconds of a prompt, apart from its tokens and of each, before any was seen.
PRIOR_PREFILL = (_PRIOR["prefill_base"], _PRIOR["prefill_token"])
#: Seconds of a transferred token before any was seen.
PRIOR_TRANSFER_TOKEN = _PRIOR["transfer_token"]
_LAW = ("a", "b", "d", "n_sat", "beta", "floor")
_STALL = ("stall_base", "stall_token", "prompt", "bursts", "uneven", "prefill_pair", "prefill_each")
#: Seconds of reading from another worker's cache, and of each token, before any was seen.
PRIOR_READ = (0.005, 1e-6)
_READ = ("read_base", "read_token")
_CONTEXT = ("context_token", "context_mean")
#: Names of the rows of a table of estimates, in order.
ROWS = (*_PRIOR, *_LAW, *_STALL, *_READ, "fleet_rate", *_CONTEXT)


def prior_column(law: LatencyLaw = PRIOR_LAW) -> Numbers:
    """Return what is assumed of one worker, in the order of `ROWS`, shape (24,)."""
    pace = (min(getattr(law, name), _FAR) for name in _LAW)
    stall = (*PRIOR_PREFILL, PRIOR_PREFILL[0], 1.0, 1.0, 0.0, PRIOR_PREFILL[1])
    return np.array([*_PRIOR.values(), *pace, *stall, *PRIOR_READ, 0.0, 0.0, 0.0])


def pairs(tokens: Any, prompt: Any) -> Any:
    """Return how often a token of a prompt attends to one before it: u (c + u / 2).

    Args:
        tokens: u, that are uncached; the last of the prompt.
        prompt: c + u, all of them.
    """
    return tokens * (prompt - 0.5 * tokens)


def _row(name: str) -> property:
    place = ROWS.index(name)

    def read(self: Estimates) -> Numbers:
        found: Numbers = self.table[place]
        return found

    return property(read)


@dataclass(frozen=True, slots=True)
class Estimates:
    """Speeds of the workers; each name below is a view of shape (workers,).

    Attributes:
        table: all of them, by the names in `ROWS`, shape (24, workers).
        prefill_base: seconds that a prompt takes apart from its tokens.
        prefill_token: seconds that each uncached token of a prompt takes.
        transfer_base: seconds from a remote prefill's end to the first token, apart from tokens.
        transfer_token: seconds that each transferred token takes.
        arrivals: prompts a second that are sent here to be computed.
        busy: share of its time that it computes prompts, 0 to under 1.
        a, b, d, n_sat, beta, floor: of the law of its ITL in seconds, n streams running that hold
            as much as most (`pigou.games.latency.LatencyLaw`); a law without a pole has a far one.
        stall_base: seconds that a prompt takes from streams beside it, apart from its tokens.
        stall_token: seconds that each of its uncached tokens takes from them.
        prompt: seconds that a prompt of mean length takes alone.
        bursts: variance of the fleet's gaps between arrivals, by their squared mean.
        uneven: variance of the seconds of its prompts, by their squared mean.
        prefill_pair: seconds of each pair of a prompt's token and one before it (`pairs`).
        prefill_each: seconds that each uncached token takes in the mean, its pairs counted.
        read_base: seconds that reading from another worker's cache takes, apart from tokens; as
            the next a law of the fleet, which no worker has a scale of its own to.
        read_token: seconds that each token takes that is read so.
        fleet_rate: prompts a second that come to the whole fleet.
        context_token: seconds by which each token that its streams hold makes a step longer.
        context_mean: tokens that a stream of the fleet holds in the mean, prompt and output.
    """

    table: Numbers

    prefill_base = _row("prefill_base")
    prefill_token = _row("prefill_token")
    transfer_base = _row("transfer_base")
    transfer_token = _row("transfer_token")
    arrivals = _row("arrivals")
    busy = _row("busy")
    a = _row("a")
    b = _row("b")
    d = _row("d")
    n_sat = _row("n_sat")
    beta = _row("beta")
    floor = _row("floor")
    stall_base = _row("stall_base")
    stall_token = _row("stall_token")
    prompt = _row("prompt")
    bursts = _row("bursts")
    uneven = _row("uneven")
    prefill_pair = _row("prefill_pair")
    prefill_each = _row("prefill_each")
    read_base = _row("read_base")
    read_token = _row("read_token")
    fleet_rate = _row("fleet_rate")
    context_token = _row("context_token")
    context_mean = _row("context_mean")

    @classmethod
    def prior(cls, workers: int, law: LatencyLaw = PRIOR_LAW) -> Self:
        """Return what is assumed of workers of which nothing was seen."""
        return cls(np.repeat(prior_column(law)[:, None], workers, axis=1))

    def copy(self) -> Self:
        """Return the same speeds in an array of their own."""
        return type(self)(self.table.copy())

    def learn(self, row: int, law: LatencyLaw) -> None:
        """Set the law of one worker's ITL.

        A law that was only seen at one load says nothing of its slope: it is taken to rise by a
        thousandth of f(1) a stream at least, which is less than any engine's.
        """
        for name in _LAW:
            getattr(self, name)[row] = min(getattr(law, name), _FAR)
        self.a[row] = max(self.a[row], LEAST_SLOPE * law(1.0))

    def itl(self, rows: NDArray[np.integer], n: Numbers) -> Numbers:
        """Return the seconds between tokens of worker `rows[i]` with `n[i]` streams, (rows,)."""
        gap = self.n_sat[rows] - n
        near = np.maximum(gap, self.floor[rows])
        beta = self.beta[rows]
        pole = self.d[rows] * near**-beta * (1.0 + (near - gap) * beta / near)
        found: Numbers = self.a[rows] * n + self.b[rows] + pole
        return found

    def law(self, row: int) -> LatencyLaw:
        """Return the law of one worker's ITL."""
        return LatencyLaw(*(float(getattr(self, name)[row]) for name in _LAW))

    def service(
        self, rows: NDArray[np.integer], tokens: Numbers, prompt: float | Numbers
    ) -> Numbers:
        """Return the seconds that prompts take there, (rows,).

        Args:
            rows: workers, (rows,).
            tokens: of the prompts that are uncached, (rows,).
            prompt: tokens of the prompts.
        """
        found: Numbers = self.prefill_base[rows] + self.prefill_token[rows] * tokens
        found += self.prefill_pair[rows] * pairs(tokens, prompt)
        return found

    def work(
        self, requests: NDArray[np.integer], tokens: NDArray[np.integer], both: NDArray[np.integer]
    ) -> Numbers:
        """Return the seconds that all prompts of each worker take, (workers,).

        Args:
            requests: prompts, (workers,).
            tokens: of theirs that are uncached, (workers,).
            both: pairs of theirs, (workers,).
        """
        found: Numbers = self.prefill_base * requests + self.prefill_token * tokens
        found += self.prefill_pair * both
        return found

    def transfer(self, rows: NDArray[np.integer], tokens: Numbers) -> Numbers:
        """Return the seconds that so many tokens take to reach the worker, (rows,)."""
        found: Numbers = self.transfer_base[rows] + self.transfer_token[rows] * tokens
        return found
