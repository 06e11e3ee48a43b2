"""Hit ratio and seconds of prefill saved by each eviction policy, at sizes of a tier.

    python -m benchmarks.kv.tiers [--mooncake FILE] [--agents FOLDER] [--corpus FILE]
        [--policies NAME,...] [--two-tier] [--rounding] [--json FILE]

Traces: Mooncake's conversations, agent sessions (unpacked), and an archive of agents' texts, which
is cut into blocks of 16 tokens. A tier of 0.5,
2, 5 and 15% of the trace's footprint (its different blocks) is offered every block that is
computed, in the order of time, and asked for the leading blocks of each prompt. Columns for each
size: hit ratio of the blocks of all prompts, seconds of prefill saved (a roofline of Llama-3.1-8B
on an H200, less the time to read the blocks over a link of 50 GB/s), blocks written for each one
asked for. `belady` looks ahead: the bound of hits. A name in `--policies` may be followed by
parameters, as in "price margin=1,gdsf cost=seconds".

`--two-tier` puts a device tier, LRU, above a lower one, which is filled in five ways; `written` is
what goes to the lower one. `--rounding` tells what whole blocks cost
(`benchmarks.kv.tier_rounding`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from benchmarks.kv.tier_replay import MODES, Future, Outcome, one_tier, policy_of, two_tiers, worth
from benchmarks.kv.tier_rounding import conversations, in_blocks, rounding
from benchmarks.kv.tier_traces import Replay, agents, mooncake
from pigou.kv.offload import RecomputeCost
from pigou.kv.tier_eviction.policy import GROUP

SIZES = (0.005, 0.02, 0.05, 0.15)
#: Parts of the footprint: of the device, and of the tier below.
PAIRS = ((0.005, 0.02), (0.005, 0.05), (0.02, 0.05), (0.02, 0.15))
REFERENCES = ("price", "price at once", "belady")


def shown(outcome: Outcome, replay: Replay) -> str:
    hit = outcome.hits / replay.accesses
    written = outcome.written / replay.accesses
    return f"{hit:.4f} {outcome.saved_s:8.1f} {written:.3f}"


def table(
    heads: list[str], rows: dict[str, list[Outcome]], replay: Replay, first: str = "policy"
) -> None:
    """Print rows of cells `hit seconds written`, and the CPU seconds of a row."""
    width = max(map(len, (*rows, first))) + 1
    print(f"| {first:<{width}} | " + " | ".join(f"{head:^21}" for head in heads) + " | CPU s |")
    print("|---" * (len(heads) + 2) + "|")
    for name, outcomes in rows.items():
        cells = " | ".join(shown(each, replay) for each in outcomes)
        cpu = sum(each.cpu_s for each in outcomes)
        print(f"| {name:<{width}} | {cells} | {cpu:5.1f} |", flush=True)


def judge(rows: dict[str, list[Outcome]], heads: list[str], against: str) -> None:
    """Print what `price` saves beside the best of the others, and beside one of them."""
    others = [name for name in rows if name not in REFERENCES]
    if "price" not in rows or not others:
        return
    for place, head in enumerate(heads):
        mine = rows["price"][place].saved_s
        best = max(others, key=lambda name: rows[name][place].saved_s)
        line = f"{head}: price saves {mine / rows[best][place].saved_s - 1:+.1%} of {best}"
        if against in rows:
            line += f", {mine / rows[against][place].saved_s - 1:+.1%} of {against}"
        print(line)


def single(replay: Replay, gains: RecomputeCost, names: list[str]) -> dict[str, list[Outcome]]:
    future = Future(replay.events)
    caps = [max(1, int(replay.footprint * size)) for size in SIZES]
    rows: dict[str, list[Outcome]] = {}
    for name in names:
        kind, *given = name.split()
        params = dict(each.split("=") for each in given)
        rows[name] = [
            one_tier(replay, cap, policy_of(kind, cap, gains, future, **params), gains)
            for cap in caps
        ]
    heads = [f"{size:.1%} ({cap})" for size, cap in zip(SIZES, caps, strict=True)]
    table(heads, rows, replay)
    judge(rows, heads, "lru")
    return rows


def double(replay: Replay, gains: RecomputeCost) -> dict[str, list[Outcome]]:
    rows: dict[str, list[Outcome]] = {}
    for mode in MODES:
        rows[mode] = [
            two_tiers(replay, (int(replay.footprint * a), int(replay.footprint * b)), mode, gains)
            for a, b in PAIRS
        ]
    heads = [f"{above:.1%} + {below:.1%}" for above, below in PAIRS]
    table(heads, rows, replay, "lower tier")
    judge(rows, heads, "write-through")
    return rows


def replays(options: argparse.Namespace) -> Iterator[Replay]:
    if options.mooncake:
        yield mooncake(options.mooncake)
    if options.agents:
        yield agents(options.agents)
    if options.corpus:
        yield in_blocks(conversations(options.corpus), 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--agents", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--policies", default="")
    parser.add_argument("--two-tier", action="store_true")
    parser.add_argument("--rounding", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounding:
        rounding(options.corpus, options.agents)
        return
    names = [name for name in options.policies.split(",") if name]
    names = names or [*sorted(entry_points(group=GROUP).names), "gdsf cost=seconds", "belady"]
    found: dict[str, Any] = {}
    for replay in replays(options):
        gains = worth(replay.tokens)
        print(
            f"\n{replay.name}: {len(replay.events)} events, {replay.accesses} blocks of "
            f"{replay.tokens} tokens, {replay.footprint} different; a block takes "
            f"{gains.base * 1e3:.2f} ms and {gains.slope * 1e3:.3f} ms for each before it, "
            f"{gains.restore * 1e3:.2f} ms to read\n"
        )
        rows = double(replay, gains) if options.two_tier else single(replay, gains, names)
        found[replay.name] = {
            name: [
                {"hit": each.hits / replay.accesses, "saved_s": each.saved_s,
                 "written": each.written / replay.accesses, "cpu_s": each.cpu_s}
                for each in outcomes
            ]
            for name, outcomes in rows.items()
        }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
