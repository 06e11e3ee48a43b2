"""Estimates: speeds of each worker in prefill, transfer and decode, the inputs of prices."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.control.latency_model.link_factors import LinkTable, unlabelled
from pigou.games.latency import LatencyLaw

Numbers: TypeAlias = NDArray[np.float64]

#: Prior of the law of ITL; the first observations replace it.
PRIOR_LAW = LatencyLaw(0.0005, 0.02)
#: Stands for a pole at infinity, with which array arithmetic would give NaN.
_FAR = 1e12
#: A law that was only seen at one load rises by this part of f(1) a stream.
MIN_SLOPE = 0.001
#: Prior of prefill: seconds of a prompt apart from its tokens, and of each token.
PRIOR_PREFILL = (0.005, 1e-4)
#: Prior of a KV transfer: seconds apart from its tokens, and of each token.
PRIOR_TRANSFER = (0.005, 1e-6)
#: Prior of a remote KV fetch: seconds apart from its tokens, and of each token.
PRIOR_FETCH = (0.005, 1e-6)
_LAW = ("a", "b", "d", "n_sat", "beta", "floor")
#: Rows of `Estimates.table`.
(
    PREFILL_BASE, PREFILL_TOKEN, TRANSFER_BASE, TRANSFER_TOKEN, ARRIVALS, BUSY,
    ITL_A, ITL_B, ITL_D, ITL_N_SAT, ITL_BETA, ITL_FLOOR, INTERFERENCE_BASE, INTERFERENCE_TOKEN,
    MEAN_PREFILL, ARRIVAL_CV2, PREFILL_CV2, PREFILL_PAIR, PREFILL_PER_TOKEN, FETCH_BASE,
    FETCH_TOKEN, FLEET_ARRIVALS, CONTEXT_TOKEN, MEAN_CONTEXT,
) = range(24)  # fmt: skip
ROWS = 24


def prior_column(law: LatencyLaw = PRIOR_LAW) -> Numbers:
    """Return the prior of one worker, shape (24,)."""
    column = np.zeros(ROWS)
    column[PREFILL_BASE], column[PREFILL_TOKEN] = PRIOR_PREFILL
    column[TRANSFER_BASE], column[TRANSFER_TOKEN] = PRIOR_TRANSFER
    column[ITL_A : ITL_FLOOR + 1] = [min(getattr(law, name), _FAR) for name in _LAW]
    column[INTERFERENCE_BASE], column[INTERFERENCE_TOKEN] = PRIOR_PREFILL
    column[MEAN_PREFILL], column[PREFILL_PER_TOKEN] = PRIOR_PREFILL
    column[ARRIVAL_CV2] = column[PREFILL_CV2] = 1.0
    column[FETCH_BASE], column[FETCH_TOKEN] = PRIOR_FETCH
    return column


def pairs(tokens: Any, prompt: Any) -> Any:
    """Return how often a token of a prompt attends to an earlier one: u (c + u / 2)."""
    return tokens * (prompt - 0.5 * tokens)


def _row(index: int) -> property:
    def read(self: Estimates) -> Numbers:
        row: Numbers = self.table[index]
        return row

    return property(read)


@dataclass(frozen=True, slots=True)
class Estimates:
    """Speeds of the workers; names below are views of shape (workers,), mostly in seconds."""

    table: Numbers  # all of them, by the names above, shape (24, workers)
    # between the hosts of the workers; None where they are not known.
    links: LinkTable | None = None

    prefill_base = _row(PREFILL_BASE)  # per prompt
    prefill_token = _row(PREFILL_TOKEN)  # per uncached token
    transfer_base = _row(TRANSFER_BASE)  # per transfer, from remote prefill's end to first token
    transfer_token = _row(TRANSFER_TOKEN)  # per transferred token
    arrivals = _row(ARRIVALS)  # prompts per second to compute
    busy = _row(BUSY)  # share of time spent on prefill, 0 to under 1
    # The law of its ITL (`LatencyLaw`), streams holding as much as most; a missing pole is far.
    a = _row(ITL_A)
    b = _row(ITL_B)
    d = _row(ITL_D)
    n_sat = _row(ITL_N_SAT)
    beta = _row(ITL_BETA)
    floor = _row(ITL_FLOOR)
    interference_base = _row(INTERFERENCE_BASE)  # taken from streams per prompt
    interference_token = _row(INTERFERENCE_TOKEN)  # taken from streams per uncached token
    mean_prefill = _row(MEAN_PREFILL)  # seconds of a mean prompt alone
    arrival_cv2 = _row(ARRIVAL_CV2)  # variance of the fleet's gaps over squared mean
    prefill_cv2 = _row(PREFILL_CV2)  # variance of its prompts' seconds over squared mean
    prefill_pair = _row(PREFILL_PAIR)  # per attention pair (`pairs`)
    prefill_per_token = _row(PREFILL_PER_TOKEN)  # mean per uncached token, with pairs
    fetch_base = _row(FETCH_BASE)  # per remote KV fetch; fleet-wide
    fetch_token = _row(FETCH_TOKEN)  # per fetched token; fleet-wide
    fleet_arrivals = _row(FLEET_ARRIVALS)  # prompts per second of the fleet
    context_token = _row(CONTEXT_TOKEN)  # added to a step per token in the streams' contexts
    mean_context = _row(MEAN_CONTEXT)  # mean tokens per stream

    @classmethod
    def prior(cls, workers: int, law: LatencyLaw = PRIOR_LAW) -> Self:
        """Return the prior for a number of workers."""
        return cls(np.repeat(prior_column(law)[:, None], workers, axis=1))

    def copy(self) -> Self:
        """Return a copy with its own array."""
        return type(self)(self.table.copy(), self.links)

    @property
    def link_table(self) -> LinkTable:
        """Factors of the links between hosts."""
        return unlabelled(self.table.shape[1]) if self.links is None else self.links

    def itl(self, rows: NDArray[np.integer], n: Numbers) -> Numbers:
        """Return the seconds between tokens of worker `rows[i]` with `n[i]` streams, (rows,)."""
        gap = self.n_sat[rows] - n
        near = np.maximum(gap, self.floor[rows])
        beta = self.beta[rows]
        pole = self.d[rows] * near**-beta * (1.0 + (near - gap) * beta / near)
        itl: Numbers = self.a[rows] * n + self.b[rows] + pole
        return itl

    def service(
        self, rows: NDArray[np.integer], tokens: Numbers, prompt: float | Numbers
    ) -> Numbers:
        """Return the seconds of prompts with `tokens` uncached tokens, (rows,)."""
        service: Numbers = self.prefill_base[rows] + self.prefill_token[rows] * tokens
        service += self.prefill_pair[rows] * pairs(tokens, prompt)
        return service

    def work(
        self, prompts: NDArray[np.integer], tokens: NDArray[np.integer], pairs: NDArray[np.integer]
    ) -> Numbers:
        """Return the seconds of all prompts of each worker, (workers,)."""
        work: Numbers = self.prefill_base * prompts + self.prefill_token * tokens
        work += self.prefill_pair * pairs
        return work

    def transfer(self, rows: NDArray[np.integer], tokens: Numbers) -> Numbers:
        """Return the seconds to transfer tokens to the workers, (rows,)."""
        seconds: Numbers = self.transfer_base[rows] + self.transfer_token[rows] * tokens
        return seconds


# --- kernels ---------------------------------------------------------------------------------


class ItlLaw(NamedTuple):
    """A worker's ITL law, as in `Estimates`."""

    a: float
    b: float
    d: float
    n_sat: float
    beta: float
    floor: float


