"""The prefix linter: where prompts diverge, and how many tokens recur behind.

A timestamp at the head makes every later block new, though its text recurs.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

#: Tokens of a recurring run, compared prompts per group, and groups.
_RUN, _COMPARED, _GROUPS = 16, 200, 10
#: A divergence has at least this many branches, and this share of its prompts.
_MIN_PROMPTS, _BRANCHES = 3, 0.5
#: Report thresholds: recurring tokens of a prompt, and their share.
_MIN_TOKENS, _MIN_SHARE = 32, 0.2
#: Tokens per block, prompts per tenant, and tenants.
_BLOCK, _PROMPTS, _TENANTS = 16, 4, 16
MAX_PIECES = 2048
#: Words of up to eight characters, and what is between them.
_PIECE = re.compile(r"\s?\w{1,8}|\s?[^\w\s]|\s")


class PrefixGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts with a common prefix that diverge in the same block."""

    prompts: int
    block: int  # first diverging block, and its first token, from 0
    token: int
    text: str = ""  # the block's text in one prompt; "" for token ids
    # recurring share behind the block; None for chained block hashes
    recurring: float | None = None
    saved_tokens: float = 0.0  # hits per prompt if the block's text moved behind them


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """Shared prefixes of a trace's prompts."""

    prompts: int
    tokens: int
    shared: float  # share of tokens in blocks of an earlier prompt's prefix
    possible: float  # the same with recurring text moved to the front
    groups: tuple[PrefixGroup, ...]  # where that would help, greatest saving first


class _Trie:
    """Prompts by blocks: a node per prefix."""

    def __init__(self) -> None:
        self.children: list[dict[Hashable, int]] = [{}]
        self.members: list[list[int]] = [[]]
        self.depths = [0]

    def add(self, number: int, blocks: Sequence[Hashable]) -> int:
        """Add a prompt; return how many leading blocks were present."""
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
        """Return depth and prompts of nodes where many prompts diverge."""
        return [
            (depth, members)
            for depth, members, children in zip(
                self.depths, self.members, self.children, strict=True
            )
            if len(members) >= _MIN_PROMPTS
            and len(children) >= max(_MIN_PROMPTS, _BRANCHES * len(members))
        ]


def lint_prefixes(prompts: Sequence[Sequence[Hashable]], block_tokens: int = 16) -> PrefixReport:
    """Compare prompts by content: token ids or pieces of text, equal tokens being equal content."""
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
    # One group's saving is part of that of a group with longer prefixes.
    saved = max((group.saved_tokens * (group.prompts - 1) for group in groups), default=0.0)
    tokens = max(sum(map(len, prompts)), 1)
    return PrefixReport(
        prompts=len(prompts), tokens=sum(map(len, prompts)), shared=shared / tokens,
        possible=min(1.0, (shared + saved) / tokens), groups=tuple(groups[:_GROUPS]),
    )  # fmt: skip


def lint_blocks(prompts: Sequence[Sequence[Hashable]], block_tokens: int) -> PrefixReport:
    """Compare prompts by chained block hashes; recurrence behind a divergence stays unknown."""
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
    """Return the group of prompts that diverge at block `depth`; None if little recurs behind."""
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
    count = end = 0
    for at in range(len(tail) - _RUN + 1):
        if uses[hash(tail[at : at + _RUN])] > 1:
            count += at + _RUN - max(end, at)
            end = at + _RUN
    return count


class PrefixAdvisor:
    """Compares each prompt with the same tenant's last four; bounded memory."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, deque[Sequence[Hashable]]] = OrderedDict()

    def advise(self, tenant: str, pieces: Sequence[Hashable]) -> str:
        """Return one line of ASCII advice; keep the prompt's first 2,048 tokens."""
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
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))


def prompt_pieces(body: dict[str, Any], max_pieces: int = 2**22) -> Sequence[Hashable] | None:
    """Return a body's prompt as token ids or pieces of text; None for none."""
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
