"""Rate: how long a link takes for n blocks, learnt from what it took."""

from __future__ import annotations


class Rate:
    """seconds(n) = latency + n x seconds per block, by least squares, the past fading.

    Each observation counts `FADE` times as much as the next one. The law begins as a guess, which
    fades alike.
    """

    FADE = 0.97

    def __init__(self, latency: float, per_block: float) -> None:
        """Begin with a guess: `latency` and `per_block`, seconds."""
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._add(1, latency + per_block)
        self._add(64, latency + 64 * per_block)

    def observe(self, blocks: int, seconds: float) -> None:
        """Note that `blocks` blocks, at least 1, took `seconds`."""
        for name in ("_w", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * self.FADE)
        self._add(blocks, seconds)

    def _add(self, n: float, seconds: float) -> None:
        self._w += 1
        self._x += n
        self._y += seconds
        self._xx += n * n
        self._xy += n * seconds

    def law(self) -> tuple[float, float]:
        """Latency and seconds per block, neither negative."""
        spread = self._w * self._xx - self._x * self._x
        through = self._xy / self._xx  # the law without latency
        if spread <= 1e-9 * self._w * self._xx:
            return 0.0, through
        slope = (self._w * self._xy - self._x * self._y) / spread
        if slope < 0:
            return self._y / self._w, 0.0
        latency = (self._y - slope * self._x) / self._w
        return (latency, slope) if latency >= 0 else (0.0, through)

    def seconds(self, blocks: int) -> float:
        """Seconds that `blocks` blocks take."""
        latency, slope = self.law()
        return latency + blocks * slope
