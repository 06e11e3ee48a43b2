"""The reference: what the first worker to show a scene took, which others are compared with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from pigou.request import Rehearsed

#: Workers whose logarithms differ by less are taken for alike: a busy machine measures no better,
#: and service will tell.
_ALIKE = 0.25


class Reference:
    """Seconds a step of each scene (a prompt's tokens, and streams), by whoever came first."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], float] = {}

    def ratio(self, scenes: Sequence[Rehearsed]) -> float:
        """Return how many times as long a worker takes as those before it; 1 where it is alike.

        The median over its scenes. Those that nobody had shown count for nothing, and are what
        others are compared with from now on.
        """
        found = []
        for each in scenes:
            took = each.seconds / each.steps
            before = self._steps.setdefault((each.tokens, each.streams), took)
            found.append(took / before)
        ratio = statistics.median(found) if found else 1.0
        return ratio if abs(math.log(ratio)) >= _ALIKE else 1.0


def of(rehearsed: Iterable[Rehearsed], streams: bool) -> list[Rehearsed]:
    """Return the scenes with prompts alone, or (`streams`) with streams alone."""
    return [each for each in rehearsed if (each.tokens == 0) == streams and not _mixed(each)]


def mixed(rehearsed: Iterable[Rehearsed]) -> list[Rehearsed]:
    """Return the scenes with a prompt beside streams."""
    return [each for each in rehearsed if _mixed(each)]


def _mixed(scene: Rehearsed) -> bool:
    return scene.tokens > 0 and scene.streams > 0
