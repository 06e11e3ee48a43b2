"""Seconds that `transformers.generate` takes in static batches of 32; run by
`benchmarks.worker.throughput`.

python -m benchmarks.worker.static_batches MODEL THREADS JOBS PROMPT VOCAB SEED DTYPE
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.lib.closed_loop import Job, make_jobs

BATCH = 32


def main() -> None:
    model_path, dtype = sys.argv[1], getattr(torch, sys.argv[7])
    threads, count, prompt, vocab, seed = map(int, sys.argv[2:7])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    model.eval()
    jobs = make_jobs(count, prompt=prompt, output=(8, 256), vocab=vocab, seed=seed)
    generate(model, jobs[:2], longest=8)
    began = time.perf_counter()
    for start in range(0, len(jobs), BATCH):
        batch = jobs[start : start + BATCH]
        generate(model, batch, longest=max(job.output for job in batch))
    print(time.perf_counter() - began)


def generate(model: torch.nn.Module, jobs: list[Job], longest: int) -> None:
    """One static batch, until its longest output is done."""
    ids = torch.tensor([job.prompt for job in jobs])
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            min_new_tokens=longest, max_new_tokens=longest, pad_token_id=0,
        )  # fmt: skip


if __name__ == "__main__":
    main()
