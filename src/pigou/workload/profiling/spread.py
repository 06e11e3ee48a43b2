"""How steps in which the same sequences decode differ: by their place in a plan, and besides.

What is compared are gaps of streams that run together. The last of them to begin cuts the
engine's plan: with the step after its first token a plan begins, and another every `repeat` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND
from pigou.sim.timing_measured import VariationTable
from pigou.workload.outcome import Stream
from pigou.workload.profiling.seen import Decodes
from pigou.workload.profiling.stream import arrivals

#: Factors of a step's time that are told apart; each is as likely.
CLASSES = 50


@dataclass(frozen=True)
class Gaps:
    """Seconds between tokens while `n` streams, and nobody else, decode.

    Attributes:
        n: streams.
        seconds: of each gap, shape (gaps,).
        ages: steps that these streams had decoded together before each, shape (gaps,).
    """

    n: int
    seconds: NDArray[np.float64]
    ages: NDArray[np.int64]


def gaps_of(streams: Sequence[Stream]) -> Gaps:
    """Return the gaps of streams from the last first token on, until one of them ends."""
    times = [arrivals(stream) for stream in streams]
    last = max(times, key=lambda each: int(each[0]))
    start, end = int(last[0]), min(int(each[-1]) for each in times)
    # Tokens of one step come one after another: those of the step of `start` a bit before it, too.
    early = start - int(np.median(np.diff(last[: last.searchsorted(end, "right")]))) // 2
    each = [np.diff(one[(one >= early) & (one <= end)]) for one in times]
    ages = [np.arange(len(one), dtype=np.int64) for one in each]
    return Gaps(len(streams), np.concatenate(each) / SECOND, np.concatenate(ages))


def spreads(
    seen: Sequence[Sequence[Gaps]], decodes: Sequence[Decodes], steps: int
) -> tuple[VariationTable, VariationTable]:
    """Return rhythm and scatter for each number of streams, whatever their lengths were.

    Args:
        seen: of each shape the gaps of all its runs; their median tells what a step takes.
        decodes: of each shape that median.
        steps: of a plan.
    """
    rows, factors = [], []
    for n in sorted({each.n for each in decodes}):
        mine = [at for at, each in enumerate(decodes) if each.n == n]
        places = rhythm([run for at in mine for run in seen[at]], steps)
        drawn = scatter([(run, decodes[at].seconds) for at in mine for run in seen[at]], places)
        rows += [(n, places)] if places else []
        factors += [(n, drawn)] if drawn else []
    return tuple(rows), tuple(factors)


def rhythm(seen: Sequence[Gaps], steps: int) -> tuple[float, ...]:
    """Return the seconds that each step of a plan takes more than their mean.

    Args:
        seen: all of as many streams; a median over them leaves slow moments out.
        steps: of a plan.

    Returns:
        Of each place in a plan; they add up to 0. Nothing for plans of one step, or where no run
        is as long as two plans.
    """
    found = []
    for run in seen:
        if steps > 1 and len(run.ages) and int(run.ages.max()) + 1 >= 2 * steps:
            places = run.ages % steps
            means = [float(run.seconds[places == place].mean()) for place in range(steps)]
            found.append(np.array(means) - np.mean(means))
    if not found:
        return ()
    middle = np.median(np.stack(found), axis=0)
    middle -= middle.mean()
    return tuple(float(each) for each in middle)


def scatter(seen: Sequence[tuple[Gaps, float]], places: Sequence[float]) -> tuple[float, ...]:
    """Return factors of a step's usual time that are equally likely, rising, with a mean of 1.

    Args:
        seen: gaps, and the usual seconds of a step of theirs.
        places: seconds more, by place in a plan (`rhythm`); empty for none.

    Returns:
        `CLASSES` factors, each the mean of its share; nothing where there are too few gaps.
    """
    ratios = []
    for run, usual in seen:
        said = np.full(len(run.ages), usual)
        if len(places):
            said += np.array(places)[run.ages % len(places)]
        ratios.append(run.seconds / np.maximum(said, 0.1 * usual))
    every = np.sort(np.concatenate(ratios)) if ratios else np.empty(0)
    if len(every) < 4 * CLASSES:
        return ()
    means = np.array([part.mean() for part in np.array_split(every, CLASSES)])
    return tuple(float(each) for each in means / means.mean())
