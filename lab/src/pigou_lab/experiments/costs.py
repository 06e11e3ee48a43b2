"""Cost claims, simulated: utilisation, throughput of a split, milliseconds of SLO.

Cost is fleet cost per output token at goodput: the highest Poisson rate with a share `SHARE` of
requests inside the objective, by bisection. Claims:
1. 30 + 70 GPUs at 90% serve a token at 0.556 of the price of 100 at 50% (dynamo-architecture 8).
2. Disaggregation serves 2 times as much of Llama-70B, 30 times of DeepSeek-R1 (`R1_SIZED`).
3. 20 ms of SLO cost 1.85 times as much (Vidur); the prompt chunk is chosen anew for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pigou.cost.fleet_bill import FleetBill
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import ScalingConfig, read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.workload import RequestLengths, renewal
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.results import COMPARED, Row, over_seeds, run_simulation

#: Share of the requests that shall be inside, the bracket that ends a search, and its simulations.
SHARE, BRACKET, TRIALS = 0.95, 1.05, 11
LEVELS = (1, 2, 3)
_SPLITS = ("10xboth", "2p+8d", "3p+7d", "4p+6d")
#: Requests of a simulation that says something.
_MIN_REQUESTS = 10
_CHUNKS = (512, 2048)
#: Objectives of ITL; a step later it is 20 ms longer.
_ITLS_MS, _STEP_MS = (24, 28, 32, 40, 60), 20
#: DeepSeek-R1's layers, width, experts (one more chosen, for the shared one), weights in FP8, and
#: bytes of KV: the latent cache of 576 numbers is one KV head of 288.
R1_SIZED: Mapping[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 61, "hidden_size": 7168,
    "num_attention_heads": 48, "num_key_value_heads": 1, "head_dim": 288,
    "intermediate_size": 2048, "moe_intermediate_size": 2048, "num_experts": 256,
    "num_experts_per_tok": 9, "vocab_size": 129_280, "max_position_embeddings": 131_072,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CostCase:
    """A fleet and its load."""

    fleet: str  # like `3p+7d`
    setup: Setup
    lengths: RequestLengths
    slo: str
    start_rps: float  # where the search for its goodput begins
    seconds: float = 12.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """Highest rate of a fleet inside the objective, and its bill."""

    rate_rps: float
    bill: FleetBill

    @property
    def usd_per_million(self) -> float:
        """Dollars of the fleet for a million output tokens inside the objective."""
        made = self.bill.document()["usd_per_million"]["all_per_output_at_slo"]
        return float("inf") if made is None else float(made)


def costs(_: PaperFleet, __: Reading, seeds: Sequence[int], levels: Sequence[int]) -> Iterator[Row]:
    """Yield a row for each contender of each claim; levels are the claims' numbers."""
    for level in levels:
        if level == 1:
            yield from _splits(seeds)
        elif level == 2:
            yield from _throughputs(seeds)
        else:
            yield from _objectives(seeds)


def goodput(case: CostCase, seed: int) -> Goodput:
    """Return the goodput of a fleet: doubled or halved to a bracket, then bisected."""
    best: Goodput | None = None
    rate, low, high = case.start_rps, 0.0, 0.0
    for _ in range(TRIALS):
        bill = _bill(case, rate, seed)
        if (bill.attained or 0.0) >= SHARE:
            low, best = rate, Goodput(rate, bill)
        else:
            high = rate
        if low and high and high / low < BRACKET:
            break
        rate = (low * high) ** 0.5 if low and high else (2.0 * low or high / 2.0)
        if rate * case.seconds < _MIN_REQUESTS:
            break
    return best or Goodput(0.0, bill)


def _bill(case: CostCase, rate: float, seed: int) -> FleetBill:
    control = unlimited(seed=seed)
    load = renewal(case.lengths, rate, 1.0, 0, case.seconds, seed)
    fleet, scaling = read_fleet(case.fleet), ScalingConfig(slo=case.slo)
    simulation = Simulation(
        load, fleet, case.setup, control, ClientConfig(), seed=seed, scaling=scaling
    )
    made = run_simulation(simulation, fleet=case.fleet, rps=f"{rate:g}", seed=seed)
    assert made.bill is not None
    return made.bill


def _splits(seeds: Sequence[int]) -> Iterator[Row]:
    setup = Setup(model="llama-3.1-8b", gpu="H100", prices="default")
    lengths = RequestLengths(input=(400, 1200), output=(125, 375))
    for itl_s in (0.015, 0.05):
        slo = f"ttft=1.0,itl={itl_s}"
        whole = _measured(CostCase(_SPLITS[0], setup, lengths, slo, 150.0), seeds)
        yield _row(1, _SPLITS[0], itl_s, whole, whole)
        for fleet in _SPLITS[1:]:
            made = _measured(CostCase(fleet, setup, lengths, slo, whole[0].rate_rps), seeds)
            yield _row(1, fleet, itl_s, made, whole)


