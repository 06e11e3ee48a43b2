"""Session retention: how much of a session's last prompt is still cached as its next one comes."""

from __future__ import annotations

from collections import OrderedDict

from prometheus_client import CollectorRegistry, Counter

from pigou.request import BlockKeys

#: Prompts whose end is remembered.
_MAX_SESSIONS = 65_536


class SessionRetention:
    """Counts blocks of earlier prompts that a longer one begins with, and those still cached.

    A prompt that begins with all full blocks of an earlier one is that session's next turn. The
    ratio of the two counters is the session's block retention rate.

    Example:
        retention = SessionRetention(registry)
        retention.take(keys, cached_blocks=12)
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._returned = Counter(
            "pigou_session_blocks_returned",
            "KV blocks of earlier prompts that a session's next prompt begins with.",
            registry=registry,
        )
        self._retained = Counter(
            "pigou_session_blocks_retained",
            "Of those, blocks that the worker still has that computes the next prompt.",
            registry=registry,
        )
        self._last_blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, keys: BlockKeys, cached_blocks: int) -> None:
        """Take in a routed prompt.

        Args:
            keys: of its full blocks, (blocks,); each says what all blocks up to it are.
            cached_blocks: leading blocks that its worker has.
        """
        if not len(keys):
            return
        chain: list[int] = keys.tolist()
        for index in range(len(chain) - 1, -1, -1):
            if chain[index] in self._last_blocks:
                self._returned.inc(index + 1)
                self._retained.inc(min(cached_blocks, index + 1))
                del self._last_blocks[chain[index]]  # the session ends further on now
                break
        self._last_blocks[chain[-1]] = None
        if len(self._last_blocks) > _MAX_SESSIONS:
            self._last_blocks.popitem(last=False)
