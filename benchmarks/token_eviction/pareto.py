#!/usr/bin/env python3
"""Memory of the KV cache against accuracy: formats of numbers times token eviction.

    python -m benchmarks.token_eviction.pareto [--rows 4] [--items 2]

The bundled model (float32) reads unseen text and recall items, streamed 16 tokens at a time. Bytes
are the peak of a row's blocks, side data of the policy included; * is on the frontier: nothing
printed has fewer bytes and at least its recall and perplexity.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.lib.shared_folder import shared_folder
from benchmarks.token_eviction.budget import budget
from benchmarks.token_eviction.data import recall_rows, text_rows, unseen
from benchmarks.token_eviction.pigou_side import PigouSide
from benchmarks.token_eviction.reference import prepare
from benchmarks.token_eviction.task import Task
from pigou.models import bundled_path

FORMATS = ("fp32", "bf16", "int8_per_token_head", "fp8_e4m3")
#: Policy, and the share of entries that it may keep.
POLICIES = (("full", 1.0), ("pigou", 0.5), ("pigou", 0.25))
CHUNK, CONTEXT, LENGTH = 16, 768, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=4, help="of text")
    parser.add_argument("--items", type=int, default=2, help="of each pairs and distance")
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts, model = unseen(shared_folder() / "corpus"), str(bundled_path())
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    first = LENGTH * 3 // 4
    text = Task("text", model, LENGTH, 0, CHUNK, first, CHUNK)
    recall = Task("recall", model, CONTEXT + 3, 0, CHUNK, CONTEXT + 1, 1)
    items = recall_rows(
        tokenizer, texts[0], pairs=(1, 8), distances=(64, 256, 512), count=args.items,
        context=CONTEXT,
    )  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory(prefix="pareto-") as name:
        told = text_rows(tokenizer, texts, args.rows, LENGTH)
        tasks = [
            prepare(text, told, Path(name) / "t"),
            prepare(recall, items.tokens, Path(name) / "r"),
        ]
        for kv_dtype in FORMATS:
            side = PigouSide(sinks=4, recent=32, rows=16, kv_dtype=kv_dtype)
            for policy, share in POLICIES:
                read, asked = (side.run(task, policy, budget(task.task, share)) for task in tasks)
                size = (read.peak_bytes + read.side_bytes) / 2**10
                rows.append((kv_dtype, policy, share, size, float(np.exp(read.nll.mean())),
                             float(read.kl.mean()), float(asked.right[:, -1].mean())))  # fmt: skip
    full = rows[0][3]
    print("| format | policy | entries | KiB a row | saved | perplexity | KL, nats | recall | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        kv_dtype, policy, share, size, perplexity, divergence, right = row
        better = any(
            other[3] < size and other[4] <= perplexity and other[6] >= right for other in rows
        )
        print(
            f"| {kv_dtype} | {policy} | {share:.0%} | {size:.0f} | {1 - size / full:.0%} | "
            f"{perplexity:.2f} | {divergence:.4f} | {right:.3f} | {'' if better else '*'} |"
        )


if __name__ == "__main__":
    main()
