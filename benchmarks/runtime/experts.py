#!/usr/bin/env python3
"""A layer of routed experts: ours beside transformers' eager loop and its grouped_mm.

    python -m benchmarks.runtime.experts [--dtype bf16] [--experts 64] [--batch 1 8 64 512]

Router and experts of a Qwen3-MoE layer of random weights; all arms have the same and see the same
tokens, new ones in each round. The arms take turns, in an order that each round draws anew.
Figures are tokens a second of CPU time (on a GPU of time), medians over the rounds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.lib.rounds import shuffled_rounds
from pigou.runtime.resources import prepare_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    prepare_environment(options.threads)

    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from pigou.runtime.attention.kv_cache import DTYPES
    from pigou.runtime.models.experts import adopt_experts
    from pigou.runtime.models.weights import WeightSource
    from pigou.runtime.ops import KernelOps, TorchOps
    from pigou.runtime.resources import set_threads

    set_threads(options.threads)
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    on_cpu = device.type == "cpu"
    config = Qwen3MoeConfig(
        hidden_size=options.hidden, moe_intermediate_size=options.width,
        num_experts=options.experts, num_experts_per_tok=options.top, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    eager = Qwen3MoeSparseMoeBlock(config).to(device, dtype).eval()
    with torch.no_grad():
        for weight in eager.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    arms: dict[str, Any] = {
        "eager": eager,
        "grouped_mm": copy.deepcopy(eager),
        "ours": copy.deepcopy(eager),
    }
    for name in ("eager", "grouped_mm"):
        arms[name].experts.config = copy.deepcopy(config)
        arms[name].experts.config._experts_implementation = name
    root = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([arms["ours"]])})
    ops = KernelOps() if on_cpu else TorchOps()
    assert adopt_experts(root, WeightSource(dtype, device), ops.gate) is not None

    print(f"{options.experts} experts of {options.hidden} x {options.width}, top {options.top}, "
          f"{options.dtype}, {device}, {options.threads} thread(s)")  # fmt: skip
    print(f"{'tokens':>6}  {'arm':<10} {'tokens/s':>10} {'ms a layer':>10} {'ours / arm':>10}")
    with torch.inference_mode():
        for batch in options.batch:
            x = torch.randn(1, batch, options.hidden, device=device).to(dtype)
            for name, block in arms.items():
                gaps = (block(x).float() - eager(x).float()).abs().amax(-1)
                # In bf16 transformers routes by rounded logits: some tokens choose otherwise.
                close = float((gaps < (0.05 if dtype is torch.bfloat16 else 1e-4)).double().mean())
                assert close >= (0.8 if dtype is torch.bfloat16 else 1.0), f"{name}: {gaps}"
            taken: dict[str, list[float]] = {name: [] for name in arms}
            for number, name in shuffled_rounds(list(arms), options.rounds, seed=batch):
                torch.manual_seed(number)  # the arms of a round see the same tokens
                tokens = torch.randn(1, batch, options.hidden, device=device).to(dtype)
                repeats = max(1, 64 // batch)
                taken[name].append(seconds(arms[name], tokens, repeats, on_cpu=on_cpu))
            ours = statistics.median(taken["ours"])
            for name, measured in taken.items():
                median = statistics.median(measured)
                print(f"{batch:>6}  {name:<10} {batch / median:>10,.0f} {median * 1e3:>10.2f} "
                      f"{median / ours:>10.2f}", flush=True)  # fmt: skip


def seconds(block: Callable[..., object], x: object, repeats: int, *, on_cpu: bool) -> float:
    """Seconds of one pass: CPU time of the process, or wall time of a GPU."""
    import torch

    clock = time.process_time if on_cpu else time.perf_counter
    if not on_cpu:
        torch.cuda.synchronize()
    began = clock()
    for _ in range(repeats):
        block(x)
    if not on_cpu:
        torch.cuda.synchronize()
    return (clock() - began) / repeats


if __name__ == "__main__":
    main()
