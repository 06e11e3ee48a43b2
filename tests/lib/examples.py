"""How many examples a property is tried on: few in `make test`, all in `make explore`."""

from __future__ import annotations

from hypothesis import settings

#: Examples of the profile `explore`, which those of other profiles are a share of.
ALL = 100
_FEWEST = 5


def examples(count: int) -> int:
    """Return how many of `count` examples the present profile tries."""
    return max(min(count, _FEWEST), count * settings.default.max_examples // ALL)
