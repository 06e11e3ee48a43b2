"""Orders by predicted output length against first come, first served, on recorded traces.

    python -m benchmarks.control.lengths [--trace agent|azure] [--rho 0.9] [--cv 2]
        [--requests 800] [--skip 800] [--seeds 21 22 23] [--where gateway|engine] [--ageing 125]
        [--input-weight 0.05] [--predictors NAME...]

The simulated fleet runs the production control plane and engines. Requests of a trace arrive with
Gamma gaps at `rho` of the rate at which the fleet completes them when all wait at once. Every
client declares the trace's longest output. `online` learns as it goes; `trained` begins with what
the first half of the trace taught; all run requests of the second half. `oracle` is the true length
at a given rank correlation; `random` is `oracle:0` without a weight of prompts, which must equal
FCFS. A class is a quartile of prompt lengths. Runs are interleaved by seed. Ageing was chosen on
the first 800 requests and seeds 1 to 3 (--skip 0): the least of 60, 125, 250, 500 and 1,000 tokens
a second that keeps every P99 of `online` below 1.2. Report on others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from pigou.control.lengths import Online
from pigou.request import NEVER, SECOND, Request
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec, block_hashes
from pigou.workload.trace_formats import read_trace
from pigou.workload.workload_spec import from_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
FILES = {
    "agent": "agent-sessions.tar.zst",
    "azure": "azure/AzureLLMInferenceTrace_code.csv.zst",
}
#: Simulated fleet of each trace; rows are few, so that requests queue.
MAX_SEQS = {"agent": 8, "azure": 8}
PREDICTORS = ("random", "oracle:0", "oracle:0.3", "oracle:0.6", "oracle:1", "online", "trained")
#: Longest prompt taken from a trace, in tokens.
MAX_PROMPT = 120_000


def specs_of(name: str, root: Path) -> list[RequestSpec]:
    """Return a trace's requests, in the order of their sessions' starts."""
    loop = from_trace(read_trace(root / FILES[name]))
    every = [spec for session in loop.sessions for spec in session.requests]
    return [replace(spec, think_ns=0) for spec in every if spec.prompt_tokens <= MAX_PROMPT]


def arrivals(specs: Sequence[RequestSpec], rate: float, seed: int, cv: float = 1.0) -> OpenLoop:
    """Return requests in a random order with Gamma gaps, each a session of its own."""
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(cv**-2, cv**2 / rate, len(specs)) if rate else np.zeros(len(specs))
    starts = np.cumsum(gaps)
    order = rng.permutation(len(specs))
    return OpenLoop(
        tuple(
            RequestSession(round(start * SECOND), (specs[number],))
            for start, number in zip(starts.tolist(), order.tolist(), strict=True)
        )
    )


@cache
def trained(name: str, root: Path, share: float) -> dict[str, Any]:
    """Return what the first `share` of a trace teaches."""
    model = Online()
    specs = specs_of(name, root)
    for number, spec in enumerate(specs[: int(share * len(specs))]):
        hashes = block_hashes(spec, number, 16)
        request = Request(str(number), spec.prompt_tokens, NEVER, hashes, tenant=spec.tenant)
        model.observe(request, spec.output_tokens)
    document: dict[str, Any] = msgspec.to_builtins(model.model(), str_keys=True)
    return document


class Fleet:
    """A simulated fleet, and one run of a workload through it."""

    def __init__(self, name: str, root: Path, where: str, ageing: float, input_weight: float):
        self.name, self.root, self.where = name, root, where
        self.ageing, self.input_weight = ageing, input_weight

    def run(self, loop: OpenLoop, predictor: str, seed: int) -> dict[str, Any]:
        """Return seconds from arrival to end by request, and the predictor's tau."""
        settings: dict[str, Any] = {}
        order: Literal["shortest"] | None = None
        is_random = predictor == "random"
        kind, _, tau = ("oracle:0" if is_random else predictor).partition(":")
        input_weight = 0.0 if is_random else self.input_weight
        if kind != "fcfs":
            settings["lengths"] = {"predictor": "online" if kind == "trained" else kind}
        if tau:
            settings["lengths"]["tau"] = float(tau)
        if kind == "trained":
            settings["length_model"] = trained(self.name, self.root, 0.5)
        if kind != "fcfs" and self.where == "gateway":
            settings["admission"] = {
                "order": "shortest-remaining", "ageing": self.ageing,
                "input_weight": input_weight,
            }  # fmt: skip
        elif kind != "fcfs":
            order = "shortest"
        limit = {} if self.where == "engine" else {"max_inflight": MAX_SEQS[self.name]}
        control = unlimited(policy="least-loaded", **limit, **settings)
        setup = Setup(
            model="llama-3.1-8b", gpu="H100", max_seqs=MAX_SEQS[self.name], order=order,
            ageing=self.ageing, input_weight=input_weight, engine="pigou",
        )  # fmt: skip
        simulation = Simulation(
            loop, read_fleet("1xboth"), setup, control, ClientConfig(), seed=seed
        )
        runs = simulation.run().runs
        lengths = simulation.fleet.plane.tracker.lengths
        return {
            "e2e": np.array([(run.ended_ns - run.intended_ns) / SECOND for run in runs]),
            "prompt": np.array([run.spec.prompt_tokens for run in runs]),
            "output": np.array([run.spec.output_tokens for run in runs]),
            "tau": lengths.score.tau if lengths is not None else 0.0,
        }

    def rate(self, specs: Sequence[RequestSpec]) -> float:
        """Return requests a second that end when all wait at once."""
        e2e = self.run(arrivals(specs, 0.0, 0), "fcfs", 0)["e2e"]
        return float(len(e2e) / np.quantile(e2e, 0.95) * 0.95)


