"""Which mechanism explains Table 4: each alone, by our own fleet and client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from pigou.sim.client import ClientConfig
from pigou_lab.experiments.fleets import BARGING, POOL, PaperFleet, Reading
from pigou_lab.experiments.level import Level, run
from pigou_lab.experiments.paper import EXPERIMENT1
from pigou_lab.experiments.results import Row, log_rmse, make_row

#: Seconds of prefill that leave a pool of 100 the bottleneck, but nearly fill the worker.
NEAR = 0.045
_OPEN = ClientConfig()


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One explanation."""

    name: str
    reading: Reading
    client: ClientConfig = _OPEN
    prefill: float = 0.0  # seconds of a prompt, in place of the reading's; 0 for that


def _pool(take: str = "fifo", barging: float = 0.0) -> ClientConfig:
    return ClientConfig(pool=POOL, take=take, barging=barging)  # type: ignore[arg-type]


MECHANISMS = (
    Mechanism("nothing: fair client, quick prefill", "fair"),
    Mechanism("serial prefill, first come first served", "serial-prefill"),
    Mechanism("pool of 100, first come first served", "fair", _pool()),
    Mechanism("pool of 100, random", "fair", _pool("random")),
    Mechanism("pool of 100, last come first served", "fair", _pool("lifo")),
    Mechanism("pool of 100, barging 0.8", "fair", _pool(barging=0.8)),
    Mechanism("pool of 100, barging 0.9", "fair", _pool(barging=BARGING)),
    Mechanism("pool of 100, barging 0.95", "fair", _pool(barging=0.95)),
    Mechanism("serial prefill 45 ms, pool of 100, barging 0.9", "serial-prefill",
              _pool(barging=BARGING), NEAR),
)  # fmt: skip


def mechanisms(
    fleet: PaperFleet, _: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each mechanism and level, as of Experiment 1; each has its own reading."""
    for mechanism in MECHANISMS:
        law = fleet.law(mechanism.reading)
        if mechanism.prefill:
            scale = mechanism.prefill if fleet.name.startswith("340b") else law.prefill * 0.85
            law = replace(law, prefill=scale)
        for users in levels:
            level = Level(fleet, mechanism.reading, users, client=mechanism.client, law=law)
            figures = [run(level, seed).measured for seed in seeds]
            paper = EXPERIMENT1[fleet.name].get(users)
            yield make_row("mechanisms", users, figures, seeds, paper, mechanism=mechanism.name)


def ranking(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return each mechanism's errors over the levels past the knee, the best first."""
    errors = {}
    for name in dict.fromkeys(row["mechanism"] for row in rows):
        subset = [row for row in rows if row["mechanism"] == name]
        drained = [{**row, "ttft_p99_s": row["ttft_drained_p99_s"]} for row in subset]
        errors[name] = {
            "ttft_p99_from_128": log_rmse(subset, "ttft_p99_s", 128),
            "ttft_p99_from_128_drained": log_rmse(drained, "ttft_p99_s", 128),
            "rps_from_128": log_rmse(subset, "rps", 128),
        }
    return dict(sorted(errors.items(), key=lambda item: item[1]["ttft_p99_from_128"] or 0.0))
