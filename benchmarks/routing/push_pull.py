"""Push and pull of prompts side by side: routed to a prefill worker, or claimed by an idle one.

Each arm serves the same requests on the same simulated fleet. Constants of the pull by price are
chosen on seeds 0 and 1 (`--choose`) and reported on others.

    python -m benchmarks.routing.push_pull [--seeds 10 11 12] [--only WORD] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.routing.policy_workloads import control_config
from pigou.request import SECOND, Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, Slow, WorkerGroup
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec

_BLOCK = 16


@dataclass(frozen=True)
class PullScenario:
    """Requests on a fleet of prefill workers and one decode worker."""

    name: str
    rate: float  # requests a second
    burst: int = 1  # requests that arrive together
    tokens: tuple[int, int] = (256, 4096)  # prompt length, drawn evenly from (least, most)
    prefixes: int = 0  # different beginnings of prompts; 0 for prompts that share nothing
    shared: float = 0.8  # part of a prompt that such a beginning is
    slow: float = 1.0  # times that steps of two of the four prefill workers take as long
    count: int = 600

    def load(self, seed: int) -> OpenLoop:
        """Return the requests of a seed."""
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(self.burst / self.rate, -(-self.count // self.burst))
        sessions = []
        for group, start in enumerate(np.cumsum(gaps).tolist()):
            for number in range(self.burst):
                unique = (group * self.burst + number + 1) << 20
                tokens = int(rng.integers(self.tokens[0], self.tokens[1] + 1))
                ids = [unique + block for block in range(tokens // _BLOCK)]
                if self.prefixes:
                    which = int(rng.zipf(1.3)) % self.prefixes
                    common = int(len(ids) * self.shared)
                    ids[:common] = [-((which + 1) << 20) - block for block in range(common)]
                spec = RequestSpec(tokens, 16, tuple(ids), 1, float(_BLOCK))
                sessions.append(RequestSession(round(start * SECOND), (spec,)))
        return OpenLoop(tuple(sessions))

    def fleet(self) -> FleetConfig:
        """Return four prefill workers, two of them slow where that is asked for, and a decode."""
        slow = (Slow(factor=self.slow),) if self.slow != 1.0 else ()
        kinds = WorkerGroup(role=Role.PREFILL, count=2, blocks=4000)
        return FleetConfig(
            workers=(
                kinds,
                WorkerGroup(role=Role.PREFILL, count=2, blocks=4000, slow=slow),
                WorkerGroup(role=Role.DECODE),
            )
        )


#: Four prefill workers of Llama-3.1-8B on H200 compute about 91 such prompts a second.
SCENARIOS = (
    PullScenario("burst of 16", 32.0, burst=16, tokens=(512, 512)),
    PullScenario("rho 0.5", 46.0),
    PullScenario("rho 0.8", 73.0),
    PullScenario("rho 0.95", 87.0),
    PullScenario("shared 0.5", 90.0, prefixes=24),
    PullScenario("shared 0.9", 160.0, prefixes=24),
    PullScenario("unequal 0.8", 55.0, slow=2.0),
    PullScenario("unequal, shared", 100.0, prefixes=24, slow=2.0),
)

#: Name of an arm -> routing policy, and the prefill queue.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "push toll": ("toll", {}),
    "push dynamo": ("dynamo", {}),
    "push llm-d": ("llm-d", {}),
    "push least-loaded": ("least-loaded", {}),
    "push round-robin": ("round-robin", {}),
    "pull fifo, one": ("dynamo", {"order": "fifo", "batch_tokens": 1}),
    "pull fifo": ("toll", {"order": "fifo"}),
    "pull price": ("toll", {"order": "price"}),
}
#: Values of one constant at a time, others at their defaults.
CHOICES: dict[str, Sequence[Any]] = {
    "batch_tokens": (128, 512, 2048),
    "max_bypass": (2, 8, 32),
    "window": (4, 16, 64),
    "toll": (0.0, 1.0, 2.0),
    "urgency": (0.0, 1.0, 2.0),
    "max_bypass_s": (0.5, 2.0),
}


def run(scenario: PullScenario, policy: str, queue: dict[str, Any], seed: int) -> dict[str, float]:
    """Return the figures of one run."""
    mode = {"mode": "pull", **queue} if queue else {"mode": "push"}
    setup = Setup(model="llama-3.1-8b", gpu="H200", rehearses=True, prefill_queue=mode)
    simulation = Simulation(
        scenario.load(seed), scenario.fleet(), setup, control_config(policy, {}, seed),
        ClientConfig(), seed=seed, assess_every=1e6,
    )  # fmt: skip
    runs = simulation.run().done
    ttft = np.array([(r.first_token_ns - r.intended_ns) / SECOND for r in runs])
    tokens = sum(r.spec.prompt_tokens for r in runs)
    pull = simulation.fleet.dispatcher.pull
    return {
        "done": len(runs),
        "mean_s": float(ttft.mean()),
        "p99_s": float(np.quantile(ttft, 0.99)),
        "hit": sum(r.cached_tokens for r in runs if r.prefill_worker) / tokens,
        "local": sum(not r.prefill_worker for r in runs) / len(runs),
        "batch": fmean(pull.batches) if pull is not None and pull.batches else 0.0,
    }


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


def choose(scenarios: Sequence[PullScenario]) -> None:
    """Print the geometric mean of the figures for each value, beside those of the defaults."""
    price = {"order": "price"}
    base = {s.name: [run(s, "toll", price, seed) for seed in (0, 1)] for s in scenarios}
    for name, values in CHOICES.items():
        for value in values:
            ratios = []
            for s in scenarios:
                rows = [run(s, "toll", price | {name: value}, seed) for seed in (0, 1)]
                one, other = mean_of(rows), mean_of(base[s.name])
                ratios.append([one[key] / other[key] for key in ("mean_s", "p99_s")])
            mean, p99 = np.exp(np.log(ratios).mean(axis=0))
            print(f"{name}={value:<8} mean {mean:.3f}  P99 {p99:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--only", default="", help="scenarios with this word")
    parser.add_argument("--arms", default="", help="arms with this word")
    parser.add_argument("--count", type=int, default=600, help="requests of a run")
    parser.add_argument("--choose", action="store_true", help="constants of the pull by price")
    parser.add_argument("--json", default="", help="file for all figures")
    asked = parser.parse_args()
    scenarios = [replace(s, count=asked.count) for s in SCENARIOS if asked.only in s.name]
    if asked.choose:
        choose(scenarios)
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    for scenario in scenarios:
        print(f"\n{scenario.name}\n{'arm':<20} mean ms   P99 ms   hit  local  batch")
        for arm, (policy, queue) in ARMS.items():
            if asked.arms not in arm:
                continue
            row = mean_of([run(scenario, policy, queue, seed) for seed in asked.seeds])
            results.setdefault(scenario.name, {})[arm] = row
            print(
                f"{arm:<20} {row['mean_s'] * 1e3:7.1f} {row['p99_s'] * 1e3:8.1f} {row['hit']:5.2f} "
                f"{row['local']:6.2f} {row['batch']:6.2f}",
                flush=True,
            )
    if asked.json:
        Path(asked.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
