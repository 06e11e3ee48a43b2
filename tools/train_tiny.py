"""Trains, packs and evaluates the bundled model.

    python tools/train_tiny.py train --out DIR         about an hour on two CPU cores, less on a GPU
    python tools/train_tiny.py pack --out DIR          writes the trained weights as a Hugging
    Face folder into DIR
    python tools/train_tiny.py evaluate --model DIR    perplexity, recall, samples; the bundled
    model by default

The corpus is read from $PIGOU_SHARED/corpus (default: ../shared beside the checkout).
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from benchmarks.lib.shared_folder import shared_folder  # noqa: E402
from tiny import corpus, evaluate, export, json_replies, tokenizer  # noqa: E402
from tiny.model import Shape, Tiny  # noqa: E402
from tiny.tasks import Tasks  # noqa: E402
from tiny.train import CURRICULUM, MIX, POLISH, Trainer  # noqa: E402

BUNDLED = ROOT / "src" / "pigou" / "models" / "tiny"


def read_corpus() -> corpus.Split:
    """The corpus of $PIGOU_SHARED. `SystemExit` with the remedy if it is not there."""
    folder = shared_folder() / "corpus"
    if not folder.is_dir():
        raise SystemExit(
            f"no corpus in {folder}; set PIGOU_SHARED to the folder that holds corpus/"
        )
    return corpus.load(folder)


def train(args: argparse.Namespace) -> None:
    """Trains tokenizer and model; checkpoints, tokenizer and log go to `--out`."""
    split, shape = read_corpus(), Shape()
    play = split.train.documents[0]
    if args.only == "json":
        words = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    else:
        words = tokenizer.train([play, *split.train.documents], shape.vocab_size)
    tokenizer.save(words, args.out, shape.max_position_embeddings)
    half = not args.fp32
    tasks = Tasks(words, split.train)
    trainer = Trainer(shape, tasks, args.out, seed=args.seed, rate=args.rate, half=half)

    def probe(model: Tiny) -> dict[str, float]:
        figures = {"perplexity": evaluate.perplexity(model, words, split.play)[0]}
        for pairs in evaluate.PAIRS:
            share = evaluate.recall(model, words, split.play, pairs, count=20, seed=1)
            figures[f"recall_{pairs}"] = share
        return figures

    if args.only == "json":
        trainer.model.load_state_dict(export.load(BUNDLED).state_dict())
    elif args.only == "polish":
        trainer.resume("mix")
    else:
        trainer.climb(CURRICULUM, args.limit)
        trainer.mix(MIX, args.steps, probe)
    if args.only != "json":
        trainer.polish(POLISH, args.polish, probe)
    replies = json_replies.JsonReplies(tasks, words.decode, words.encode)
    teacher = copy.deepcopy(trainer.model)
    json_replies.train(
        trainer, replies, MIX, steps=args.json, rate=args.rate * 0.5, teacher=teacher
    )
    trainer.model.eval()
    trainer.note("probe", **probe(trainer.model))
    pack(args)


def pack(args: argparse.Namespace) -> None:
    """Writes config, generation config and bfloat16 weights of a checkpoint into `--out`."""
    words = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    state = torch.load(args.out / f"{args.checkpoint}.pt", map_location="cpu", weights_only=True)
    bos, eos = (tokenizer.special(words, token) for token in (tokenizer.BOS, tokenizer.EOS))
    export.save(state, Shape(), args.out, bos, eos)


def judge(args: argparse.Namespace) -> None:
    """Prints what the model of `--model` can do, in float32."""
    for line in evaluate.report(export.load(args.model), args.model, read_corpus(), args.count):
        print(line, flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads; one is best where cores are shared"
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("train")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    command.add_argument(
        "--steps", type=int, default=5000, help="steps of the mix, after the curriculum"
    )
    command.add_argument(
        "--limit", type=int, default=4000, help="most steps spent on one level of the curriculum"
    )
    command.add_argument(
        "--fp32", action="store_true", help="no bfloat16 autocast; about half the speed on AMX"
    )
    command.add_argument("--polish", type=int, default=200, help="steps of the polish")
    command.add_argument("--json", type=int, default=200, help="steps of the replies in JSON")
    command.add_argument(
        "--only", choices=("polish", "json"),
        help="begin at this stage: from the mix in --out, or from the bundled model",
    )  # fmt: skip
    command.set_defaults(run=train, checkpoint="json")
    command = commands.add_parser("pack")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--checkpoint", default="json", help="climb, mix, polish or json")
    command.set_defaults(run=pack)
    command = commands.add_parser("evaluate")
    command.add_argument("--model", type=Path, default=BUNDLED)
    command.add_argument("--count", type=int, default=500, help="recall items a row")
    command.set_defaults(run=judge)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == "__main__":
    main()
