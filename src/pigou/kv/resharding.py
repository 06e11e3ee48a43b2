"""Resharding: which ranks exchange which KV heads when two workers differ in TP."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class HeadSlice(NamedTuple):
    """One message: consecutive KV heads sent from one rank to another."""

    source: int  # rank of the sending worker
    target: int  # rank of the receiving worker
    first: int  # index of the first head in the model
    heads: int


@dataclass(frozen=True, slots=True)
class TransferSplit:
    """Split of a transfer over the ranks of both workers."""

    source_share: float = 1.0  # share of the KV bytes sent by the busiest source rank
    target_share: float = 1.0  # share received by the busiest target rank
    messages: int = 1  # maximum over ranks


def heads_of_rank(kv_heads: int, tp: int, rank: int) -> range:
    """Return a rank's KV heads (MLA:

    1 head); raises ValueError if neither number divides the other.
    """
    if kv_heads < 1 or tp < 1 or (kv_heads % tp and tp % kv_heads):
        raise ValueError(f"tp is {tp}; it must divide, or be a multiple of, {kv_heads} KV heads")
    if tp > kv_heads:
        first = rank // (tp // kv_heads)
        return range(first, first + 1)
    share = kv_heads // tp
    return range(rank * share, (rank + 1) * share)


def head_slices(kv_heads: int, source_tp: int, target_tp: int) -> list[HeadSlice]:
    """Return the messages that give every target rank its heads; raises ValueError."""
    for tp in (source_tp, target_tp):
        heads_of_rank(kv_heads, tp, 0)  # refuses what cannot be divided
    sources = [heads_of_rank(kv_heads, source_tp, rank) for rank in range(source_tp)]
    source_copies, target_copies = (max(1, tp // kv_heads) for tp in (source_tp, target_tp))
    slices = []
    for target in range(target_tp):
        wanted = heads_of_rank(kv_heads, target_tp, target)
        copy = target % target_copies * source_copies // target_copies
        for source in range(copy, source_tp, source_copies):
            first = max(wanted.start, sources[source].start)
            last = min(wanted.stop, sources[source].stop)
            if first < last:
                slices.append(HeadSlice(source, target, first, last - first))
    return slices


@lru_cache(maxsize=1024)
def split_of(kv_heads: int, source_tp: int, target_tp: int) -> TransferSplit:
    """Return the split of a transfer over ranks; raises ValueError as `head_slices` does."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    messages: Counter[tuple[str, int]] = Counter()
    for part in head_slices(kv_heads, source_tp, target_tp):
        sent[part.source] += part.heads
        received[part.target] += part.heads
        messages.update([("source", part.source), ("target", part.target)])
    return TransferSplit(
        max(sent.values()) / kv_heads, max(received.values()) / kv_heads, max(messages.values())
    )