class PrefillLaw(NamedTuple):
    """Seconds per prompt, per uncached token, and per pair of tokens."""

    base: float
    token: float
    pair: float


class InterferenceLaw(NamedTuple):
    """Seconds that a prompt, and each of its tokens, takes from streams beside it."""

    base: float
    token: float


@inlined
def itl_law(table: Numbers, w: int) -> ItlLaw:
    """Return the ITL law of worker `w`."""
    return ItlLaw(
        table[ITL_A, w], table[ITL_B, w], table[ITL_D, w], table[ITL_N_SAT, w],
        table[ITL_BETA, w], table[ITL_FLOOR, w],
    )  # fmt: skip


@inlined
def prefill_law(table: Numbers, w: int) -> PrefillLaw:
    """Return the prefill law of worker `w`."""
    return PrefillLaw(table[PREFILL_BASE, w], table[PREFILL_TOKEN, w], table[PREFILL_PAIR, w])


@inlined
def interference_law(table: Numbers, w: int) -> InterferenceLaw:
    """Return the prefill interference of worker `w`."""
    return InterferenceLaw(table[INTERFERENCE_BASE, w], table[INTERFERENCE_TOKEN, w])


@inlined
def itl_s(law: ItlLaw, n: float) -> float:
    """Return the seconds between tokens at n streams."""
    itl = law.a * n + law.b
    if law.d > 0.0:
        gap = law.n_sat - n
        near = max(gap, law.floor)
        itl += law.d * near**-law.beta * (1.0 + (near - gap) * law.beta / near)
    return itl


