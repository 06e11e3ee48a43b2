"""Where the knee is: C = 96 to 128 in steps of four, which the paper's grid leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pigou.experiments.fleets import POOL, Fleet, Reading
from pigou.experiments.laws import GAPS
from pigou.experiments.level import Level, run
from pigou.experiments.paper import EXPERIMENT1
from pigou.experiments.regimes import slopes
from pigou.experiments.rows import Row, row

#: The paper's three levels about the knee, and what lies between the last two.
LEVELS = (32, 64, *range(96, 129, 4))
#: A level is past the knee where its TTFT P99 is so many times that of the first.
FACTOR = 5.0


def knee(
    fleet: Fleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row a level, as of Experiment 1, with the finite difference from the one before."""
    last: tuple[int, float] | None = None
    for users in levels:
        level = Level(fleet, reading, users)
        seen = [run(level, seed).measured for seed in seeds]
        found = row("knee", users, seen, seeds, EXPERIMENT1[fleet.name].get(users))
        ttft = found["ttft_p99_s"]
        found["slope_s"] = None if last is None else (ttft - last[1]) / (users - last[0])
        last = (users, ttft)
        yield found


def where(rows: Sequence[Row], fleet: Fleet, reading: Reading) -> Mapping[str, Any]:
    """Return the first level past the knee, and where the model says that it is."""
    first = rows[0]["ttft_p99_s"]
    past = [each["concurrency"] for each in rows if each["ttft_p99_s"] > FACTOR * first]
    return {
        "first_past_knee": min(past, default=None),
        "predicted_knee": predicted(fleet, reading),
        **slopes(rows, fleet),
    }


def predicted(fleet: Fleet, reading: Reading) -> float | None:
    """Return the users at which something is full.

    A pool: its connections. A serial prefill worker: X R of the asymptotes of a closed system
    (Denning and Buzen 1978), X its ceiling and R what a request takes in company of so many.
    Without either nothing is, within the law's range.
    """
    if reading == "client-pool":
        return float(POOL)
    if reading == "fair":
        return None
    law = fleet.law(reading)
    users = 1.0
    for _ in range(100):
        decoding = users / fleet.decoders
        seconds = fleet.base + GAPS * (law.itl_a + law.itl_b * decoding)
        users = seconds / law.prefill
    return users
