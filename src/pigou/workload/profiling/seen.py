"""What a profile has seen: steps of known content, and how long they took."""

from __future__ import annotations

from dataclasses import dataclass, field

from pigou.sim.timing_measured import VariationTable


@dataclass(frozen=True, slots=True)
class Decodes:
    """Steps in which `n` sequences decode, and read `kv` cache entries together."""

    n: int
    kv: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Prompts:
    """What `prompts` of `tokens` tokens altogether take.

    Attributes:
        tokens: that were computed.
        reads: cache entries that each token reads, itself included, summed over the tokens.
        prompts: how many ended; a part of one, where steps hold less than a prompt.
        seconds: that it took.
    """

    tokens: int
    reads: float
    prompts: float
    seconds: float


@dataclass(slots=True)
class Seen:
    """All that a profile has seen; each a median of repeated measurements.

    Attributes:
        decodes: steps in which nothing else is done.
        beside: what prompts add to the steps of a running stream.
        alone: steps of prompts in which nobody decodes.
        first: from the send of a request to its first token, where there is no other.
        rhythm: by how many decode, seconds that each step of a plan takes more than their mean.
        scatter: by how many decode, equally likely factors of a step's time.
    """

    decodes: list[Decodes] = field(default_factory=list)
    beside: list[Prompts] = field(default_factory=list)
    alone: list[Prompts] = field(default_factory=list)
    first: list[Prompts] = field(default_factory=list)
    rhythm: VariationTable = ()
    scatter: VariationTable = ()
