#!/usr/bin/env python3
"""Decode and prefill by transformers' modules beside Pigou's own code, on the same weights.

    implementations.py [--folder DIR] [--threads 1] [--batch 8] [--steps 24] [--rounds 5]

The model is random, of Qwen2-0.5B's shape, in bf16. Steps of both are interleaved in one run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pigou.runtime.resources import prepare_environment

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    prepare_environment(options.threads)
    import torch

    from pigou.config import EngineConfig
    from pigou.request import SamplingParams
    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.models.load import load
    from pigou.runtime.resources import set_threads
    from pigou_lab.gpu_check.random_model import write_checkpoint

    set_threads(options.threads)
    folder = options.folder or Path(tempfile.mkdtemp())
    if not (folder / "model.safetensors").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, SHAPE, torch.bfloat16)
    length = options.prompt + options.steps + 1
    config = EngineConfig(
        blocks=(length // 16 + 2) * options.batch, max_seqs=options.batch, max_model_len=length,
        max_batched_tokens=options.batch * options.prompt, prefix_caching=False,
    )  # fmt: skip
    names = ("pigou", "transformers")
    engines = {n: LocalEngine(load(folder, "bf16", implementation=n), config) for n in names}
    prefills: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=options.steps, temperature=0.0, ignore_eos=True)
    for _ in range(options.rounds):
        prompts = rng.integers(0, SHAPE["vocab_size"], size=(options.batch, options.prompt))
        running = {n: [engine.add(p, params) for p in prompts] for n, engine in engines.items()}
        for name, engine in engines.items():
            began = time.process_time()
            engine.step()
            prefills[name].append(time.process_time() - began)
        while any(o.reason is None for outputs in running.values() for o in outputs):
            for name, engine in engines.items():
                began = time.process_time()
                done = engine.step().steps
                steps[name].append((time.process_time() - began) / max(done, 1))
    print(f"{'':14} {'prefill tok/s':>14} {'decode tok/s':>13}   (CPU seconds, medians)")
    rates = {}
    for name in names:
        rates[name] = (
            options.batch * options.prompt / np.median(prefills[name]),
            options.batch / np.median(steps[name]),
        )
        print(f"{name:14} {rates[name][0]:>14,.1f} {rates[name][1]:>13,.2f}")
    ratios = [b / a for a, b in zip(rates["pigou"], rates["transformers"], strict=True)]
    print(f"{'ratio':14} {ratios[0]:>14.2f} {ratios[1]:>13.2f}")


if __name__ == "__main__":
    main()
