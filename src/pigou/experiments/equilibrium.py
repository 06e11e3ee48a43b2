"""Game 1 at a level: how the fleet's workers would be split between prefill and decode."""

from __future__ import annotations

import math
from typing import Any

from scipy.special import gammainc

from pigou.experiments.fleets import Fleet
from pigou.experiments.window import Measured
from pigou.games.allocation import AllocationGame

#: Objectives, over what a lone request takes: the paper names none.
TTFT_FACTOR, ITL_FACTOR = 4.0, 1.2


def estimate(fleet: Fleet, measured: Measured) -> dict[str, Any]:
    """Return the variational equilibria of the paper's Definition 1 with the fleet's own figures.

    g prefill workers serve as one that is g times as fast: P(wait > t) = rho e^{-(g mu - lambda) t}
    (M/M/1), 1 where g mu <= lambda. Streams spread over the decode workers, and their number on
    each is Poisson: the ITL objective is missed where it exceeds what a + b n allows. Both
    objectives are multiples of what a lone request takes.

    Prefill takes what the reading `serial-prefill` says, since with the other readings' there
    is nothing to divide: one worker has twenty times the room that is needed.
    """
    law = fleet.law("serial-prefill")
    rate, streams = measured.rps, measured.rps * 255 * law.itl_a
    slack = TTFT_FACTOR * fleet.base - fleet.base
    room = (ITL_FACTOR - 1.0) * law.itl_a / law.itl_b

    def late(prefill: float) -> float:
        mu = prefill / law.prefill
        return 1.0 if mu <= rate else rate / mu * math.exp(-(mu - rate) * slack)

    def slow(decode: float, _: float) -> float:
        return 1.0 if decode <= 0.0 else float(gammainc(room + 1.0, streams / decode))

    workers = fleet.decoders + 1
    game = AllocationGame(late, slow, float(workers))
    found = game.equilibria()
    best = min(range(1, workers), key=lambda whole: game.violations(float(whole)))
    return {
        "workers": workers,
        "equilibria": [
            {"prefill": each.prefill, "kind": each.kind, "stable": each.stable,
             "violations": each.violations}
            for each in found
        ],
        "best_whole_prefill": best,
        "violations_at_one": game.violations(1.0),
    }  # fmt: skip
