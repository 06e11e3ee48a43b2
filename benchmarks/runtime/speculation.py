#!/usr/bin/env python3
"""Decode tokens per CPU-second with drafts and without, on the same texts, in turns.

    python -m benchmarks.runtime.speculation MODEL [--batch 1 8 32] [--draft FOLDER] [--rounds 5]
    python -m benchmarks.runtime.speculation --pairs

The model computes every token, but the text is given: `edit` repeats the prompt with one token of
16 changed, `chat` is the same with one of 4, `random` repeats nothing, and `false` has so few
different tokens that matches are found everywhere and nearly all drafts are wrong. With --draft, a
draft model proposes in place of n-grams, and texts are the model's own. CPU seconds are those of
the process; ratios are medians over the rounds, each of which has texts of its own. --pairs prints,
of synthetic pairs of distributions, how often draws at the same number agree, beside what the
rejection rule would accept, exactly.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.lib.rounds import shuffled_rounds
from pigou.runtime.resources import prepare_environment

if TYPE_CHECKING:
    from pigou.config import SpeculativeConfig
    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.models.load import LoadedModel

PROMPT = 192


def text(kind: str, vocab: int, output: int, rng: np.random.Generator) -> np.ndarray:
    """Return the tokens of a prompt and of what follows."""
    if kind == "false":
        return rng.integers(10, 18, PROMPT + output)
    prompt, other = rng.integers(10, vocab, PROMPT), rng.integers(10, vocab, output)
    if kind == "random":
        return np.concatenate((prompt, other))
    changed = rng.random(output) < (1 / 16 if kind == "edit" else 1 / 4)
    copied = np.resize(prompt[PROMPT // 4 :], output)
    return np.concatenate((prompt, np.where(changed, other, copied)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--pairs", action="store_true", help="synthetic pairs alone, no model")
    parser.add_argument("--draft", default="", help="folder of a draft model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["edit", "chat", "random", "false"])
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--drafts", type=int, default=8, help="num_speculative_tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=100)
    options = parser.parse_args()
    if options.pairs:
        compare_pairs(options.seed)
        return
    prepare_environment(options.threads)
    from pigou.config import SpeculativeConfig
    from pigou.models import bundled_path
    from pigou.runtime.models.load import load
    from pigou.runtime.resources import set_threads

    set_threads(options.threads)
    source = bundled_path() if options.model == "bundled" else options.model
    model = load(source, options.dtype)
    drafting = SpeculativeConfig(
        method="ngram", num_speculative_tokens=options.drafts, prompt_lookup_min=2,
        prompt_lookup_max=5,
    )  # fmt: skip
    if options.draft:
        options.kinds = ["greedy", "sampled"]
        drafting = SpeculativeConfig(num_speculative_tokens=options.drafts, model=options.draft)
    print(f"{'batch':>5} {'text':>7} {'plain tok/s':>12} {'drafts tok/s':>13} {'ratio':>6} "
          f"{'range':>12} {'tokens/step':>12} {'accepted':>9} {'drafts/step':>12}")  # fmt: skip
    for batch in options.batch:
        for kind in options.kinds:
            compare(model, drafting, batch, kind, options)


def compare_pairs(seed: int, vocab: int = 32_000, repeats: int = 30) -> None:
    """Print mean acceptance by the spread of the target's logits and the draft's noise."""
    rng = np.random.default_rng(seed)
    print(f"{'spread':>6} {'noise':>6} {'same number':>12} {'rejection':>10}")
    for spread in (2, 3, 4, 5):
        for noise in (0.25, 0.5, 1.0, 1.5):
            same, rejection = [], []
            for _ in range(repeats):
                target = rng.normal(0, spread, vocab)
                draft = target + rng.normal(0, noise, vocab)
                p, q = (np.exp(logits - logits.max()) for logits in (target, draft))
                p, q = p / p.sum(), q / q.sum()
                ends, others = p.cumsum(), q.cumsum()
                shared = np.minimum(ends, others) - np.maximum(ends - p, others - q)
                same.append(shared.clip(0).sum())
                rejection.append(np.minimum(p, q).sum())
            print(f"{spread:>6} {noise:>6} {np.mean(same):>12.0%} {np.mean(rejection):>10.0%}")


def compare(
    model: LoadedModel, drafting: SpeculativeConfig, batch: int, kind: str,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """Run both engines in turns, and print a line."""
    length = PROMPT + options.output
    engines = {"plain": engine(model, batch, length, None),
               "drafts": engine(model, batch, length, drafting)}  # fmt: skip
    cpu: dict[str, list[float]] = {"plain": [], "drafts": []}
    steps, tried, accepted = 0, 0, 0
    for number, name in shuffled_rounds(list(cpu), options.rounds + 1, options.seed):
        rng = np.random.default_rng([options.seed, number, batch])
        texts = [text(kind, model.config.vocab, options.output, rng) for _ in range(batch)]
        pricer = engines[name].core.drafts
        before = (pricer.draft_tokens, pricer.accepted_tokens) if pricer is not None else (0, 0)
        seconds, done = decode(engines[name], texts, kind, forced=not options.draft)
        if not number:  # the first compiles, and learns what steps cost
            continue
        cpu[name].append(seconds)
        if pricer is not None:
            steps += done
            tried += pricer.draft_tokens - before[0]
            accepted += pricer.accepted_tokens - before[1]
    ratios = [a / b for a, b in zip(cpu["plain"], cpu["drafts"], strict=True)]
    tokens = batch * (options.output - 1)
    print(
        f"{batch:>5} {kind:>7} {tokens / statistics.median(cpu['plain']):>12,.1f} "
        f"{tokens / statistics.median(cpu['drafts']):>13,.1f} {statistics.median(ratios):>6.3f} "
        f"{min(ratios):>5.2f}-{max(ratios):<5.2f} {options.rounds * tokens / steps / batch:>12.2f} "
        f"{accepted / max(tried, 1):>9.0%} {tried / steps:>12.2f}",
        flush=True,
    )


def engine(
    model: LoadedModel, batch: int, length: int, drafting: SpeculativeConfig | None
) -> LocalEngine:
    """Build an engine with drafts, or without."""
    from pigou.config import EngineConfig
    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.speculation import make_proposer

    config = EngineConfig(
        blocks=(length // 16 + 2) * batch, max_seqs=batch, max_batched_tokens=2048,
        max_model_len=length, max_repeat=8, prefix_caching=False,
        num_speculative_tokens=drafting.num_speculative_tokens if drafting is not None else 0,
    )  # fmt: skip
    proposer = make_proposer(drafting, model, config) if drafting is not None else None
    return LocalEngine(model, config, proposer=proposer)


def decode(
    local: LocalEngine, texts: list[np.ndarray], kind: str, forced: bool
) -> tuple[float, int]:
    """Return CPU seconds from all first tokens to the last, and steps."""
    from benchmarks.token_eviction.forced import force
    from pigou.request import SamplingParams

    output = len(texts[0]) - PROMPT
    params = SamplingParams(output, temperature=float(kind == "sampled"), ignore_eos=True)
    outputs = [local.add(t[:PROMPT], params) for t in texts]
    if forced:
        forcing = force(local.executor)
        for each, t in zip(outputs, texts, strict=True):
            forcing.expect(each.request, t[PROMPT:])
    while not all(each.tokens for each in outputs):
        local.step()
    began, steps = time.process_time(), 0
    while any(each.reason is None for each in outputs):
        steps += local.step().steps
    return time.process_time() - began, steps


if __name__ == "__main__":
    main()
