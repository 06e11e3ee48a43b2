"""`pigou plan` beside AIConfigurator: time of both, and whose choice keeps the objective for less.

    PIGOU_PEER_AICONFIGURATOR=DIR python -m benchmarks.capacity.beside_aiconfigurator [--only NAME]

Both are asked by their commands, alone on the machine, for the same model, GPUs and objective. The
peer takes one pair of lengths: the trace's means, and its mean shared prefix. Its choices (best
shared, best apart) run with the batches that it writes, and with those of vLLM (256); the better
one counts. All are simulated by Pigou, with a seed that no plan had: without a rate, at the highest
rate inside the objective; with one, at that rate. A choice that fails is also enlarged, a GPU's
worth of workers at a time, until it holds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.peers import aiconfigurator_home
from benchmarks.lib.shared_folder import shared_folder
from pigou.capacity.plan.analysis import (
    Analysis,
    Configuration,
    LoadFigures,
    PlannedPool,
    WorkerKind,
)
from pigou.capacity.plan.demand import Demand, read_demand
from pigou.capacity.plan.plan import PlanRequest, make_trial
from pigou.capacity.plan.search_space import Candidate
from pigou.capacity.plan.trial import run_trial, trial_figures
from pigou.cost.usage import usd_per_million_at
from pigou.models.architecture import Architecture
from pigou.models.read import architecture
from pigou.objectives import Slo
from pigou.request import Role
from pigou.sim.network import LinkConfig

_MODEL, _GPU, _GPUS, _USD = "Qwen3-32B-FP8", "H200", 32, 4.0
#: Seed of the judging simulations, and requests that they measure.
_SEED, _REQUESTS = 7, 1500
_VLLM_BATCH = 256
_PRECISION = 1.04


@dataclass(frozen=True)
class Case:
    """A workload and its objective."""

    workload: str
    ttft_s: float
    itl_s: float

    @property
    def slo(self) -> Slo:
        """The objective, for 95% of the requests."""
        return Slo(ttft_s=self.ttft_s, itl_s=self.itl_s)


def cases() -> dict[str, Case]:
    """Return the workloads by name: the peer's own example, and two traces."""
    traces = shared_folder() / "traces"
    return {
        "example": Case("mix=1:4000/500,prefix=500", 0.3, 0.01),
        "conversation": Case(str(traces / "mooncake/conversation_trace.jsonl.zst"), 4.0, 0.02),
        "code": Case(str(traces / "azure/AzureLLMInferenceTrace_code.csv.zst"), 1.0, 0.015),
    }


