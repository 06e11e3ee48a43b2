"""Token eviction beside kvpress: loss, divergence, recall and attention kept, at equal bytes.

    PIGOU_PEER_KVPRESS=DIR python -m benchmarks.token_eviction.quality [--quick] [--json FILE]
    [--out FOLDER]

Both sides read the same tokens with the same float32 weights, in turns. Tasks:
- *text, streamed*: unseen text arrives 16 tokens at a time, entries being given up in between, so
  that attention never works on more than the budget; the last quarter of each row is measured.
- *text, cut*: a prompt is computed whole and cut once; 256 tokens follow.
- *recall, cut*, *recall, streamed*: pairs are told in a context; their key is asked for after the
  context was cut, the position going on as if nothing were gone.
A random-weight model reads the texts too: there the loss says nothing, divergence and attention do.
`pigou` has the generic predictor there, and in a row of its own one that is trained for the model.

Bytes are those of the tensors that attention worked on: of kvpress the storage of its cache, of
Pigou the blocks that the allocator had handed out. With `--out`, outcomes are kept in a folder, and
what lies there is not computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.lib.servers import machine
from benchmarks.lib.shared_folder import shared_folder
from benchmarks.token_eviction.budget import Budget, budget
from benchmarks.token_eviction.data import recall_rows, text_rows, unseen
from benchmarks.token_eviction.kvpress_peer import KvpressPeer, PressFailed
from benchmarks.token_eviction.pigou_side import PigouSide
from benchmarks.token_eviction.reference import prepare
from benchmarks.token_eviction.table import KVPRESS, PIGOU, Cell, document, lines, verdict
from benchmarks.token_eviction.task import Outcome, Prepared, Task
from benchmarks.token_eviction.training import Training
from pigou.config import ConfigError
from pigou.models import bundled_path
from tools.make_random_checkpoint import Shape, write_checkpoint

#: Tokens of a block; tokens after a prompt that was cut.
CHUNK, FOLLOWING = 16, 256
#: Training data of the random weights' predictor, steps of its optimizer, and the weight of an
#: entry's value at cuts: above the default, as no task asks there for text of long ago.
SEQUENCES, STEPS, CUT = 40, 1500, 0.5
Labels = dict[str, NDArray[np.int64]]
Run = Callable[[], Outcome]


def text_tasks(
    model: Path, name: str, texts: tuple[str, str], count: int, args: argparse.Namespace
) -> Iterator[tuple[Task, NDArray[np.int64], Labels]]:
    """Yield the tasks on text, with their tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    length = args.length
    rows = text_rows(tokenizer, texts, count, length, args.shift)
    begin = length * 3 // 4
    yield Task(f"{name}: text, streamed", str(model), length, 0, CHUNK, begin, CHUNK), rows, {}
    short = begin + FOLLOWING
    cut = Task(f"{name}: text, cut", str(model), short, begin, CHUNK, begin, CHUNK)
    yield cut, rows[:, :short], {}


def recall_tasks(
    model: Path, texts: tuple[str, str], args: argparse.Namespace
) -> Iterator[tuple[Task, NDArray[np.int64], Labels]]:
    """Yield the tasks of recall, with their tokens and what their rows are."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    at = args.context + 1  # position of the key, behind its mark
    for kind, whole, count in (("cut", args.context, args.items), ("streamed", 0, args.streamed)):
        found = recall_rows(
            tokenizer, texts[0], pairs=args.pairs, distances=args.distances, count=count,
            context=args.context,
        )  # fmt: skip
        task = Task(f"recall, {kind}", str(model), at + 2, whole, CHUNK, at, 1)
        yield task, found.tokens, {"pairs": found.pairs, "distance": found.distance}


def runs(
    prepared: Prepared, most: Budget, peer: KvpressPeer | None, ours: PigouSide | None,
    only: set[str],
) -> Iterator[tuple[str, Run]]:  # fmt: skip
    """Yield all methods, the two sides' in turns."""

    def press(name: str) -> tuple[str, Run]:
        assert peer is not None
        return KVPRESS + name, lambda: peer.run(prepared, name, most.most)

    def policy(name: str) -> tuple[str, Run]:
        assert ours is not None
        return PIGOU + name, lambda: ours.run(prepared, name, most)

    theirs = [press(name) for name in peer.names(prepared)] if peer else []
    own = [policy(name) for name in ours.names(prepared)] if ours else []
    for pair in zip_longest(theirs, own):
        yield from (each for each in pair if each and (not only or each[0] in only))


