"""Experiment 1: fourteen levels of concurrency (Table 4), or some of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from scipy.special import gammainc

from pigou_lab.experiments.detect import Watcher, regime_of
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.level import Level, run
from pigou_lab.experiments.paper import EXPERIMENT1, LEVELS, THRESHOLDS_OF_TABLE_4
from pigou_lab.experiments.results import Row, log_rmse, make_row
from pigou_lab.experiments.window import WindowFigures
from pigou_lab.games.allocation import AllocationGame

NAME = "table4"
#: From here on the paper's rows are past its knee.
KNEE_USERS = 128


def table4(
    fleet: PaperFleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int] = LEVELS
) -> Iterator[Row]:
    """Yield a row a level; the ramp counts, as in the paper."""
    for users in levels:
        level = Level(fleet, reading, users)
        level_runs, watchers = [], []
        for seed in seeds:
            watcher = Watcher()
            level_runs.append(run(level, seed, (watcher.follow,)))
            watchers.append(watcher)
        first = level_runs[0]
        yield make_row(
            NAME, users, [level_run.measured for level_run in level_runs], seeds,
            EXPERIMENT1[fleet.name].get(users),
            regime=regime_of(first.result.runs, level.end, THRESHOLDS_OF_TABLE_4),
            kv_memory=watchers[0].memory(), poa_calibrated=watchers[0].anarchy(first.result),
            equilibrium=estimate(fleet, first.measured),
        )  # fmt: skip


def errors(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the replication's errors, as RMS logarithms."""
    return {
        "ttft_p99_from_128": log_rmse(rows, "ttft_p99_s", KNEE_USERS),
        "ttft_p99_to_96": log_rmse(rows, "ttft_p99_s", 0, KNEE_USERS - 1),
        "rps_from_128": log_rmse(rows, "rps", KNEE_USERS),
        "rps_8_to_96": log_rmse(rows, "rps", 8, KNEE_USERS - 1),
        "itl_p99": log_rmse(rows, "itl_p99_s"),
        "poa_1_to_96": log_rmse(rows, "poa_legacy", 0, KNEE_USERS - 1),
        "poa_from_128": log_rmse(rows, "poa_legacy", KNEE_USERS),
    }


#: Objectives, over what a lone request takes: the paper names none.
TTFT_FACTOR, ITL_FACTOR = 4.0, 1.2


def estimate(fleet: PaperFleet, measured: WindowFigures) -> dict[str, Any]:
    """Return the variational equilibria of the paper's Definition 1 with the fleet's figures.

    g prefill workers act as one M/M/1 server: P(wait > t) = rho e^{-(g mu - lambda) t}, 1 where g
    mu <= lambda. Streams per decode worker are Poisson; ITL = a + b n. Objectives are multiples of
    a lone request's times. Prefill follows the reading `serial-prefill`: the others have no
    contention.
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
    equilibria = game.equilibria()
    best = min(range(1, workers), key=lambda whole: game.violations(float(whole)))
    return {
        "workers": workers,
        "equilibria": [
            {"prefill": point.prefill, "kind": point.kind, "stable": point.stable,
             "violations": point.violations}
            for point in equilibria
        ],
        "best_whole_prefill": best,
        "violations_at_one": game.violations(1.0),
    }  # fmt: skip
