"""How fast requests are routed, beside Dynamo's Python bindings.

64 workers hold 200,192 different blocks of 16 tokens (1,015,808 block-worker pairs). Both sides
have the same sequences and take turns, each in its own process, Dynamo's selection service in
another than its tree. Dynamo: `compute_block_hash_for_seq`, `RadixTree.apply_event` and
`find_matches`, and
`SelectionService.select`, filled over its event sockets. Pigou: `chain`, `PrefixIndex.apply` and
`overlaps`, and `ControlPlane.submit` from an array of token ids (which also books the request and
explains the choice; its end is not timed).

    PIGOU_PEER_DYNAMO=DIR python -m benchmarks.routing.throughput
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from statistics import median

from benchmarks.lib.servers import machine
from benchmarks.routing.throughput_data import BLOCK_SIZE, LONG, SHORT, workload
from benchmarks.routing.throughput_pigou import Call, Side, timed

ROOT = Path(__file__).resolve().parents[2]
#: Calls of a turn on short prompts. The first tenth, which does not count, has all 64 of them.
CALLS = 800


@dataclass
class Line:
    """One figure: what Pigou does, what Dynamo does, and the target of their ratio."""

    name: str
    blocks: int
    count: int
    ours: Callable[[Side], Call]
    theirs: str | None
    target: float | None = None
    settles: bool = False
    seconds: list[list[float]] = field(default_factory=list)
    peer: list[list[float]] = field(default_factory=list)


def lines() -> list[Line]:
    """All figures."""
    found = []
    for size, count in ((SHORT, CALLS), (LONG, 44)):
        found += [
            Line(f"hash {size} blocks, array / list", size, count, methodcaller("hash", size),
                 "hash", 5.0),
            Line(f"hash {size} blocks, list / list", size, count,
                 methodcaller("hash_list", size), "hash"),
            Line(f"hash {size} blocks, array / array", size, count, methodcaller("hash", size),
                 "hash-array"),
            Line(f"look up {size} blocks, held", size, count, methodcaller("lookup", size),
                 "lookup", 4.0),
            Line(f"look up {size} blocks, not held", size, count, methodcaller("miss", size),
                 "miss", 4.0),
            Line(f"decide, {size} blocks", size, count, methodcaller("decide", size),
                 "decide", 4.0, settles=True),
        ]  # fmt: skip
    for name, kind, size, target in (
        ("core event, hashes given", "core", SHORT, 4.0),
        ("wire event, tokens hashed, arrays", "arrays", SHORT, None),
        ("wire event, tokens hashed, tuples", "lists", SHORT, None),
        ("core event of 1 block", "one", 1, None),
    ):
        found.append(
            Line(f"store + remove {size}: {name}", size, CALLS, methodcaller("ingest", kind),
                 "ingest", target)
        )  # fmt: skip
    found.append(
        Line("decode MessagePack of 128 blocks", SHORT, CALLS, methodcaller("decode", SHORT), None)
    )
    return found


class Peer:
    """A process of Dynamo's side, in its own Python; `kind` is tree or service."""

    def __init__(self, home: Path, kind: str) -> None:
        self._process = subprocess.Popen(
            [str(home / "bin" / "python"), "-m", "benchmarks.routing.throughput_dynamo", kind],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._read()

    def run(self, name: str, blocks: int, count: int) -> list[float]:
        """Seconds of each of `count` calls."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {blocks} {count}\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> list[float]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise SystemExit(f"the peer ended with status {self._process.wait()}")
        found: list[float] = json.loads(text)
        return found


def typical(rounds: Sequence[Sequence[float]]) -> float:
    """The median of the best round, in microseconds."""
    return 1e6 * min(median(seconds) for seconds in rounds)


def late(rounds: Sequence[Sequence[float]]) -> float:
    """The 99th percentile over all rounds, in microseconds."""
    ordered = sorted(each for seconds in rounds for each in seconds)
    return 1e6 * ordered[99 * len(ordered) // 100]


def measure(side: Side, peers: dict[str, Peer], rounds: int) -> list[Line]:
    """Take turns, `rounds` times; the first calls of a turn wake the caches and do not count.

    What several lines compare with is measured once a round.
    """
    found = lines()
    for _ in range(rounds):
        told: dict[tuple[str, int], list[float]] = {}
        for line in found:
            after = side.settle if line.settles else None
            line.seconds.append(timed(line.ours(side), line.count, after)[line.count // 10 :])
            if peers and line.theirs is not None:
                peer = peers["service" if line.theirs == "decide" else "tree"]
                name = (line.theirs, line.blocks)
                if name not in told:
                    told[name] = peer.run(*name, line.count)[line.count // 10 :]
                line.peer.append(told[name])
    return found


def show(found: Sequence[Line]) -> None:
    print(f"{'':50} {'Pigou us':>10} {'p99':>8} {'Dynamo us':>10} {'p99':>8} {'ratio':>7} target")
    for line in found:
        ours = typical(line.seconds)
        text = f"{line.name:50} {ours:10.1f} {late(line.seconds):8.1f}"
        if line.peer:
            theirs = typical(line.peer)
            target = "" if line.target is None else f">= {line.target:g}"
            text += f" {theirs:10.1f} {late(line.peer):8.1f} {theirs / ours:7.2f} {target}"
        print(text)


def home() -> Path | None:
    named = os.environ.get("PIGOU_PEER_DYNAMO")
    if named is None:
        print("PIGOU_PEER_DYNAMO names no venv with Dynamo: Pigou alone", file=sys.stderr)
        return None
    return Path(named).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--policy", default="toll", help="routing policy of the decisions")
    options = parser.parse_args()
    folder = home()
    kinds = () if folder is None else ("tree", "service")
    peers: dict[str, Peer] = {}
    try:
        peers.update((kind, Peer(folder, kind)) for kind in kinds if folder is not None)
        side = Side(workload(), options.policy)
        for each in lines():  # compile, and load what is cold
            timed(each.ours(side), 20, side.settle if each.settles else None)
        found = measure(side, peers, options.rounds)
    finally:
        for peer in peers.values():
            peer.stop()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(
        f"policy {options.policy}, blocks of {BLOCK_SIZE} tokens, "
        f"index {side.index.nbytes >> 20} MiB; median of the best round, p99 over all rounds"
    )
    show(found)


if __name__ == "__main__":
    main()
