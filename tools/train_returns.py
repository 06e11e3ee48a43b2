"""Trains and judges what predicts the worth of cache entries (docs/internals/token-eviction.md).

    python tools/train_returns.py train --model DIR [--out DIR]   minutes on one thread
    python tools/train_returns.py judge --model DIR               recall and perplexity by policy
    python tools/train_returns.py calibrate --model DIR           coverage on unseen text
    python tools/train_returns.py generic                         what is taken for other models

A model is a Hugging Face folder, the bundled one by default. Its weights are written beside it,
where the policies look for them. The corpus is read from $PIGOU_SHARED/corpus (default: ../shared
beside the checkout), if `--corpus` names no other folder.
"""

# ruff: noqa: E402  (the environment is set before torch is imported)
from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src"), str(ROOT)]

import torch
from tokenizers import Tokenizer

from benchmarks.lib.shared_folder import shared_folder
from pigou.models import bundled_path
from pigou.runtime.token_eviction.predictor import (
    GENERIC,
    PAPER,
    RETURNS,
    PaperModel,
    ReturnModel,
)
from returns.bench import Bench
from returns.blend import Blend
from returns.collect import Collected, collect
from returns.coverage import coverage
from returns.examples import EACH, Collector
from returns.fit import Fit
from returns.generic import fit_generic, random_models
from returns.paper import fit_paper
from returns.probe import open_model
from returns.sequences import Sequences
from tiny import corpus

HORIZON, CUT, STEPS = 256.0, 0.25, {"train": 8000, "generic": 2000}
RECEIVED = 0.15  # weight of attention received
GENERIC_RECEIVED = 0.25  # the same, where no key and value is looked at
EARLY = 4  # the policy that makes the cuts is trained on every fourth sequence alone


def read_corpus(folder: Path) -> corpus.Split:
    """The corpus of a folder. `SystemExit` with the remedy if it is not there."""
    if not folder.is_dir():
        raise SystemExit(
            f"no corpus in {folder}; give --corpus, or set PIGOU_SHARED to what holds corpus/"
        )
    return corpus.load(folder)


def gather(
    args: argparse.Namespace, model: Path, part: corpus.Corpus, seed: int, count: int,
    policy: ReturnModel | None = None,
) -> Collected:  # fmt: skip
    """Runs a model over sequences of one part of the corpus, cut by a policy if there is one."""
    sequences = Sequences(Tokenizer.from_file(str(model / "tokenizer.json")), part)
    collector = Collector(open_model(model), args.horizon, policy)
    blend = Blend(args.received, args.cut, args.layers) if policy else None
    return collect(collector, sequences, count, args.length, seed=seed, blend=blend)


def early(args: argparse.Namespace, model: Path, part: corpus.Corpus) -> ReturnModel | None:
    """Trains the policy that cuts are made by: of what entries change alone."""
    if not args.cut and not args.received:
        return None
    data = gather(args, model, part, args.seed + 2, max(args.sequences // EARLY, 1))
    fit = Fit(data.examples, args.seed)
    fit.run(args.steps // EARLY)
    return fit.model()


def train(args: argparse.Namespace) -> None:
    """Trains both predictors, of the training part alone."""
    part = read_corpus(args.corpus).train
    data = gather(args, args.model, part, args.seed, args.sequences, early(args, args.model, part))
    fit = Fit(data.examples, args.seed)
    loss = fit.run(args.steps)
    fit.calibrate()
    args.out.mkdir(parents=True, exist_ok=True)
    fit.model().save(args.out / RETURNS)
    print(f"{data.examples.target.numel():,} examples, loss {loss:.3f}: {args.out / RETURNS}")
    fit_paper(data.births, args.steps // 4, seed=args.seed).save(args.out / PAPER)
    print(f"{len(data.births.target):,} births: {args.out / PAPER}")


def calibrate(args: argparse.Namespace) -> None:
    """Prints how often the truth is within k sigma, on held-out sequences."""
    model, paper = ReturnModel.load(args.out / RETURNS), PaperModel.load(args.out / PAPER)
    part, policy = read_corpus(args.corpus).held_out, model if args.cut or args.received else None
    data = gather(args, args.model, part, args.seed + 1, args.sequences, policy)
    for line in coverage(data, model, paper):
        print(line, flush=True)


def generic(args: argparse.Namespace) -> None:
    """Trains the predictor for models that have none, of several models."""
    part, data = read_corpus(args.corpus).train, []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models or (bundled_path(), *random_models(Path(folder))):
            policy = early(args, model, part)
            found = gather(args, model, part, args.seed, args.sequences, policy)
            data.append(found.examples)
            print(f"{found.examples.target.numel():,} examples of {model}", flush=True)
    fit_generic(data, EACH, args.steps, seed=args.seed).save(args.out)


def judge(args: argparse.Namespace) -> None:
    """Prints recall and perplexity by policy and share of the entries kept."""
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    texts = read_corpus(args.corpus)
    bench = Bench(open_model(args.model), tokenizer, texts, args.out, args.orders)
    bench.shares = args.shares
    bench.restrict(args.only)
    print(f"{'':24s}" + "".join(f"{share:>14.1%}" for share in args.shares))
    for pairs in args.pairs:
        for line in bench.recall(pairs, args.distance, args.count):
            print(line, flush=True)
    for line in bench.perplexity(args.windows):
        print(line, flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    shared = shared_folder()
    for run, count in ((train, 480), (calibrate, 8), (generic, 8), (judge, 0)):
        received = GENERIC_RECEIVED if run is generic else RECEIVED
        command = commands.add_parser(run.__name__)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--corpus", type=Path, default=shared / "corpus", help="folder")
        if count:
            command.add_argument("--sequences", type=int, default=count)
            command.add_argument("--length", type=int, default=1536, help="tokens of a sequence")
            command.add_argument("--horizon", type=float, default=HORIZON, help="tokens")
            help = "weight of the return at a cut in the target"
            command.add_argument("--cut", type=float, default=CUT, help=help)
            help = "share of the layers, from the first on, where it has that weight; 0 in others"
            command.add_argument("--layers", type=float, default=1.0, help=help)
            help = "weight of attention received; this and --cut 0: of what entries change alone"
            command.add_argument("--received", type=float, default=received, help=help)
        if run is generic:
            command.add_argument("--models", type=Path, nargs="+", help="bundled, random")
            command.add_argument("--out", type=Path, default=GENERIC, help="file")
        else:
            command.add_argument("--model", type=Path, default=bundled_path())
            command.add_argument("--out", type=Path, help="folder of the weights; the model's own")
        if run in (train, generic):
            command.add_argument("--steps", type=int, default=STEPS[run.__name__])
        command.set_defaults(run=run)
    judged = commands.choices["judge"]
    judged.add_argument("--shares", type=float, nargs="+", default=[0.75, 0.5, 0.25, 0.125])
    judged.add_argument("--pairs", type=int, nargs="*", default=[1, 8, 32])
    judged.add_argument("--distance", type=int, default=1000, help="tokens before the question")
    judged.add_argument("--count", type=int, default=50, help="questions a row")
    judged.add_argument("--windows", type=int, default=16, help="of 1,024 tokens; 0 for none")
    judged.add_argument("--orders", type=float, nargs="*", default=[2.0])
    judged.add_argument(
        "--only", nargs="*", default=[], help="policies, by the start of their name"
    )
    args = parser.parse_args()
    args.out = args.out or args.model
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    args.run(args)


if __name__ == "__main__":
    main()
