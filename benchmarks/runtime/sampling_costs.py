#!/usr/bin/env python3
"""What log-probabilities, penalties and grammars add to a decode step, beside plain sampling.

    python -m benchmarks.runtime.sampling_costs [--model bundled] [--batch 1 8 32] [--rounds 5]

The arms take turns, in an order that each round draws anew. Figures are CPU seconds of the
process for a decode step (all threads, so that a busy machine does not count), and on a GPU
seconds; medians over the rounds, with the ratio to the plain arm.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.lib.rounds import shuffled_rounds
from pigou.request import Grammar, SamplingParams
from pigou.runtime.resources import prepare_environment

if TYPE_CHECKING:
    from pigou.runtime.local_engine import LocalEngine

PROMPT, STEPS = 64, 48
_JSON = '{"type":"array","items":{"type":"object","properties":{"name":{"type":"string"},' \
    '"count":{"type":"integer"}},"required":["name","count"]},"minItems":400}'  # fmt: skip
ARMS: dict[str, dict[str, object]] = {
    "plain": {},
    "logprobs 5": {"logprobs": 5},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "regex": {"grammar": Grammar("regex", "[a-z ]{4000}")},
    "JSON schema": {"grammar": Grammar("json_schema", _JSON)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    prepare_environment(options.threads)
    from pigou.config import EngineConfig
    from pigou.models import bundled_path
    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.models.load import load
    from pigou.runtime.resources import set_threads

    set_threads(options.threads)
    model = load(
        bundled_path() if options.model == "bundled" else options.model, "auto", options.device
    )
    length = PROMPT + STEPS + 16
    config = EngineConfig(
        blocks=(length // 16 + 2) * max(options.batch), max_seqs=max(options.batch),
        max_batched_tokens=4096, max_model_len=length, prefix_caching=False,
    )  # fmt: skip
    engine = LocalEngine(model, config)
    on_cpu = options.device == "cpu"
    print(f"{'batch':>5}  {'arm':<12} {'ms a step':>10} {'ratio':>6} {'us a token more':>16}")
    for batch in options.batch:
        taken: dict[str, list[float]] = {name: [] for name in ARMS}
        for name in ARMS:
            decode_step_s(engine, batch, name, 0, on_cpu=on_cpu)
        for number, name in shuffled_rounds(list(ARMS), options.rounds, seed=batch):
            taken[name].append(decode_step_s(engine, batch, name, number, on_cpu=on_cpu))
        plain = statistics.median(taken["plain"])
        for name, seconds in taken.items():
            median = statistics.median(seconds)
            more_us = (median - plain) / batch * 1e6
            print(
                f"{batch:>5}  {name:<12} {median * 1e3:>10.3f} {median / plain:>6.2f} "
                f"{more_us:>16.1f}",
                flush=True,
            )


def decode_step_s(engine: LocalEngine, batch: int, arm: str, number: int, *, on_cpu: bool) -> float:
    """Return the mean seconds of a decode step of a batch."""
    random = np.random.default_rng(number)
    params = SamplingParams(STEPS + 8, ignore_eos=True, seed=number, **ARMS[arm])  # type: ignore[arg-type]
    prompts = random.integers(300, 2000, (batch, PROMPT)).tolist()
    outputs = [engine.add(prompt, params) for prompt in prompts]
    while not all(output.tokens for output in outputs):
        engine.step()
    clock = time.process_time if on_cpu else time.perf_counter
    begun = clock()
    for _ in range(STEPS):
        engine.step()
    seconds = (clock() - begun) / STEPS
    while any(output.reason is None for output in outputs):
        engine.step()
    return seconds


if __name__ == "__main__":
    main()
