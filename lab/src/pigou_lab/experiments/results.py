"""`results.json`: rows of means over seeds, the paper's figures, and their relative errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
from scipy import stats

from pigou.config import ConfigError
from pigou.sim.result import SimulationResult
from pigou.sim.simulation import Simulation
from pigou.workload.packed import packing
from pigou.workload.request_log import simulated_rows
from pigou_lab.experiments.fleets import BARGING, POOL, PaperFleet, Reading
from pigou_lab.experiments.paper import Figures
from pigou_lab.experiments.window import WindowFigures

#: Figures that the paper printed too.
COMPARED = ("ttft_p99_s", "itl_p99_s", "poa_legacy", "rps")

Row = dict[str, Any]


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95% interval of the mean of some seeds' values; None for less than two."""
    if len(values) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values)
    mean = statistics.fmean(values)
    return mean - half / math.sqrt(len(values)), mean + half / math.sqrt(len(values))


def over_seeds(values: Mapping[str, Sequence[float | None]]) -> Row:
    """Return the mean of each figure over the seeds that have it, and `ci95` with intervals."""
    row: Row = {"ci95": {}}
    for name, of_seeds in values.items():
        known = [float(one) for one in of_seeds if one is not None and math.isfinite(one)]
        row[name] = statistics.fmean(known) if known else None
        if (interval := t_interval(known)) is not None:
            row["ci95"][name] = list(interval)
    return row


def make_row(
    experiment: str, users: int, runs: Sequence[WindowFigures], seeds: Sequence[int],
    paper: Figures | None = None, per_seed: Mapping[str, Sequence[float | None]] | None = None,
    **rest: Any,
) -> Row:  # fmt: skip
    """Return a row: each figure is the mean over the runs, as in the paper's Experiment 3.

    `per_seed` has further figures, a value a seed.
    """
    columns = [asdict(figures) for figures in runs]
    figures = {name: [column[name] for column in columns] for name in columns[0]}
    row: Row = {"experiment": experiment, "concurrency": users,
                **over_seeds(figures | dict(per_seed or {})), **rest}  # fmt: skip
    if len(runs) > 1:
        row["sd"] = {
            name: statistics.stdev(column[name] for column in columns) for name in COMPARED
        }
    row["runs"] = [{"seed": s, **c} for s, c in zip(seeds, columns, strict=True)]
    if paper is not None:
        row["paper"] = {name: getattr(paper, name) for name in (*COMPARED, "regime", "source")}
        row["relative_error"] = {
            name: row[name] / value - 1.0
            for name in COMPARED
            if (value := getattr(paper, name)) is not None
        }
    return row


def log_rmse(
    rows: Sequence[Mapping[str, Any]], name: str, min_users: int = 0, max_users: int = 10**9
) -> float | None:
    """Return the root mean square of ln(ours / paper's) over rows of these levels; None if none."""
    logs = [
        math.log(row[name] / row["paper"][name])
        for row in rows
        if min_users <= row["concurrency"] <= max_users and row.get("paper", {}).get(name)
    ]
    return math.sqrt(statistics.fmean(x * x for x in logs)) if logs else None


RESULTS = "results.json"


def document(
    experiment: str, fleet: PaperFleet, reading: Reading, seeds: Sequence[int], rows: Sequence[Row],
    summary: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the contents of `results.json`."""
    law = msgspec.to_builtins(fleet.law(reading))
    pooled = reading == "client-pool"
    return {
        "experiment": experiment,
        "fleet": fleet.name,
        "reading": reading,
        "seeds": list(seeds),
        "constants": {"law": law, "pool": POOL if pooled else 0,
                      "barging": BARGING if pooled else 0.0},
        "summary": dict(summary),
        "rows": list(rows),
    }  # fmt: skip


def prepared(folder: Path) -> Path:
    """Make a folder for results and return it; raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out is {str(folder)!r}: {error}; name a folder to write to") from None
    return folder


def write(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write results into a folder and return the file; raises ConfigError."""
    path = prepared(folder) / RESULTS
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out is {str(folder)!r}: {error}; name a folder to write to") from None
    return path


@dataclass
class _RequestLog:
    file: IO[bytes]
    experiment: str
    runs: int = 0


_LOG: ContextVar[_RequestLog | None] = ContextVar("requests", default=None)


@contextmanager
def requests_to(path: str) -> Iterator[None]:
    """Write the requests of all runs within to a file; "" writes none."""
    if not path:
        yield
        return
    with packing(path) as file:
        token = _LOG.set(_RequestLog(file, Path(path).name))
        try:
            yield
        finally:
            _LOG.reset(token)


def logs_requests() -> bool:
    """True within `requests_to`, which writes from one process."""
    return _LOG.get() is not None


def log_experiment(name: str) -> None:
    """Begin to number the runs of an experiment."""
    if (log := _LOG.get()) is not None:
        log.experiment, log.runs = name, 0


def run_simulation(simulation: Simulation, **what: object) -> SimulationResult:
    """Run a simulation; `what` goes into the name of the run in the file of its requests."""
    result = simulation.run()
    if (log := _LOG.get()) is not None:
        log.runs += 1
        name = " ".join([f"{log.experiment}-{log.runs}", *(f"{k}={v}" for k, v in what.items())])
        encode = msgspec.json.Encoder().encode
        for row in simulated_rows(result, simulation.workload, name):
            log.file.write(encode(row) + b"\n")
    return result