def cell(
    prepared: Prepared, labels: Labels, most: Budget, methods: Iterator[tuple[str, Run]]
) -> Cell:
    """Let all methods read a task, but those whose outcome lies there."""
    outcomes: dict[str, Outcome] = {}
    for name, run in methods:
        path = prepared.folder / f"{most.most} {name.replace('/', 'every ')}.npz"
        try:
            if not path.exists():
                run().write(path)
            outcomes[name] = Outcome.read(path)
        except (PressFailed, ConfigError) as error:
            print(f"{name} cannot: {error}", file=sys.stderr)
    after = prepared.task.length - prepared.task.whole if prepared.task.whole else 0
    after = -(-after // CHUNK) * CHUNK  # the allocator's granularity
    shape = prepared.mass.shape
    config = json.loads((Path(prepared.task.model) / "config.json").read_text("utf-8"))
    entry = 2 * shape[2] * shape[3] * config["head_dim"] * 4
    return Cell(prepared.task.name, most, (most.most + after) * entry, outcomes, labels)


def sized(value: str) -> tuple[int, ...]:
    return tuple(int(each) for each in value.split(","))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    shared = shared_folder()
    parser.add_argument("--corpus", type=Path, default=shared / "corpus")
    parser.add_argument("--shares", default="0.75,0.5,0.25,0.125", help="of the full cache")
    parser.add_argument("--rows", type=int, default=8, help="of text")
    parser.add_argument(
        "--shift", type=float, default=0.0, help="of the way to the next row, where each begins"
    )
    parser.add_argument("--few", type=int, default=2, help="rows that random weights read")
    parser.add_argument("--length", type=int, default=1536, help="tokens of a row of text")
    parser.add_argument(
        "--sequences", type=int, default=SEQUENCES, help="that random weights' predictor learns of"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens before a question")
    parser.add_argument("--pairs", type=sized, default=(1, 8, 32))
    parser.add_argument("--distances", type=sized, default=(64, 256, 512))
    parser.add_argument("--items", type=int, default=4, help="of each pairs and distance, cut")
    parser.add_argument("--streamed", type=int, default=2, help="the same, streamed")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--recent", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=16, help="rows computed together")
    parser.add_argument("--side", choices=["both", "kvpress", "pigou"], default="both")
    parser.add_argument("--only", default="", help="methods by name, with commas between")
    parser.add_argument("--tasks", default="", help="only tasks whose names contain this")
    parser.add_argument("--quick", action="store_true", help="few, short rows at 50 and 25%%")
    parser.add_argument("--json", type=Path, help="where the figures go, by row")
    parser.add_argument("--out", type=Path, help="folder that outcomes are kept in")
    args = parser.parse_args()
    if args.quick:
        args.shares, args.rows, args.few, args.length = "0.5,0.25", 4, 2, 1024
        args.context, args.items, args.streamed, args.sequences = 768, 2, 1, 8
        args.pairs, args.distances = (1, 8), (64, 512)
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="eviction-") as name:
        print(" ".join(f"{key} {value};" for key, value in machine().items()))
        folder = args.out or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        same(args, folder)
        cells = judge(args, folder)
    if args.json:
        found = {"machine": machine(), "cells": [document(each) for each in cells]}
        args.json.write_text(json.dumps(found), encoding="utf-8")


#: Options that the outcomes of a folder depend on.
SIZES = ("rows", "shift", "length", "context", "pairs", "distances", "items", "streamed", "few",
         "sinks", "recent", "at_once", "sequences")  # fmt: skip


def same(args: argparse.Namespace, folder: Path) -> None:
    """Refuse a folder whose outcomes are of other sizes."""
    sizes = json.dumps({name: getattr(args, name) for name in SIZES})
    path = folder / "sizes.json"
    if path.exists() and path.read_text("utf-8") != sizes:
        sys.exit(f"{folder} holds outcomes of {path.read_text('utf-8')}; give another folder")
    path.write_text(sizes, "utf-8")


def judge(args: argparse.Namespace, folder: Path) -> list[Cell]:
    """Do all tasks at all budgets, printing each table as it is done."""
    texts = unseen(args.corpus)
    random_model = folder / "random"
    if not random_model.exists():
        write_checkpoint(random_model, Shape(), dtype="float32")
    tasks = [
        *text_tasks(bundled_path(), "bundled", texts, args.rows, args),
        *recall_tasks(bundled_path(), texts, args),
        *text_tasks(random_model, "random weights", texts, args.few, args),
    ]
    both = {"sinks": args.sinks, "recent": args.recent, "rows": args.at_once}
    peer = KvpressPeer(folder, **both) if args.side != "pigou" else None
    training = Training(args.corpus, args.sequences, STEPS, CUT)
    ours = PigouSide(**both, training=training) if args.side != "kvpress" else None
    only = set(args.only.split(",")) - {""}
    cells = []
    try:
        for number, (task, tokens, labels) in enumerate(tasks):
            if args.tasks not in task.name:
                continue
            home = folder / f"task-{number}"
            prepared = Prepared.read(home) if home.exists() else prepare(task, tokens, home)
            for share in args.shares.split(","):
                most = budget(task, float(share))
                cells.append(cell(prepared, labels, most, runs(prepared, most, peer, ours, only)))
                print("\n".join([*lines(cells[-1]), *verdict(cells[-1])]), flush=True)
    finally:
        if peer is not None:
            peer.close()
    return cells


if __name__ == "__main__":
    main()