def timed(command: Sequence[str], environment: dict[str, str] | None = None) -> tuple[float, float]:
    """Run a command; return its seconds, and those of all its processors."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, cpu_s


def pool(role: Role, tp: int, workers: int, batch: int, chunk: int, kv: str) -> PlannedPool:
    """Return a pool of workers of the GPU that all cases use."""
    kind = WorkerKind(gpu=_GPU, tp=tp, kv_dtype=kv, max_seqs=batch, chunk=chunk)
    return PlannedPool(role=role, kind=kind, workers=workers)


def own_choice(case: Case, folder: Path) -> tuple[Configuration, float, float]:
    """Return what `pigou plan` recommends, its seconds and processor seconds."""
    file = folder / "plan.json"
    taken = timed(
        [sys.executable, "-m", "pigou", "plan", "--workload", case.workload, "--model", _MODEL,
         "--gpus", f"{_GPU}:{_GPUS}", "--prices", f"{_GPU}={_USD}",
         "--slo", f"ttft={case.ttft_s},itl={case.itl_s}", "--json", str(file)],
    )  # fmt: skip
    best = json.loads(file.read_text())["best"]
    kv = best["kv_dtype"] if best["kv_dtype"] != "model" else ""
    counts = best["workers"]
    pools = tuple(
        pool(Role(role), tp, counts[role], best["batch"][role], best["chunk"][role], kv)
        for role, tp in best["tp"].items()
    )
    return Configuration(pools=pools), *taken


def peer_choices(
    case: Case, demand: Demand, folder: Path
) -> tuple[list[Configuration], float, float]:
    """Return what AIConfigurator ranks first of each kind, its seconds and processor seconds."""
    mix, home = demand.mix, aiconfigurator_home()
    size = (
        ["--target-request-rate", f"{demand.rate_rps:.3f}"]
        if demand.rate_rps
        else ["--total-gpus", str(_GPUS)]
    )
    taken = timed(
        [str(home / "bin" / "aiconfigurator"), "cli", "default", "--model-path", f"Qwen/{_MODEL}",
         "--system", "h200_sxm", "--isl", f"{mix.isl:.0f}", "--osl", f"{mix.osl:.0f}",
         "--prefix", f"{mix.hit_rate * mix.isl:.0f}", "--ttft", f"{case.ttft_s * 1000:g}",
         "--tpot", f"{case.itl_s * 1000:g}", "--strict-sla", "--save-dir", str(folder), *size],
    )  # fmt: skip
    made = [
        configuration
        for file in sorted(folder.rglob("best_config_topn.csv"))
        for row in list(csv.DictReader(file.open()))[:1]
        for configuration in peer_configurations(row, demand)
    ]
    return made, *taken


def peer_configurations(row: dict[str, str], demand: Demand) -> list[Configuration]:
    """Return a row of the peer's results with its own batches, and with vLLM's.

    A replica is the smallest unit; all replicas are one fleet here, which can only help.
    """
    unit = int(row["num_total_gpus"])
    replicas = int(row.get("replicas_needed") or _GPUS // unit)
    longest = -(-demand.max_tokens // 16) * 16
    made = []
    if "(p)tp" in row:
        for batch in (int(row["(d)bs"]), _VLLM_BATCH):
            first = int(row["(p)workers"]) * replicas, max(int(row["(p)bs"]), 1)
            chunk = max(int(row["(p)bs"]) * longest, 2048)
            made.append(Configuration(pools=(
                pool(Role.PREFILL, int(row["(p)tp"]), first[0], max(first[1], 8), chunk, "fp8"),
                pool(Role.DECODE, int(row["(d)tp"]), int(row["(d)workers"]) * replicas, batch,
                     2048, "fp8"),
            )))  # fmt: skip
        return made
    for batch in (int(row["bs"]), _VLLM_BATCH):
        chunk = max(round(float(row["num_tokens"])), 2048)
        made.append(
            Configuration(pools=(pool(Role.BOTH, int(row["tp"]), replicas, batch, chunk, "fp8"),))
        )
    return made


class Judge:
    """Simulates choices under a workload, with a seed of its own."""

    def __init__(self, case: Case, demand: Demand, shape: Architecture) -> None:
        self._request = PlanRequest(
            model=_MODEL, gpus={_GPU: _GPUS}, slo=case.slo, usd_per_hour={_GPU: _USD}, seed=_SEED
        )
        self._slo = case.slo
        self._analysis = Analysis(shape, demand, case.slo, LinkConfig(), {_GPU: _USD})

    def figures(self, made: Configuration, rate_rps: float) -> LoadFigures:
        """Return what a choice does at a rate."""
        trial = make_trial(
            self._request, self._analysis, Candidate(made, rate_rps), rate_rps, _REQUESTS
        )
        return trial_figures(self._analysis, trial, run_trial(trial, self._slo))

    def highest(self, made: Configuration, start_rps: float) -> LoadFigures:
        """Return the figures at the highest rate inside the objective, to within 4%."""
        low, high, best = 0.0, 0.0, None
        rate = start_rps
        while not (low and high) or high / low > _PRECISION:
            seen = self.figures(made, rate)
            if (seen.attained or 0.0) >= self._slo.share:
                low, best = rate, seen
            else:
                high = rate
            rate = (low * high) ** 0.5 if low and high else (low * 1.3 or high / 1.3)
            if rate < 0.01 * start_rps:
                break
        return best or seen

    def enlarged(self, made: Configuration, rate_rps: float) -> tuple[Configuration, LoadFigures]:
        """Return the smallest enlargement that holds a rate: all pools times the same factor."""
        pools = made.pools
        for extra in range(8 * _GPUS):
            share = 1.0 + extra / min(pool.workers for pool in pools)
            grown = Configuration(pools=tuple(
                pool(one.role, one.kind.tp, round(one.workers * share), one.kind.max_seqs,
                     one.kind.chunk, one.kind.kv_dtype)
                for one in pools
            ))  # fmt: skip
            seen = self.figures(grown, rate_rps)
            if (seen.attained or 0.0) >= self._slo.share or grown.total_gpus > 4 * _GPUS:
                return grown, seen
        return grown, seen


def show(label: str, made: Configuration, figures: LoadFigures) -> None:
    """Print a choice as it was simulated."""
    usd = usd_per_million_at(_USD, 1, figures.output_tok_s_per_gpu)
    print(f"  {label:32} {made.name:9} tp {'/'.join(map(str, made.tp.values())):4} "
          f"batch {'/'.join(map(str, made.batch.values())):8} {made.total_gpus:3} GPUs, "
          f"{figures.rate_rps:6.2f} requests/s: TTFT p95 {figures.ttft_s:6.3f} s, ITL p95 "
          f"{figures.itl_s * 1e3:5.2f} ms, {figures.attained or 0.0:6.1%} inside, "
          f"${made.total_gpus * _USD:.0f}/h, ${usd:.3f} a million output tokens")  # fmt: skip


def compare(name: str, case: Case) -> None:
    """Ask both, simulate their choices, and print what came out."""
    demand = read_demand(case.workload, _SEED)
    judge = Judge(case, demand, architecture(_MODEL))
    with tempfile.TemporaryDirectory() as folder:
        own, own_s, own_cpu_s = own_choice(case, Path(folder))
        peers, peer_s, peer_cpu_s = peer_choices(case, demand, Path(folder))
    mix = demand.mix
    print(
        f"{name}: {mix.isl:.0f}/{mix.osl:.0f} tokens, {mix.hit_rate:.0%} shared, "
        f"{demand.rate_rps:.2f} requests/s; TTFT {case.ttft_s:g} s, ITL {case.itl_s * 1e3:g} ms\n"
        f"  seconds: pigou {own_s:.1f} ({own_cpu_s:.1f} of processors), aiconfigurator "
        f"{peer_s:.1f} ({peer_cpu_s:.1f})"
    )
    for label, made in _labelled(own, peers):
        if not demand.rate_rps:
            show(label, made, judge.highest(made, 30.0))
            continue
        seen = judge.figures(made, demand.rate_rps)
        show(label, made, seen)
        if (seen.attained or 0.0) < case.slo.share:
            show(f"{label}, enlarged", *judge.enlarged(made, demand.rate_rps))
    sys.stdout.flush()


def _labelled(
    own: Configuration, peers: Sequence[Configuration]
) -> Iterable[tuple[str, Configuration]]:
    yield "pigou plan", own
    for made in peers:
        kind = "apart" if len(made.pools) > 1 else "shared"
        yield f"aiconfigurator, {kind}", made


def main() -> None:
    """Compare on each workload."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", "src")
    for name, case in cases().items():
        if args.only in name:
            compare(name, case)


if __name__ == "__main__":
    main()
