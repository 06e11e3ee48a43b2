"""Figures of Georgiou (2026), "The Price of Anarchy in Disaggregated Inference", in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

FleetName: TypeAlias = Literal["340b-1p2d", "70b-1p2d", "70b-1p5d"]


@dataclass(frozen=True, slots=True)
class Figures:
    """The paper's figures of one measurement; None if not printed."""

    ttft_p99_s: float | None = None  # seconds to the first token, 99th percentile
    itl_p99_s: float | None = None  # seconds between tokens, 99th percentile
    poa_legacy: float | None = None  # the paper's index
    rps: float | None = None  # requests completed a second
    regime: str | None = None
    source: str = ""  # table or section


#: Levels of Experiment 1; Table 4 has some.
LEVELS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Experiment 2.
REGIME_LEVELS = (1, 4, 8, 16, 32, 64, 128, 256, 512)


def _table4() -> dict[int, Figures]:
    rows = (
        (1, 0.074, 19.8, 84.4, 0.2), (2, 0.134, 19.0, 53.6, 0.4), (4, 0.145, 19.2, 31.6, 0.7),
        (8, 0.170, 21.9, 19.0, 1.3), (16, 0.181, 21.4, 19.4, 2.5), (32, 0.278, 21.9, 19.5, 4.9),
        (48, 0.366, 22.2, 19.3, 7.4), (64, 0.739, 22.7, 18.7, 10.2), (96, 0.544, 22.5, 18.7, 15.3),
        (128, 16.2, 22.6, 27.9, 16.5), (192, 45.7, 22.4, 70.2, 17.1),
        (256, 83.2, 22.3, 176.9, 17.6), (384, 109.0, 23.3, 283.6, 18.0),
        (512, 113.0, 22.2, 248.2, 18.0),
    )  # fmt: skip
    labels = ("below",) * 5 + ("transition",) * 4 + ("saturated",) * 5
    return {
        users: Figures(ttft, itl / 1000, poa, rps, label, "Table 4")
        for (users, ttft, itl, poa, rps), label in zip(rows, labels, strict=True)
    }


#: Experiment 1 on the fleets; of the 70B ones the text has single figures (section 8.1).
EXPERIMENT1: Mapping[FleetName, Mapping[int, Figures]] = {
    "340b-1p2d": _table4(),
    "70b-1p2d": {
        64: Figures(poa_legacy=7.47, source="8.1: plateau"),
        96: Figures(ttft_p99_s=0.354, source="8.1: before the knee"),
        128: Figures(ttft_p99_s=10.0, poa_legacy=17.6, rps=47.0, source="8.1"),
        256: Figures(poa_legacy=167.0, rps=47.0, source="8.1"),
        384: Figures(poa_legacy=199.0, rps=47.0, source="8.1"),
    },
    "70b-1p5d": {
        32: Figures(poa_legacy=14.7, source="8.1: plateau"),
        64: Figures(poa_legacy=14.93, source="8.3: mean of Experiment 4a"),
        128: Figures(poa_legacy=57.3, rps=51.0, source="8.1"),
        256: Figures(poa_legacy=309.0, rps=51.0, source="8.1"),
    },
}


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of the paper's detector, in seconds of smoothed TTFT P99 (section 6.2)."""

    low: float
    high: float


#: Table 4's labels were made with those of the 70B model, whatever the fleet.
THRESHOLDS: Mapping[FleetName, Thresholds] = {
    "340b-1p2d": Thresholds(1.0, 10.0),
    "70b-1p2d": Thresholds(0.3, 2.0),
    "70b-1p5d": Thresholds(0.3, 2.0),
}
THRESHOLDS_OF_TABLE_4 = Thresholds(0.3, 2.0)


@dataclass(frozen=True, slots=True)
class Slopes:
    """Finite differences of TTFT P99 over C, seconds a user (section 8.2)."""

    below: float
    across: float