@inlined
def prefill_s(law: PrefillLaw, prompts: int, tokens: float, pairs: float) -> float:
    """Return the seconds of prompts without streams."""
    return law.base * prompts + law.token * tokens + law.pair * pairs


@inlined
def interference_s(
    law: PrefillLaw, interference: InterferenceLaw, prompts: int, tokens: float, pairs: float
) -> float:
    """Return the seconds that prompts take from each stream beside them."""
    size = tokens if law.pair <= 0.0 else tokens + law.pair / law.token * pairs
    return interference.base * prompts + interference.token * size


@inlined
def later_interference_s(
    law: PrefillLaw, interference: InterferenceLaw, prompts: int, tokens: float, pairs: float,
    begins_s: float,
) -> float:  # fmt: skip
    """Return the seconds prompts take from a stream that starts in `begins_s` seconds."""
    ahead = prefill_s(law, prompts, tokens, pairs)
    left = ahead - max(begins_s, 0.0)
    if left <= 0.0:
        return 0.0
    return min(left, left / ahead * interference_s(law, interference, prompts, tokens, pairs))


@bare_kernel
def fill(
    table: Numbers, column: Numbers, prefill: Numbers, transfer: Numbers, itl: Numbers,
    common: tuple[float, float, float], min_slope: float,
) -> None:  # fmt: skip
    """Write all rows of `Estimates.table`, shape (24, workers).

    `column` is a worker with factors of 1; factors per worker and `common` multiply it. ITL rises
    by at least `min_slope` per stream.
    """
    for w in range(table.shape[1]):
        for row in range(table.shape[0]):
            table[row, w] = column[row]
        prefill_factor, transfer_factor = common[0] * prefill[w], common[1] * transfer[w]
        itl_factor = common[2] * itl[w]
        for row in (PREFILL_BASE, PREFILL_TOKEN, MEAN_PREFILL, PREFILL_PAIR, PREFILL_PER_TOKEN):
            table[row, w] = column[row] * prefill_factor
        for row in (TRANSFER_BASE, TRANSFER_TOKEN):
            table[row, w] = column[row] * transfer_factor
        table[ITL_A, w] = max(column[ITL_A] * itl_factor, min_slope * itl_factor)
        for row in (ITL_B, ITL_D, CONTEXT_TOKEN):
            table[row, w] = column[row] * itl_factor


class MedianWorker:
    """Speeds of the median worker for one request at a time."""

    def __init__(self, known: Estimates) -> None:
        self.known = known
        rows = np.arange(len(known.a))
        #: seconds between tokens of a single stream
        self.itl = statistics.median(known.itl(rows, np.ones(len(rows))).tolist() or [math.nan])
        # Workers differ by a factor: they have one order, whatever the length of the prompt.
        columns = known.prefill_base, known.prefill_token, known.prefill_pair
        laws = sorted(zip(*(column.tolist() for column in columns), strict=True))
        self._laws: list[tuple[float, float, float]] = [
            laws[index] for index in ((len(laws) - 1) // 2, len(laws) // 2) if laws
        ]

    def prompt(self, uncached: int, pairs: int) -> float:
        """Return the seconds of a prompt with these uncached tokens and pairs."""
        if not self._laws:
            return math.nan
        seconds = (base + token * uncached + pair * pairs for base, token, pair in self._laws)
        return sum(seconds) / 2
