#!/usr/bin/env python3
"""Decoded tokens per second of int8 weights beside bfloat16's, on random weights.

    python -m benchmarks.runtime.quantisation [--batch 1 8 32] [--steps 12] [--rounds 4]

Both models have the shape of Qwen2.5-0.5B and take steps in turns; a ratio is that of the medians
of their steps' CPU seconds on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from pigou.runtime.resources import prepare_environment

if TYPE_CHECKING:
    from pigou.runtime.local_engine import LocalEngine

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    prepare_environment(1)
    import torch

    from pigou.config import EngineConfig
    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.resources import set_threads
    from pigou_lab.gpu_check.random_model import random_model

    set_threads(1)
    shape = SHAPE | {"num_hidden_layers": options.layers}
    config = EngineConfig(
        blocks=8 * max(options.batch), max_seqs=max(options.batch), max_model_len=128,
        prefix_caching=False,
    )  # fmt: skip
    engines = {
        name: LocalEngine(random_model(shape, "cpu", torch.bfloat16, quantization=name), config)
        for name in ("auto", "int8")
    }
    print(f"{'batch':>5} {'bf16 tok/s':>11} {'int8 tok/s':>11} {'ratio':>6} {'of rounds':>14}")
    for batch in options.batch:
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        ratios = []
        for _ in range(options.rounds):
            now = {
                name: steps(engine, batch, options.prompt, options.steps)
                for name, engine in engines.items()
            }
            for name, taken in now.items():
                seconds[name] += taken
            ratios.append(statistics.median(now["auto"]) / statistics.median(now["int8"]))
        plain, codes = (batch / statistics.median(seconds[name]) for name in engines)
        print(
            f"{batch:>5} {plain:>11.1f} {codes:>11.1f} {codes / plain:>6.2f} "
            f"{min(ratios):>6.2f} to {max(ratios):.2f}",
            flush=True,
        )


def steps(engine: LocalEngine, batch: int, prompt: int, count: int) -> list[float]:
    """Return CPU seconds of decode steps of a batch."""
    from pigou.request import SamplingParams

    params = SamplingParams(max_tokens=count + 1, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(0)
    outputs = [engine.add(ids, params) for ids in rng.integers(0, 1000, size=(batch, prompt))]
    while not all(output.tokens for output in outputs):
        engine.step()
    taken = []
    while any(output.reason is None for output in outputs):
        began = time.process_time()
        engine.step()
        taken.append(time.process_time() - began)
    return taken


if __name__ == "__main__":
    main()