#: Over C = 32..64 and 64..128.
SLOPES: Mapping[FleetName, Slopes] = {
    "340b-1p2d": Slopes(0.012, 0.554),
    "70b-1p2d": Slopes(0.003, 0.458),
}

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
OVERLAP_WEIGHTS = (0.0, 0.3, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class Grid:
    """Experiment 4: the index by (temperature, overlap weight), or a remark."""

    mean: float  # over the cells
    sd: float  # standard deviation between them
    rps: float
    source: str  # table or section
    ttft_p99_s: tuple[float, float] | None = None  # least and largest
    cells: Sequence[Sequence[float]] = ()  # rows are temperatures; empty where the paper has none


#: By concurrency: 64 is Experiment 4a, 128 is 4b.
GRIDS: Mapping[FleetName, Mapping[int, Grid]] = {
    "340b-1p2d": {
        64: Grid(18.7, 0.10, 12.0, "Table 6(a)", None, (
            (18.7, 18.6, 18.7, 18.7), (18.6, 18.6, 18.5, 18.7),
            (18.7, 18.7, 18.9, 18.7), (18.6, 18.8, 18.6, 18.6),
        )),
        128: Grid(34.3, 3.7, 18.9, "Table 6(b)", (24.7, 45.6), (
            (31.9, 34.6, 32.4, 36.0), (36.5, 42.5, 35.7, 26.6),
            (32.0, 29.4, 34.2, 34.4), (37.5, 32.7, 34.0, 38.5),
        )),
    },
    "70b-1p2d": {
        64: Grid(7.47, 0.08, 30.0, "8.3"),
        128: Grid(21.9, 4.6, 47.0, "Table 6(c)", (6.7, 25.6), (
            (19.6, 18.4, 25.4, 19.1), (27.5, 20.6, 14.6, 15.6),
            (28.2, 26.4, 24.6, 20.5), (21.2, 25.7, 27.2, 15.4),
        )),
    },
    "70b-1p5d": {
        64: Grid(14.93, 0.06, 33.0, "8.3"),
        128: Grid(57.8, 10.6, 51.0, "8.4"),
    },
}  # fmt: skip

Phase: TypeAlias = Literal["below", "saturated", "recovery"]
Strategy: TypeAlias = Literal["static", "adaptive"]

#: Users and seconds of Experiment 3.
SPIKE: Sequence[tuple[Phase, int, float]] = (
    ("below", 32, 120.0), ("saturated", 128, 180.0), ("recovery", 32, 120.0),
)  # fmt: skip


def _spike(
    source: str, *rows: tuple[Strategy, Phase, float, float, float, float]
) -> dict[tuple[str, Phase], Figures]:
    return {
        (strategy, phase): Figures(ttft, itl / 1000, poa, rps, source=source)
        for strategy, phase, poa, ttft, itl, rps in rows
    }


#: Experiment 3; of the 70B 1P/2D fleet the text has the saturated phase (section 8.5).
EXPERIMENT3: Mapping[FleetName, Mapping[tuple[str, Phase], Figures]] = {
    "340b-1p2d": _spike(
        "Table 7",
        ("static", "below", 19.51, 0.29, 22.3, 5.5),
        ("static", "saturated", 33.15, 28.26, 22.7, 18.2),
        ("static", "recovery", 19.52, 0.30, 23.8, 5.5),
        ("adaptive", "below", 19.55, 0.29, 22.5, 5.5),
        ("adaptive", "saturated", 25.78, 5.92, 22.4, 11.6),
        ("adaptive", "recovery", 19.55, 0.57, 22.8, 5.5),
    ),
    "70b-1p5d": _spike(
        "Table 8",
        ("static", "below", 14.72, 0.11, 9.9, 16.7),
        ("static", "saturated", 66.42, 8.19, 11.5, 50.9),
        ("static", "recovery", 14.68, 0.094, 9.9, 16.8),
        ("adaptive", "below", 14.66, 0.106, 10.0, 16.8),
        ("adaptive", "saturated", 21.53, 4.22, 11.3, 44.3),
        ("adaptive", "recovery", 14.75, 0.128, 9.9, 16.8),
    ),
    "70b-1p2d": {
        ("static", "saturated"): Figures(25.9, None, 23.1, None, source="8.5"),
        ("adaptive", "saturated"): Figures(3.4, None, 10.7, None, source="8.5"),
    },
}
#: Seconds from the beginning of the saturated phase to the switch (section 8.5).
SWITCH_S: Mapping[FleetName, float] = {"340b-1p2d": 54.8, "70b-1p5d": 58.3, "70b-1p2d": 48.6}
#: Iterations beyond this many medians of their strategy are flagged (section 7.4).
OUTLIER = 5.0
#: Routers without state, over the Hungarian optimum, from C = 8 on (section 9.2).
COUNTERFACTUAL = (0.003, 0.10)


#: Gaps between the 256 tokens of a request.
GAPS = 255
#: Seconds of Experiment 1: ramp, and ramp with hold.
RAMP_S, END_S = 30.0, 150.0
