"""Plans of mixtures of experts: ranks analysed as workers, and files that start them."""

from __future__ import annotations

import pytest
import yaml
from msgspec.structs import replace

from pigou.capacity.plan.analysis import Analysis, Configuration, PlannedPool, WorkerKind
from pigou.capacity.plan.demand import read_demand
from pigou.capacity.plan.output import _groups, _worker_commands, helm_values
from pigou.capacity.plan.plan import PlanRequest, make_trial
from pigou.capacity.plan.search_space import Candidate
from pigou.capacity.plan.trial import run_trial, trial_figures
from pigou.fleet.kubernetes.fleet_spec import read_fleet
from pigou.models.read import architecture
from pigou.objectives import Slo
from pigou.request import Role
from pigou.sim.network import LinkConfig

SLO = Slo(ttft_s=2.0, itl_s=0.05)
KIND = WorkerKind(gpu="H100", tp=1, kv_dtype="", max_seqs=64, chunk=2048, dp=8, ep=True)
QWEN = "qwen3-30b-a3b"


def analysis(expert_load: str = "", model: str = QWEN) -> Analysis:
    demand = read_demand("mix=1:1000/100,rate=20", 0)
    return Analysis(architecture(model), demand, SLO, LinkConfig(per="gpu"), {}, expert_load)


def both(workers: int) -> Configuration:
    return Configuration(pools=(PlannedPool(role=Role.BOTH, kind=KIND, workers=workers),))


@pytest.mark.slow
def test_the_analysis_of_ranks_is_near_the_simulation_of_their_worker() -> None:
    made, seen = both(1), analysis()
    request = PlanRequest(model=QWEN, gpus={"H100": 8}, slo=SLO)
    trial = make_trial(request, seen, Candidate(made, 20.0), 20.0, 150)
    simulated = trial_figures(seen, trial, run_trial(trial, SLO))
    analysed = seen.figures(made, 20.0)
    assert abs(analysed.itl_s / simulated.itl_s - 1.0) < 0.25
    assert abs(analysed.e2e_s / simulated.e2e_s - 1.0) < 0.25
    assert made.total_gpus == 8


def test_hot_experts_lower_what_a_prefill_pool_holds() -> None:
    kind = replace(KIND, dp=32, chunk=8192)
    even, hot = (
        analysis(load, "deepseek-v3").limit_rps(Role.PREFILL, kind, 1) for load in ("", "zipf:0.8")
    )
    assert even > 1.2 * hot > 0.0


def test_files_of_a_plan_start_ranks_with_vllm_s_options() -> None:
    wide = both(2)
    command = _worker_commands(wide, QWEN)
    assert "--data-parallel-size 8 --enable-expert-parallel" in command
    (group,) = yaml.safe_load(yaml.safe_dump(_groups(wide)))
    assert (group["tp"], group["dp"], group["ep"], group["count"]) == (1, 8, True, 2)
    request = PlanRequest(model=QWEN, gpus={"H100": 16}, slo=SLO)
    (pool,) = read_fleet(helm_values(wide, request)["fleet"]["spec"]).models[0].pools
    assert (pool.parallelism.tp, pool.parallelism.dp, pool.parallelism.ep) == (1, 8, True)
    assert (pool.gpus_per_replica, pool.hosts_per_replica) == (8, 1)


def test_ranks_of_several_nodes_are_pods_of_as_many_hosts() -> None:
    kind = replace(KIND, dp=32)
    made = Configuration(pools=(PlannedPool(role=Role.BOTH, kind=kind, workers=1),))
    request = PlanRequest(model=QWEN, gpus={"H100": 32}, slo=SLO)
    (pool,) = read_fleet(helm_values(made, request)["fleet"]["spec"]).models[0].pools
    assert (pool.gpus_per_replica, pool.hosts_per_replica) == (32, 4)
