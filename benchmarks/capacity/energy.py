"""The power model against Splitwise's measurements: constants of one half, errors of the other.

    python -m benchmarks.capacity.energy

Power columns of `splitwise-perf_model.csv` (A100; those of H100 are zero), medians by
configuration, in parts of the board's limit. `average_power` is mostly of decode: its use is MBU.
`peak_power` is of the prompt: its use is MFU. Constants minimise the mean relative error over every
second configuration; prompts of 8,192 tokens are among them, whose average power is three times
lower in Llama's rows than the model, or the rows beside them, have it.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from benchmarks.lib.shared_folder import shared_folder
from pigou.models.gpus import FULL_MFU, GAMMA, IDLE_SHARE, PowerModel

#: Parameters, layers, KV heads, query heads and width of a head; weights and KV in 16 bits.
_MODELS = {"llama2-70b": (68.98e9, 80, 8, 64, 128), "bloom-176b": (176.2e9, 70, 112, 112, 128)}
_BANDWIDTH, _PEAK = 2039e9, 312e12
_POWERS = ("average_power", "peak_power", "prompt_time", "token_time")


@dataclass(frozen=True)
class PowerRow:
    """A configuration: its uses, and its power in parts of the limit."""

    name: str
    prompt: int
    mbu: float
    mfu: float
    average: float
    peak: float


def read_rows() -> list[PowerRow]:
    """Return the configurations that have power, sorted."""
    groups: dict[tuple[str, int, int, int, int], list[list[float]]] = defaultdict(list)
    with (shared_folder() / "profiles" / "splitwise-perf_model.csv").open() as file:
        for line in csv.DictReader(file):
            if float(line["average_power"] or 0) > 0:
                sizes = ("tensor_parallel", "prompt_size", "batch_size", "token_size")
                tp, prompt, batch, tokens = (int(line[name]) for name in sizes)
                key = (line["model"], tp, prompt, batch, tokens)
                groups[key].append([float(line[name]) for name in _POWERS])
    return [_row(key, np.median(values, axis=0).tolist()) for key, values in sorted(groups.items())]


def _row(key: tuple[str, int, int, int, int], values: Sequence[float]) -> PowerRow:
    model, tp, prompt, batch, tokens = key
    parameters, layers, kv_heads, heads, width = _MODELS[model]
    average, peak, prompt_ms, token_ms = values
    kv_bytes = 4 * layers * kv_heads * width
    read = 2 * parameters + batch * kv_bytes * (prompt + tokens / 2)
    flops = 2 * parameters * prompt * batch + 2 * layers * heads * width * prompt**2 * batch
    mbu = read / (token_ms / 1e3) / (tp * _BANDWIDTH)
    mfu = flops / (prompt_ms / 1e3) / (tp * _PEAK)
    name = f"{model} tp{tp} prompt {prompt} batch {batch}"
    return PowerRow(name, prompt, mbu, mfu, average, peak)


def fit(rows: Sequence[PowerRow]) -> PowerModel:
    """Return the power model of a board of 1 W that fits the rows."""

    def model(values: Sequence[float]) -> PowerModel:
        idle, gamma, full = (float(value) for value in np.clip(values, 0.01, 2.0))
        return PowerModel(1.0, min(idle, 0.9), gamma, full)

    def loss(values: Sequence[float]) -> float:
        made = model(values)
        return float(np.mean(errors(made, rows)) + np.mean(peak_errors(made, rows)))

    starts = [
        (idle, gamma, full) for idle in (0.1, 0.3) for gamma in (0.5, 0.9) for full in (0.4, 0.7)
    ]
    results = [minimize(loss, start, method="Nelder-Mead") for start in starts]
    return model(min(results, key=lambda made: made.fun).x)


def errors(model: PowerModel, rows: Sequence[PowerRow]) -> list[float]:
    """Return the relative errors of the average power."""
    return [abs(model.decode_watts(row.mbu) / row.average - 1.0) for row in rows]


def peak_errors(model: PowerModel, rows: Sequence[PowerRow]) -> list[float]:
    """Return the relative errors of the power of prompts."""
    return [abs(model.prefill_watts(row.mfu) / row.peak - 1.0) for row in rows]


def main() -> None:
    """Print constants and errors."""
    rows = read_rows()
    halves = {"even": rows[::2], "odd": rows[1::2]}
    print("chosen on   idle gamma full MFU | reported on: rows, mean and largest error")
    for name, other in (("even", "odd"), ("odd", "even")):
        model = fit(halves[name])
        judged = halves[other]
        usual = [row for row in judged if row.prompt < 8192]
        print(f"{name:10} {model.idle_share:5.3f} {model.gamma:5.3f} {model.full_mfu:7.3f}", end="")
        for label, part in ((other, judged), (f"{other}, prompts < 8192", usual)):
            for what, found in (
                ("average", errors(model, part)),
                ("prompt", peak_errors(model, part)),
            ):
                print(
                    f" | {label} {what}: {len(part)}, {np.mean(found):.1%}, {max(found):.1%}",
                    end="",
                )
        print()
    shipped = PowerModel(1.0, IDLE_SHARE, GAMMA, FULL_MFU)
    print(f"\nshipped: idle {IDLE_SHARE}, gamma {GAMMA}, full MFU {FULL_MFU}; odd rows:")
    print(
        f"{'configuration':40} {'MBU':>5} {'seen':>6} {'model':>6} {'error':>7} | "
        f"{'MFU':>5} {'seen':>6} {'model':>6} {'error':>7}"
    )
    for row in halves["odd"]:
        decode, prompt = shipped.decode_watts(row.mbu), shipped.prefill_watts(row.mfu)
        print(
            f"{row.name:40} {row.mbu:5.2f} {row.average:6.3f} {decode:6.3f} "
            f"{decode / row.average - 1:+7.1%} | {row.mfu:5.2f} {row.peak:6.3f} {prompt:6.3f} "
            f"{prompt / row.peak - 1:+7.1%}"
        )
    usual = [row for row in halves["odd"] if row.prompt < 8192]
    print(
        f"average power: median error {np.median(errors(shipped, halves['odd'])):.1%}, mean "
        f"{np.mean(errors(shipped, halves['odd'])):.1%}, without prompts of "
        f"8,192 {np.mean(errors(shipped, usual)):.1%}; of prompts: mean "
        f"{np.mean(peak_errors(shipped, halves['odd'])):.1%}"
    )


if __name__ == "__main__":
    main()
