"""How soon the price of token eviction settles where the load doubles at once.

``python -m benchmarks.token_pd.settling`` keeps half of the streams busy, each request followed by
another, each stream at a point of its own in its first one. Their entries fit. Then the other half
comes, all in one step and as mixed in age, and from there on the load is steady: what changes in
the price after that is the price's own doing. Printed for each seed: its level (median of the
later half of the window), the price after one and after ten steps as a share of that, its tenth and
ninetieth percentile by level later on, and the steps after which it stays within a quarter of it.
"""

from __future__ import annotations

import argparse

import msgspec
import numpy as np

from benchmarks.lib.servers import machine
from pigou.runtime.resources import prepare_environment, set_threads

#: Steps before the load doubles, and steps looked at after that.
CHANGE, WINDOW = 60, 160
#: Tokens of a request.
PROMPT, OUTPUT = 100, 200


def main() -> None:
    """Run every policy with every seed, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--policies", nargs="+", default=["fifo", "h2o", "paper", "pigou"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dtype", default="fp32")
    args = parser.parse_args()
    prepare_environment(1)
    set_threads(1)
    print("machine:", machine(), flush=True)
    from benchmarks.token_pd.paper_tables import markdown

    head = ["policy", "seed", "level", "after 1 step", "after 10", "later, p10 to p90", "settled"]
    rows = []
    for policy in args.policies:
        for seed in args.seeds:
            found = prices(policy, args.streams, seed, args.dtype)
            rows.append([policy, str(seed), *figures(found)])
            print(rows[-1], flush=True)
    print(markdown(head, rows))


def figures(found: list[float]) -> list[str]:
    """Return what is told of the prices by step."""
    from benchmarks.token_pd.optimum import settling

    after = np.array(found[CHANGE:])
    later = after[WINDOW // 2 :]
    level = float(np.median(later))
    low, high = np.quantile(later / level, (0.1, 0.9)).tolist()
    steps = settling(found, CHANGE, WINDOW)
    shares = [f"{after[n] / level:.2f}" for n in (1, 10)]
    told = "not in the first half" if steps is None else str(steps)
    return [f"{level:.3g}", *shares, f"{low:.2f} to {high:.2f}", told]


def prices(policy: str, streams: int, seed: int, dtype: str) -> list[float]:
    """Return the price after each step of a run."""
    from benchmarks.token_pd.load import Arrival, Item, Texts
    from benchmarks.token_pd.record import Recorder
    from benchmarks.token_pd.run import BLOCK, Run, Served, Setting
    from pigou.config import EngineConfig
    from pigou.models import bundled_path
    from pigou.runtime.models.load import load

    class Wide(Setting):
        """A setting in whose steps all who come at once have room."""

        def engine(self) -> EngineConfig:
            most = streams * (PROMPT + OUTPUT)
            return msgspec.structs.replace(super().engine(), max_batched_tokens=most)

    half = streams // 2
    blocks = half * (-(-(PROMPT + OUTPUT // 2) // BLOCK) + 2)
    ids = Texts.unseen(bundled_path()).ids["play"]
    rng = np.random.default_rng((seed, 7))
    recorder = Recorder(positions=False)
    run = Run(load(bundled_path(), dtype), Wide(policy, streams, blocks), recorder)
    running: list[Served] = []

    def come(age: int) -> None:
        start = int(rng.integers(0, len(ids) - PROMPT - OUTPUT))
        read = ids[start : start + PROMPT + OUTPUT]
        item = Item("play", read[: PROMPT + age], read[PROMPT + age :])
        running.append(run.offer(Arrival(run.now, item)))

    for number in range(CHANGE + WINDOW):
        for _ in range(half if number in (0, CHANGE) else 0):
            come(int(rng.integers(0, OUTPUT)))
        run.step()
        ended = [served for served in running if served.output.reason is not None]
        running[:] = [served for served in running if served.output.reason is None]
        for served in ended:
            run.forcing.forget(served.output.request)
            come(0)
    return [step.price for step in recorder.steps]


if __name__ == "__main__":
    main()