def p99_ratios(base: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Return the ratio of P99s for each quartile of prompts, the shortest first."""
    ratios = []
    cuts = np.quantile(base["prompt"], (0.25, 0.5, 0.75))
    kinds, others = np.digitize(base["prompt"], cuts), np.digitize(other["prompt"], cuts)
    for kind in range(4):
        p99 = np.quantile(other["e2e"][others == kind], 0.99)
        ratios.append(float(p99 / np.quantile(base["e2e"][kinds == kind], 0.99)))
    return ratios


def main() -> None:
    """Print one row a predictor: mean, and worst P99 of a class, over FCFS."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", choices=FILES, default="agent")
    parser.add_argument("--root", type=Path, default=TRACES)
    parser.add_argument("--where", choices=("gateway", "engine"), default="gateway")
    parser.add_argument("--rho", type=float, default=0.9)
    parser.add_argument("--cv", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--skip", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 22, 23])
    parser.add_argument("--ageing", type=float, default=125.0)
    parser.add_argument("--input-weight", type=float, default=0.05)
    parser.add_argument("--predictors", nargs="+", default=PREDICTORS)
    asked = parser.parse_args()
    fleet = Fleet(asked.trace, asked.root, asked.where, asked.ageing, asked.input_weight)
    specs = specs_of(asked.trace, asked.root)
    specs = specs[len(specs) // 2 + asked.skip :][: asked.requests]
    rate = asked.rho * fleet.rate(specs)
    print(f"{asked.trace}, {asked.where}: {len(specs)} requests at {rate:.2f}/s, rho {asked.rho}")
    rows: dict[str, list[tuple[float, ...]]] = {}
    for seed in asked.seeds:
        loop = arrivals(specs, rate, seed, asked.cv)
        base = fleet.run(loop, "fcfs", seed)
        for predictor in asked.predictors:
            other = fleet.run(loop, predictor, seed)
            rows.setdefault(predictor, []).append((
                float(base["e2e"].mean()), float(other["e2e"].mean()), other["tau"],
                *p99_ratios(base, other),
            ))  # fmt: skip
    print(f"{'predictor':12} {'FCFS s':>8} {'SRPT s':>8} {'ratio':>6} {'spread':>12} {'tau':>5}"
          "  P99 of each class, the worst of the seeds")  # fmt: skip
    for predictor, figures in rows.items():
        fcfs, srpt, tau, *p99 = np.array(figures).T
        ratios = srpt / fcfs
        print(
            f"{predictor:12} {fcfs.mean():8.2f} {srpt.mean():8.2f} {srpt.sum() / fcfs.sum():6.3f} "
            f"{ratios.min():5.3f}-{ratios.max():5.3f} {tau.mean():5.2f}  "
            + " ".join(f"{of_class.max():.2f}" for of_class in p99)
        )


if __name__ == "__main__":
    main()
