"""What whole blocks cost in hits: a tree of tokens beside a chain of block hashes.

Prompts of real conversations, as token ids of the bundled tokenizer, are replayed with blocks of 1
token (what a token-granular radix tree finds), 16, 64 and 256: without a limit, and with a tier of
5% of the footprint, LRU. Prompts are recorded whole; an answer is cached behind its prompt. Traces
have no tokens; there, blocks of 1, 2, 4 and 8 times the recorded size are compared.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kv.tier_replay import one_tier
from benchmarks.kv.tier_traces import Chains, Event, Replay, agents
from pigou.kv.offload import RecomputeCost
from pigou.kv.tier_eviction.policy import TierSetting, load
from pigou.models import bundled_path
from pigou.text.tokenizer import Tokenizer
from pigou.workload.packed import unpacked

SIZES = (1, 16, 64, 256)
GROUPS = (1, 2, 4, 8)
#: Sessions of the trace to replay: with blocks of 64 tokens they are many.
SESSIONS = 40


def conversations(path: Path) -> list[tuple[int, list[int], int]]:
    """(time, tokens of prompt and answer, tokens of the prompt) of each turn, by time."""
    backend = Tokenizer.load(bundled_path()).backend
    rows = []
    for lines in _files(path):
        for line in lines:
            turn = json.loads(line)
            prompt = backend.encode(turn["input"], add_special_tokens=False).ids
            answer = backend.encode(turn["output"] or "", add_special_tokens=False).ids
            rows.append((int(turn["timestamp"]) * 1000, prompt + answer, len(prompt)))
    return sorted(rows, key=lambda row: row[0])


def _files(path: Path) -> Iterator[list[bytes]]:
    with tarfile.open(fileobj=io.BytesIO(unpacked(path).read())) as archive:
        for member in sorted(archive.getmembers(), key=lambda each: each.name):
            if member.name.endswith(".jsonl"):
                file = archive.extractfile(member)
                assert file is not None
                yield file.read().splitlines()


def in_blocks(rows: list[tuple[int, list[int], int]], size: int) -> Replay:
    """The turns with full blocks of `size` tokens, prompts first, answers right after."""
    chains = Chains()
    events = []
    for number, (at, tokens, prompt) in enumerate(rows):
        groups = [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]
        chain = chains.of(groups)
        events.append(Event(at + 2 * number, True, chain[: prompt // size]))
        events.append(Event(at + 2 * number + 1, False, chain))
    accesses = sum(len(each.blocks) for each in events if each.asks)
    return Replay(f"conversations ({size})", size, events, len(chains), accesses)


def rounding(corpus: Path | None, sessions: Path | None) -> None:
    """Print the tables of what is given."""
    if corpus is not None:
        of_tokens(conversations(corpus))
    if sessions is not None:
        of_blocks(sessions)


def of_tokens(rows: list[tuple[int, list[int], int]]) -> None:
    """Blocks of some tokens, on prompts whose tokens are known."""
    total = sum(prompt for _, _, prompt in rows)
    print(f"\n{len(rows)} turns, {total} tokens of prompts\n")
    print("| tokens in a block | hits without a limit | hits with 5%, LRU |\n|---|---|---|")
    for size in SIZES:
        print_row(in_blocks(rows, size), size, total)


def of_blocks(sessions: Path) -> None:
    """Blocks of some recorded blocks."""
    print(f"\nagent sessions, {SESSIONS} of them, in blocks of the recorded ones\n")
    print("| tokens in a block | hits without a limit | hits with 5%, LRU |\n|---|---|---|")
    whole = 0
    for group in GROUPS:
        replay = agents(sessions, group, SESSIONS)
        whole = whole or replay.accesses * replay.tokens
        print_row(replay, replay.tokens, whole)


def print_row(replay: Replay, size: int, total: int) -> None:
    cells = []
    for cap in (replay.footprint, replay.footprint // 20):
        outcome = one_tier(replay, cap, load("lru", TierSetting(cap)), RecomputeCost())
        cells.append(f"{outcome.hits * size / total:.4f}")
    print(f"| {size} | " + " | ".join(cells) + " |", flush=True)
