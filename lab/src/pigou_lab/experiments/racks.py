"""Claims about racks: 6 times by disaggregation and wide expert parallelism, 30 times over Hopper.

NVIDIA's figures are of its own simulation of DeepSeek-R1 on GB200 NVL72 (dynamo-architecture,
articles 4 and 10), in FP4 and without a table. Here all weights are FP8, and contenders are the
best of their kind by the analysis of `pigou plan`, then simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pigou.capacity.plan.analysis import Analysis, Configuration, PlannedPool, WorkerKind
from pigou.capacity.plan.demand import read_demand
from pigou.capacity.plan.plan import PlanRequest, make_trial
from pigou.capacity.plan.search_space import Candidate
from pigou.capacity.plan.trial import run_trial
from pigou.models.read import architecture
from pigou.objectives import Slo
from pigou.request import Role
from pigou.sim.network import LinkConfig
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.results import COMPARED, Row, over_seeds

#: Objectives of ITL in milliseconds; GPUs of each contender; tokens of a prompt and an output.
LEVELS, GPUS, ISL, OSL = (10, 15, 40), 64, 4096, 1024
_MODEL, _TTFT_S, _REQUESTS = "deepseek-r1", 5.0, 100
_BATCHES, _CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1024, 2048, 8192)
#: GPU, whether prefill and decode are apart, and (tp, dp) of workers that may be tried.
CONTENDERS: Mapping[str, tuple[str, bool, Sequence[tuple[int, int]]]] = {
    "hopper": ("H200", False, [(8, 1)]),
    "colocated": ("GB200", False, [(8, 1)]),
    "split": ("GB200", True, [(8, 1)]),
    "colocated-ep": ("GB200", False, [(1, 8), (1, 16), (1, 32), (1, 64)]),
    "split-ep": ("GB200", True, [(1, 8), (1, 16), (1, 32)]),
}
#: Simulated rates begin at the analysis's limit, and rise or fall by this factor; most steps.
_STEP, _STEPS = 1.15, 8


def racks(_: PaperFleet, __: Reading, seeds: Sequence[int], levels: Sequence[int]) -> Iterator[Row]:
    """Yield a row for each objective and contender: tokens/s of a GPU inside it."""
    for itl_ms in levels:
        for name in CONTENDERS:
            runs = [{"seed": seed, **_figures(name, itl_ms, seed)} for seed in seeds]
            row: Row = {"experiment": "racks", "concurrency": itl_ms, "contender": name}
            known = {key: [run[key] for run in runs] for key in ("analysed", "tok_s_gpu", "inside")}
            yield dict.fromkeys(COMPARED) | row | over_seeds(known) | {
                "made": runs[0]["made"], "runs": runs,
            }  # fmt: skip


def _figures(name: str, itl_ms: int, seed: int) -> dict[str, Any]:
    shape, slo = architecture(_MODEL), Slo(ttft_s=_TTFT_S, itl_s=itl_ms / 1000)
    demand = read_demand(f"mix=1:{ISL}/{OSL},rate=10", seed)
    analysis = Analysis(shape, demand, slo, LinkConfig(per="gpu"), {})
    best = max(_candidates(name, analysis), key=lambda candidate: candidate.limit_rps)
    per_gpu = OSL / best.configuration.total_gpus
    figures: dict[str, Any] = {
        "made": best.configuration.name, "analysed": best.limit_rps * per_gpu,
        "tok_s_gpu": 0.0, "inside": 0.0,
    }  # fmt: skip
    request = PlanRequest(model=_MODEL, gpus={}, slo=slo, seed=seed)
    rate, rising = best.limit_rps, None
    for _ in range(_STEPS if rate else 0):
        seen = run_trial(make_trial(request, analysis, best, rate, _REQUESTS), slo)
        inside = seen.attained >= slo.share
        if inside:
            figures |= {"inside": seen.attained, "tok_s_gpu": rate * per_gpu}
        if rising is not None and inside is not rising:
            break  # the highest rate is known to a step
        rising = inside
        rate *= _STEP if rising else 1.0 / _STEP
    return figures


def _candidates(name: str, analysis: Analysis) -> Iterator[Candidate]:
    gpu, apart, widths = CONTENDERS[name]
    kinds = [
        WorkerKind(gpu=gpu, tp=tp, kv_dtype="", max_seqs=batch, chunk=chunk, dp=dp, ep=dp > 1)
        for tp, dp in widths for batch in _BATCHES for chunk in _CHUNKS
    ]  # fmt: skip
    if not apart:
        for kind in kinds:
            pool = PlannedPool(role=Role.BOTH, kind=kind, workers=GPUS // kind.gpus)
            limit = analysis.limit_rps(Role.BOTH, kind, pool.workers)
            yield Candidate(Configuration(pools=(pool,)), limit)
        return
    prefills = [kind for kind in kinds if (kind.gpus, kind.max_seqs) == (8, 64)]
    for first in prefills:
        for second in kinds if first.chunk == _CHUNKS[-1] else ():
            for count in range(1, GPUS // first.gpus):
                room = (GPUS - count * first.gpus) // second.gpus
                if not room or second.chunk != _CHUNKS[1]:
                    continue
                pools = (
                    PlannedPool(role=Role.PREFILL, kind=first, workers=count),
                    PlannedPool(role=Role.DECODE, kind=second, workers=room),
                )
                limit = analysis.split_limit_rps((first, count), (second, room))
                yield Candidate(Configuration(pools=pools), limit)


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return by objective what `split-ep` serves over co-located nodes, and over Hopper."""
    tok_s = {(row["concurrency"], row["contender"]): row["tok_s_gpu"] for row in rows}
    ratios: dict[str, Any] = {}
    for itl_ms in sorted({level for level, _ in tok_s}):
        best = max(tok_s.get((itl_ms, name), 0.0) for name in ("split-ep", "colocated-ep"))
        for claim, rival in (("6x", "colocated"), ("30x", "hopper")):
            if tok_s.get((itl_ms, rival)):
                ratios[f"{claim}_at_{itl_ms}_ms"] = best / tok_s[itl_ms, rival]
    return ratios
