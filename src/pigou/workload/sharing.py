"""Sharing: how much of a trace's prompts was there before, and what a cache would have hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from pigou.workload.trace import Trace, Turn


@dataclass(frozen=True, slots=True)
class Sharing:
    """Blocks of a trace.

    Attributes:
        references: blocks of all prompts.
        distinct: different ones.
    """

    references: int
    distinct: int

    @property
    def reuse(self) -> float:
        """Share of the references whose block was there before; 0 where there are none."""
        return 1.0 - self.distinct / self.references if self.references else 0.0


def turns(trace: Trace) -> Iterator[tuple[str, Turn]]:
    """Yield scope and turn of each request, in the order of their times.

    What is served takes no time here: a turn comes its think time after the one before.
    """
    found = []
    for number, session in enumerate(trace.sessions):
        at = session.start
        for place, turn in enumerate(session.turns):
            at += turn.think if place else 0.0
            found.append((at, number, place, session.scope, turn))
    for *_, scope, turn in sorted(found, key=lambda each: each[:3]):
        yield scope, turn


def sharing(trace: Trace) -> Sharing:
    """Count a trace's blocks."""
    seen: set[tuple[str, int]] = set()
    references = 0
    for scope, turn in turns(trace):
        references += len(turn.blocks)
        seen.update((scope, block) for block in turn.blocks)
    return Sharing(references, len(seen))


def hit_ratio(trace: Trace, tokens: float) -> float:
    """Return the share of prompt tokens that one cache would have hit, at best.

    The cache holds the blocks of so many tokens, used longest ago goes first, and the whole
    fleet shares it. A prompt hits its leading blocks. Blocks of answers are not counted, as
    traces do not tell them.

    Args:
        trace: with blocks.
        tokens: that the cache holds; infinite for no limit.
    """
    room = tokens / trace.block
    cache: OrderedDict[tuple[str, int], None] = OrderedDict()
    hit = asked = 0.0
    for scope, turn in turns(trace):
        names = [(scope, block) for block in turn.blocks]
        lead = next((i for i, name in enumerate(names) if name not in cache), len(names))
        hit += min(lead * trace.block, turn.input)
        asked += turn.input
        for name in reversed(names):  # a chain's tail goes before its root
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > room:
            cache.popitem(last=False)
    return hit / asked if asked else 0.0
