"""Time per token that the paper's throughput column implies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import brentq

from pigou.experiments.paper import Figures

#: Gaps between the 256 tokens of a request.
GAPS = 255
#: Seconds of Experiment 1: ramp, and ramp with hold.
RAMP, END = 30.0, 150.0


def completed(users: int, slots: int, seconds: float) -> float:
    """Return the requests a second that a ramped closed loop completes, on average.

    User k of `users` begins at `RAMP` k / users; where there are fewer slots than users, the
    first `slots` of them keep theirs busy. Each then completes (end - begin) / seconds - 1/2.
    """
    begins = RAMP * np.arange(min(users, slots)) / users
    return float(((END - begins) / seconds - 0.5).sum() / END)


def response(users: int, slots: int, rps: float) -> float:
    """Return the seconds of a request at which `completed` gives `rps`."""
    return float(brentq(lambda seconds: completed(users, slots, seconds) - rps, 0.1, 60.0))


def throughput_itl(
    rows: Mapping[int, Figures], slots: int, first: float, least: int = 8
) -> tuple[float, float]:
    """Return the ITL in seconds that fits the throughput column, and the slope that it has.

    Rates are printed with one decimal, so a row's relative error falls with its rate, and rows
    weigh by the square of it. The slope is that of the weighted line over streams in flight; where
    it is negative, a constant is all that the column supports.

    Args:
        rows: of Table 4.
        slots: requests in flight at most.
        first: seconds to the first token that a request has besides.
        least: users from which rates have enough digits.
    """
    users = [each for each in rows if each >= least]
    rates = np.array([rows[each].rps or 0.0 for each in users])
    times = np.array([response(each, slots, rows[each].rps or 0.0) for each in users])
    itl = (times - first) / GAPS
    flight = np.minimum(users, slots).astype(np.float64)
    weight = rates**2
    slope, _ = np.polyfit(flight, itl, 1, w=np.sqrt(weight))
    return float(np.average(itl, weights=weight)), float(slope)
