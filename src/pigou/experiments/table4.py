"""Experiment 1: fourteen levels of concurrency (Table 4), or some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pigou.experiments.detect import Watcher, regime_of
from pigou.experiments.equilibrium import estimate
from pigou.experiments.fleets import Fleet, Reading
from pigou.experiments.level import Level, run
from pigou.experiments.paper import EXPERIMENT1, LEVELS, THRESHOLDS_OF_TABLE_4
from pigou.experiments.rows import Row, log_rmse, row

NAME = "table4"
#: From here on the paper's rows are past its knee.
KNEE = 128


def table4(
    fleet: Fleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int] = LEVELS
) -> Iterator[Row]:
    """Yield a row a level; the ramp counts, as in the paper."""
    for users in levels:
        level = Level(fleet, reading, users)
        seen, watchers = [], []
        for seed in seeds:
            watcher = Watcher()
            seen.append(run(level, seed, (watcher.follow,)))
            watchers.append(watcher)
        first = seen[0]
        yield row(
            NAME, users, [each.measured for each in seen], seeds,
            EXPERIMENT1[fleet.name].get(users),
            regime=regime_of(first.result.calls, level.end, THRESHOLDS_OF_TABLE_4),
            kv_memory=watchers[0].memory(), poa_calibrated=watchers[0].anarchy(first.result),
            equilibrium=estimate(fleet, first.measured),
        )  # fmt: skip


def errors(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the errors that the replication is judged by, as roots of mean squared logarithms."""
    return {
        "ttft_p99_from_128": log_rmse(rows, "ttft_p99_s", KNEE),
        "ttft_p99_to_96": log_rmse(rows, "ttft_p99_s", 0, KNEE - 1),
        "rps_from_128": log_rmse(rows, "rps", KNEE),
        "rps_8_to_96": log_rmse(rows, "rps", 8, KNEE - 1),
        "itl_p99": log_rmse(rows, "itl_p99_s"),
        "poa_1_to_96": log_rmse(rows, "poa_legacy", 0, KNEE - 1),
        "poa_from_128": log_rmse(rows, "poa_legacy", KNEE),
    }
