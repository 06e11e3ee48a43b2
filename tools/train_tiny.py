"""Trains the bundled model, and evaluates it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src")]

import torch  # noqa: E402

from tiny import corpus, tokenizer  # noqa: E402
from tiny.model import Shape  # noqa: E402
from tiny.tasks import Tasks  # noqa: E402
from tiny.train import CURRICULUM, MIX, Trainer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mix-steps", type=int, default=10000)
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--fp32", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shared = Path(os.environ.get("PIGOU_SHARED", ROOT.parent / "shared"))
    shape = Shape()
    split = corpus.load(shared / "corpus")
    play = split.train.documents[0]
    words = tokenizer.train([play, *split.train.documents], shape.vocab_size)
    tokenizer.save(words, args.out, shape.max_position_embeddings)
    trainer = Trainer(shape, Tasks(words, split.train), args.out, seed=args.seed, rate=args.rate, half=not args.fp32)
    trainer.climb(CURRICULUM, args.limit)
    trainer.mix(MIX, args.mix_steps)


if __name__ == "__main__":
    main()
