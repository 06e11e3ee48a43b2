"""Advice to one client: where its prompt leaves the beginning of its earlier ones."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from pigou.diagnosis.prefix_lint import PrefixGroup, diverging_group

#: Tokens in a block, prompts of a tenant that are remembered, tokens of each, and tenants.
_BLOCK, _PROMPTS, _TENANTS = 16, 4, 16
MAX_PIECES = 2048


class PrefixAdvisor:
    """Compares each prompt with the tenant's last four that asked; memory is bounded.

    No tenant learns of another's prompts.
    """

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, deque[Sequence[Hashable]]] = OrderedDict()

    def advise(self, tenant: str, pieces: Sequence[Hashable]) -> str:
        """Return advice in one line of ASCII, and remember the prompt's first 2,048 tokens."""
        own = pieces[:MAX_PIECES]
        known = self._prompts.pop(tenant, deque(maxlen=_PROMPTS))
        closest = max(known, key=lambda prompt: _common(prompt, own), default=None)
        if own not in known:
            known.append(own)
        self._prompts[tenant] = known
        if len(self._prompts) > _TENANTS:
            self._prompts.popitem(last=False)
        if closest is None:
            return "unknown; no earlier prompt asked for advice"
        shared = _common(closest, own)
        group = diverging_group([closest, own], shared // _BLOCK, _BLOCK)
        return _advice(shared, group)


def _advice(shared: int, group: PrefixGroup | None) -> str:
    if group is None:
        return f"stable; the first {shared} tokens are those of an earlier prompt"
    return (
        f"move; the prompt diverges at token {shared} (block {group.block}), and "
        f"{group.saved_tokens:.0f} tokens behind recur: put what changes behind them"
    )


def _common(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return how many tokens two prompts begin with alike."""
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))
