"""Prices against a prefill queue threshold, where prefill is the bottleneck."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from scipy import stats

from pigou_lab.experiments.fleets import PaperFleet, PolicySetting, Reading
from pigou_lab.experiments.level import Level, LevelRun, run
from pigou_lab.experiments.paper import RAMP_S
from pigou_lab.experiments.results import Row, make_row
from pigou_lab.experiments.window import clock_ns

TOLL_NAME = "toll"
LEVELS = (128, 256)
#: Prompts before one from which on it is computed locally.
THRESHOLDS = (1, 2, 3, 4)
#: Seconds that TTFT P99 may take of a threshold that counts as tuned.
SLO_S = 0.25
#: Seconds after the ramp, and how many of them are left out: speeds and gaps are learned in them.
HOLD_S, SETTLE_S = 90.0, 30.0
#: Seconds by which a prompt makes a step of streams longer: the weights read once more.
MIXED = {"340b-1p2d": 0.006, "70b-1p2d": 0.003, "70b-1p5d": 0.003}
_PROMPT = 128


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to route, by name."""

    name: str
    policy: str
    params: Mapping[str, Any] = field(default_factory=dict)


def threshold(prompts: int, tokens: int = _PROMPT) -> Contender:
    """Return conditional disaggregation at a threshold, in prompts of `tokens`."""
    params = {
        "inner": "least-loaded", "policy": "prefill_load", "max_num_batched_tokens": tokens,
        "prefill_busy_threshold": prompts - 0.5,
    }  # fmt: skip
    return Contender(f"threshold-{prompts}", "dynamo-conditional", params)


CONTENDERS = (
    Contender("static", "least-loaded"),
    Contender("toll", "toll"),
    *(threshold(prompts) for prompts in THRESHOLDS),
)


def prices(
    fleet: PaperFleet, _: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each level and contender; prefill is serial whatever the reading."""
    law = msgspec.structs.replace(fleet.law("serial-prefill"), mixed=MIXED[fleet.name])
    base = Level(fleet, "serial-prefill", 1, HOLD_S, False, law=law, templates=0, settle=SETTLE_S)
    for users in levels:
        for contender in CONTENDERS:
            level = replace(
                base,
                users=users,
                setting=PolicySetting(0.0, 1.0, contender.policy, contender.params),
            )
            level_runs = [run(level, seed) for seed in seeds]
            tpots = [_tpot(level_run, level) for level_run in level_runs]
            yield make_row(
                TOLL_NAME, users, [level_run.measured for level_run in level_runs], seeds,
                per_seed={"tpot_p99_s": tpots, "local": list(map(_local, level_runs))},
                contender=contender.name, tpots=tpots,
            )  # fmt: skip


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return toll over static, and toll less the tuned threshold (paired 95% interval)."""
    verdicts: dict[str, Any] = {}
    for users in dict.fromkeys(row["concurrency"] for row in rows):
        by_contender = {row["contender"]: row for row in rows if row["concurrency"] == users}
        toll, static = by_contender["toll"], by_contender["static"]
        eligible = [
            row for name, row in by_contender.items()
            if name.startswith("threshold") and row["ttft_p99_s"] <= SLO_S
        ]  # fmt: skip
        best = max(eligible, key=lambda row: float(row["rps"]))
        verdicts[f"toll_at_{users}"] = {
            "ttft_p99_s": toll["ttft_p99_s"],
            "rps_over_static": toll["rps"] / static["rps"],
            "itl_p99_over_static": toll["itl_p99_s"] / static["itl_p99_s"],
            "tpot_p99_over_static": toll["tpot_p99_s"] / static["tpot_p99_s"],
        }
        verdicts[f"tuned_at_{users}"] = {
            "threshold": best["contender"],
            **{f"{name}_difference": paired(_of_runs(toll, name), _of_runs(best, name))
               for name in ("rps", "ttft_p99_s", "e2e_mean_s")},
        }  # fmt: skip
    return verdicts


def paired(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of one - other, and the ends of its 95% confidence interval."""
    differences = np.array(one) - np.array(other)
    mean = float(differences.mean())
    if len(differences) < 2:
        return mean, float("-inf"), float("inf")
    error = float(differences.std(ddof=1)) / len(differences) ** 0.5
    width = float(stats.t.ppf(0.975, len(differences) - 1)) * error
    return mean, mean - width, mean + width


def _of_runs(row: Row, name: str) -> list[float]:
    return [float(seed_run[name]) for seed_run in row["runs"]]


def _tpot(level_run: LevelRun, level: Level) -> float:
    low, high = clock_ns(RAMP_S + level.settle), clock_ns(level.end)
    means = sorted(
        (done.last_token_ns - done.first_token_ns) / (done.output_tokens - 1) / 1e9
        for done in level_run.result.done
        if low <= done.intended_ns < high
    )
    return means[max(1, -(-99 * len(means) // 100)) - 1]


def _local(level_run: LevelRun) -> float:
    return 1.0 - level_run.result.transfers[0] / max(1, len(level_run.result.done))
