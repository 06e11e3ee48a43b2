"""The prefix linter: where prompts diverge, and what recurs behind the text that makes them.

A prefix cache serves a prompt up to its first new block. A timestamp at the head of a prompt makes
every block behind it new, though its text recurs. The linter groups prompts by their common
beginnings, looks where many of them part at once, and counts the tokens behind that recur.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

#: Tokens that must recur together to count, prompts of a group that are compared, and groups.
_RUN, _COMPARED, _GROUPS = 16, 200, 10
#: Prompts that part at once: at least so many branches, and this share of the prompts there.
_MIN_PROMPTS, _BRANCHES = 3, 0.5
#: What is worth a report: tokens of a prompt that recur, and their share behind the divergence.
_MIN_TOKENS, _MIN_SHARE = 32, 0.2


class PrefixGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that begin alike, and diverge in the same block."""

    prompts: int
    block: int  # the first diverging block, and its first token, from 0
    token: int
    text: str = ""  # the block's text in one prompt; "" for token ids
    # share of the tokens behind that block that recur; None where blocks are known by the hash of
    # all before them, so that it cannot be told.
    recurring: float | None = None
    # tokens of a prompt that would be hits, were the block's text behind them.
    saved_tokens: float = 0.0


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """Shared prefixes of the prompts of a trace."""

    prompts: int
    tokens: int
    shared: float  # share of the tokens in blocks that an earlier prompt began with
    possible: float  # the same with what recurs moved to the front
    groups: tuple[PrefixGroup, ...]  # where that would help, the greatest saving first


class _Trie:
    """Prompts by their blocks: a node for each beginning."""

    def __init__(self) -> None:
        self.children: list[dict[Hashable, int]] = [{}]
        self.members: list[list[int]] = [[]]
        self.depths = [0]

    def add(self, number: int, blocks: Sequence[Hashable]) -> int:
        """Add a prompt; return how many of its first blocks were there."""
        node = known = 0
        for depth, block in enumerate(blocks):
            self.members[node].append(number)
            following = self.children[node].get(block)
            if following is None:
                following = len(self.children)
                self.children[node][block] = following
                self.children.append({})
                self.members.append([])
                self.depths.append(depth + 1)
            elif known == depth:
                known += 1
            node = following
        return known

    def partings(self) -> list[tuple[int, list[int]]]:
        """Return depth and prompts of the nodes where many prompts part at once."""
        return [
            (depth, members)
            for depth, members, children in zip(
                self.depths, self.members, self.children, strict=True
            )
            if len(members) >= _MIN_PROMPTS
            and len(children) >= max(_MIN_PROMPTS, _BRANCHES * len(members))
        ]


def lint_prefixes(prompts: Sequence[Sequence[Hashable]], block_tokens: int = 16) -> PrefixReport:
    """Compare prompts by content.

    Args:
        prompts: each one's tokens: ids or pieces of text; equal tokens are equal content.
        block_tokens: tokens in a block of the prefix cache.
    """
    trie, shared = _Trie(), 0
    for number, prompt in enumerate(prompts):
        blocks = [
            tuple(prompt[at : at + block_tokens]) for at in range(0, len(prompt), block_tokens)
        ]
        shared += min(len(prompt), trie.add(number, blocks) * block_tokens)
    groups = []
    for depth, members in trie.partings():
        group = diverging_group([prompts[number] for number in members], depth, block_tokens)
        if group is not None:
            groups.append(group)
    groups.sort(key=lambda group: -group.saved_tokens * group.prompts)
    # What one group would save is part of what a group of longer beginnings would.
    saved = max((group.saved_tokens * (group.prompts - 1) for group in groups), default=0.0)
    tokens = max(sum(map(len, prompts)), 1)
    return PrefixReport(
        prompts=len(prompts), tokens=sum(map(len, prompts)), shared=shared / tokens,
        possible=min(1.0, (shared + saved) / tokens), groups=tuple(groups[:_GROUPS]),
    )  # fmt: skip


def lint_blocks(prompts: Sequence[Sequence[Hashable]], block_tokens: int) -> PrefixReport:
    """Compare prompts by the ids of their blocks, each the hash of all before it.

    Where prompts part is told; what recurs behind cannot be: its ids are new.
    """
    trie, shared = _Trie(), 0
    for number, blocks in enumerate(prompts):
        shared += trie.add(number, blocks)
    groups = [
        PrefixGroup(prompts=len(members), block=depth, token=depth * block_tokens)
        for depth, members in trie.partings()
    ]
    groups.sort(key=lambda group: -group.prompts)
    blocks_in_all = sum(map(len, prompts))
    share = shared / max(blocks_in_all, 1)
    return PrefixReport(
        prompts=len(prompts), tokens=blocks_in_all * block_tokens, shared=share, possible=share,
        groups=tuple(groups[:_GROUPS]),
    )  # fmt: skip


def diverging_group(
    prompts: Sequence[Sequence[Hashable]], depth: int, block_tokens: int
) -> PrefixGroup | None:
    """Return the group of prompts that part at a block; None where little recurs behind it.

    Args:
        prompts: the tokens of each, at least one; alike up to the block.
        depth: the block in which they part, from 0.
    """
    begin = depth * block_tokens
    tails = [tuple(prompt[begin + block_tokens :]) for prompt in prompts[:_COMPARED]]
    uses: dict[int, int] = defaultdict(int)
    for tail in tails:
        for run in {hash(tail[at : at + _RUN]) for at in range(len(tail) - _RUN + 1)}:
            uses[run] += 1
    recurring = sum(_recurring(tail, uses) for tail in tails)
    tokens = sum(map(len, tails))
    saved = recurring / len(tails)
    share = recurring / tokens if tokens else 0.0
    if saved < _MIN_TOKENS or share < _MIN_SHARE:
        return None
    block = prompts[0][begin : begin + block_tokens]
    text = "".join(piece for piece in block if isinstance(piece, str))
    return PrefixGroup(
        prompts=len(prompts), block=depth, token=begin, text=text, recurring=share,
        saved_tokens=saved,
    )  # fmt: skip


def _recurring(tail: Sequence[Hashable], uses: dict[int, int]) -> int:
    """Return the tokens of a tail that lie in runs which other tails have, too."""
    count = end = 0
    for at in range(len(tail) - _RUN + 1):
        if uses[hash(tail[at : at + _RUN])] > 1:
            count += at + _RUN - max(end, at)
            end = at + _RUN
    return count


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


#: Words of up to eight characters, and what is between them.
_PIECE = re.compile(r"\s?\w{1,8}|\s?[^\w\s]|\s")


def prompt_pieces(body: dict[str, Any], max_pieces: int = 2**22) -> Sequence[Hashable] | None:
    """Return the pieces of a body's prompt: token ids, or pieces of its text; None for none."""
    ids = body.get("prompt_token_ids") or body.get("prompt")
    if isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids):
        return ids[:max_pieces]
    text = body.get("prompt")
    messages = body.get("messages")
    if isinstance(messages, list):
        text = "".join(
            f"{message.get('role', '')}: {message.get('content', '')}\n"
            for message in messages if isinstance(message, dict)
        )  # fmt: skip
    if not isinstance(text, str) or not text:
        return None
    return _PIECE.findall(text[: 8 * max_pieces])[:max_pieces]
