"""The racks' experiment: contenders of the size that it says, and its verdict."""

from __future__ import annotations

from pigou.capacity.plan.analysis import Analysis
from pigou.capacity.plan.demand import read_demand
from pigou.models.read import architecture
from pigou.objectives import Slo
from pigou.sim.network import LinkConfig
from pigou_lab.experiments.racks import CONTENDERS, GPUS, _candidates, verdict


def test_contenders_take_their_gpus_and_no_more() -> None:
    demand = read_demand("mix=1:512/64,rate=10", 0)
    slo = Slo(ttft_s=5.0, itl_s=0.04)
    shape = architecture("deepseek-r1")
    for name in CONTENDERS:
        analysis = Analysis(shape, demand, slo, LinkConfig(per="gpu"), {})
        analysis.limit_rps = analysis.split_limit_rps = lambda *_: 1.0  # type: ignore[method-assign,assignment]
        made = [candidate.configuration for candidate in _candidates(name, analysis)]
        assert made
        assert max(one.total_gpus for one in made) == GPUS
        assert {len(one.pools) for one in made} == ({2} if name.startswith("split") else {1})


def test_the_verdict_compares_wide_experts_with_nodes_and_with_hopper() -> None:
    served = {"hopper": 100.0, "colocated": 400.0, "split": 450.0, "colocated-ep": 2000.0,
              "split-ep": 2400.0}  # fmt: skip
    rows = [{"concurrency": 15, "contender": n, "tok_s_gpu": v} for n, v in served.items()]
    rows.append({"concurrency": 10, "contender": "colocated", "tok_s_gpu": 0.0})
    assert verdict(rows) == {"6x_at_15_ms": 6.0, "30x_at_15_ms": 24.0}