def _throughputs(seeds: Sequence[int]) -> Iterator[Row]:
    lengths = RequestLengths(input=(2000, 4000), output=(100, 200))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(R1_SIZED))
        for model, gpu, tp, fleets, rate in (
            ("llama-3.1-70b", "H100", 4, ("4xboth", "1p+3d", "2p+2d", "3p+1d"), 10.0),
            (str(file), "GB200", 8, ("4xboth", "1p+3d", "2p+2d", "3p+1d"), 40.0),
        ):
            setup = Setup(model=model, gpu=gpu, tp=tp, prices="default")
            for itl_s in (0.02, 0.05):
                slo = f"ttft=2.0,itl={itl_s}"
                whole = _measured(CostCase(fleets[0], setup, lengths, slo, rate), seeds)
                name = model if model != str(file) else "R1-sized"
                yield _row(2, f"{name} {fleets[0]}", itl_s, whole, whole)
                for fleet in fleets[1:]:
                    start = whole[0].rate_rps or rate
                    made = _measured(CostCase(fleet, setup, lengths, slo, start), seeds)
                    yield _row(2, f"{name} {fleet}", itl_s, made, whole)


def _objectives(seeds: Sequence[int]) -> Iterator[Row]:
    lengths = RequestLengths(input=(200, 1200), output=(100, 300))
    made: dict[int, list[Goodput]] = {}
    for itl_ms in sorted({*_ITLS_MS, *(itl_ms + _STEP_MS for itl_ms in _ITLS_MS)}, reverse=True):
        slo = f"ttft=2.0,itl={itl_ms / 1000}"
        made[itl_ms] = []
        for seed in seeds:
            tries = []
            for chunk in _CHUNKS:
                setup = Setup(
                    model="llama-3.1-70b", gpu="A100", tp=4, prices="default",
                    max_batched_tokens=chunk,
                )  # fmt: skip
                tries.append(goodput(CostCase("1xboth", setup, lengths, slo, 5.0, 60.0), seed))
            made[itl_ms].append(min(tries, key=lambda item: item.usd_per_million))
        base = made.get(itl_ms + _STEP_MS, made[itl_ms])
        yield _row(3, "1xboth", itl_ms / 1000, made[itl_ms], base)


def _measured(case: CostCase, seeds: Sequence[int]) -> list[Goodput]:
    return [goodput(case, seed) for seed in seeds]


def _row(
    claim: int, contender: str, itl_s: float, made: Sequence[Goodput], base: Sequence[Goodput]
) -> Row:
    """Return a row; ratios are to the claim's base, by seed (`price_ratio` is base over this)."""
    rates = [
        a.rate_rps / b.rate_rps if b.rate_rps else None for a, b in zip(made, base, strict=True)
    ]
    known = [rate for rate in rates if rate is not None]
    prices = [
        b.usd_per_million / a.usd_per_million
        for a, b in zip(made, base, strict=True)
        if a.rate_rps and b.rate_rps
    ]
    row: Row = {
        "experiment": "costs", "concurrency": claim, "contender": contender, "itl_slo_s": itl_s,
        "goodput_ratio_range": [min(known), max(known)] if known else None,
        "runs": [
            {"rate_rps": item.rate_rps, "usd_per_million": item.usd_per_million} for item in made
        ],
    }  # fmt: skip
    row |= over_seeds({
        "goodput_rps": [item.rate_rps for item in made],
        "usd_per_million": [item.usd_per_million for item in made],
        "in_use": [item.bill.utilisation for item in made],
        "goodput_ratio": known,
        "price_ratio": prices,
        "joules_per_token": [item.bill.joules / max(item.bill.total.output_tokens, 1)
                             for item in made],
    })  # fmt: skip
    return row | dict.fromkeys(COMPARED)


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return each claim's verdict: best split, largest price step."""
    made: dict[str, Any] = {"utilisation_alone": 0.5 / 0.9}
    splits = [row for row in rows if row["concurrency"] == 1]
    for itl_s in sorted({row["itl_slo_s"] for row in splits}):
        own = [row for row in splits if row["itl_slo_s"] == itl_s and row["goodput_ratio"]]
        named = {row["contender"]: row["goodput_ratio"] for row in own}
        if named:
            best = max(named, key=lambda name: float(named[name]))
            made[f"split_at_itl_{itl_s:g}"] = {
                "best": best,
                "ratio": named[best],
                "30+70": named.get("3p+7d"),
            }
    throughput = [row for row in rows if row["concurrency"] == 2]
    for model in sorted({str(row["contender"]).split()[0] for row in throughput}):
        ratios = [
            float(row["goodput_ratio"])
            for row in throughput
            if str(row["contender"]).startswith(model) and row["goodput_ratio"]
        ]
        made[f"throughput_{model}"] = max(ratios) if ratios else None
    steps = [
        1.0 / float(row["price_ratio"])
        for row in rows
        if row["concurrency"] == 3 and row["price_ratio"]
    ]
    if steps:
        made["largest_step_of_20_ms"] = max(steps)
    return made
