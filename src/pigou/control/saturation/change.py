"""Sequential change detection: has the mean of a noisy series moved, and since when."""

from __future__ import annotations

import math

#: Mean overshoot of both ends of a discrete cumulative sum (Siegmund 1985): 2 x 0.583.
OVERSHOOT = 1.166


def cusum_threshold(arl: float, shift: float) -> float:
    """Return the height at which a cumulative sum raises an alarm.

    The sum is Page's ("Continuous Inspection Schemes", 1954) of log likelihood ratios, for a mean
    that moves by `shift` standard deviations. Its average run length to a false alarm is

        ARL0 = 2 (e^y - y - 1) / shift^2,  y = height + 1.166 shift

    (Siegmund, "Sequential Analysis", 1985, section 2.6), which is solved for the height.

    Args:
        arl: ARL0, in observations.
        shift: above 0.

    Raises:
        ValueError: `arl` is under 1, or `shift` is not above 0.
    """
    if not (math.isfinite(arl) and arl >= 1):
        raise ValueError(f"arl is {arl}: give a finite number of observations, at least 1")
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift is {shift}: give a finite number above 0")
    wanted = 0.5 * arl * shift * shift
    # Both are at or above the root, and the function is convex: Newton's steps only come down.
    y = min(math.sqrt(2 * wanted), math.log(2 * wanted + 2))
    for _ in range(50):
        step = (math.expm1(y) - y - wanted) / math.expm1(y)
        y -= step
        if step < 1e-12 * y:
            break
    return max(y - OVERSHOOT * shift, 0.0)


class Cusum:
    """A switch that follows the mean of a series across a reference, up and down.

    While it is off, Page's cumulative sum of log likelihood ratios for "the mean is `shift`/2
    above the reference, not below it by as much"; while it is on, the same sum the other way.
    Both turn it over at the height of the caller's choice, and begin again at 0. One observation
    counts for at most a share 1/`least` of the height, so a few odd ones change nothing.

    Attributes:
        on: whether the mean is above the reference.
        sum: what has gathered against that, in nats.
    """

    def __init__(self, reference: float, shift: float, least: int = 4) -> None:
        if not shift > 0 or least < 1:
            raise ValueError(f"shift is {shift}, least {least}: give above 0, and at least 1")
        self.reference = reference
        self.shift = shift
        self.on = False
        self.sum = 0.0
        self._least = least

    def update(self, value: float, scale: float, height: float) -> bool:
        """Take in a value; return whether the switch is on.

        Args:
            value: in the unit of the reference.
            scale: square root of the long-run variance of the values: that of their sum over
                their number, which serial correlation makes larger than their own (Bagshaw and
                Johnson, "The effect of serial correlation on the performance of CUSUM tests II",
                1975).
            height: of the alarm, in nats.
        """
        gain = self.shift * (value - self.reference) / (scale * scale)
        most = height / self._least
        gain = min(max(-gain if self.on else gain, -most), most)
        self.sum = max(0.0, self.sum + gain)
        if self.sum >= height * (1 - 1e-12):
            self.turn(not self.on)
        return self.on

    def turn(self, on: bool) -> None:
        """Put the switch on or off, with nothing gathered against it."""
        self.on = on
        self.sum = 0.0
