#!/usr/bin/env python3
"""Tokens per second of the runtime alone, beside the time of its matrix products alone.

    steps.py MODEL [--dtype bf16] [--threads 2] [--batch 1 8 32] [--prompt 128] [--output 64]

For each batch it prints the prefill's and the decode's tokens per second, and the share of a
decode step that goes into the products of the linear layers, which no runtime can avoid.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pigou.runtime.resources import prepare_environment

if TYPE_CHECKING:
    from torch import Tensor

    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.models.load import LoadedModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=8, help="most steps of a plan")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    prepare_environment(options.threads)
    from pigou.config import EngineConfig
    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.models.load import load
    from pigou.runtime.resources import set_threads

    set_threads(options.threads)
    model = load(options.model, options.dtype, options.device)
    length = options.prompt + options.output
    config = EngineConfig(
        blocks=(length // 16 + 2) * max(options.batch),
        max_seqs=max(options.batch),
        max_batched_tokens=max(2048, options.prompt),
        max_model_len=length,
        max_repeat=options.repeat,
        prefix_caching=False,
    )
    engine = LocalEngine(model, config)
    print(f"{'batch':>5} {'prefill tok/s':>14} {'decode tok/s':>13} {'step ms':>8} {'products':>9}")
    for batch in options.batch:
        prefill, step, alone = measure(engine, model, batch, options)
        print(
            f"{batch:>5} {batch * options.prompt / prefill:>14,.0f} {batch / step:>13,.1f} "
            f"{step * 1e3:>8.2f} {alone / step:>9.0%}",
            flush=True,
        )


def measure(
    engine: LocalEngine, model: LoadedModel, batch: int, options: argparse.Namespace
) -> tuple[float, float, float]:
    """Return seconds of a batch's prefill, of a decode step, and of the step's products alone.

    All are medians, and the last two are taken in turns, so that a busy machine slows both.
    """
    from pigou.request import SamplingParams

    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=options.output, temperature=0.0, ignore_eos=True)
    prefills: list[float] = []
    steps: list[float] = []
    alone: list[float] = []
    for _ in range(options.rounds):
        prompts = rng.integers(0, model.config.vocab, size=(batch, options.prompt))
        outputs = [engine.add(prompt, params) for prompt in prompts]
        began = time.perf_counter()
        while not all(output.tokens for output in outputs):
            engine.step()
        prefills.append(time.perf_counter() - began)
        while any(output.reason is None for output in outputs):
            steps += (engine.step().durations / 1e9).tolist()
            alone.append(products(model, batch))
    return float(np.median(prefills)), float(np.median(steps)), float(np.median(alone))


def products(model: LoadedModel, batch: int) -> float:
    """Return seconds that the linear layers of one decode step take by themselves."""
    import torch

    from pigou.runtime.models.decoder import Decoder, GatedMLP

    decoder, config = model.decoder, model.config
    if not isinstance(decoder, Decoder):
        raise SystemExit("products are timed of Pigou's own decoders; give such a model")
    linears: list[tuple[Callable[[Tensor], Tensor], int]]
    linears = [(decoder.head, config.hidden)]
    for layer in decoder.layers:
        linears += [(layer.qkv, config.hidden), (layer.output, config.heads * config.head_dim)]
        if isinstance(layer.mlp, GatedMLP):
            linears += [(layer.mlp.gate_up, config.hidden), (layer.mlp.down, config.ffn)]
    inputs = {
        width: torch.ones(batch, width, dtype=model.dtype, device=model.device)
        for _, width in linears
    }
    with torch.inference_mode():
        began = time.perf_counter()
        for linear, width in linears:
            linear(inputs[width])
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
