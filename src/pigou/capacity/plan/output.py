"""Output of a plan: its figures, and the files that start the recommended fleet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pigou.capacity.plan.analysis import (
    Configuration,
    PlannedPool,
    WorkerKind,
    plan_joules_per_token,
)
from pigou.capacity.plan.plan import CapacityPlan, PlannedConfiguration, PlanRequest
from pigou.config import ConfigError
from pigou.models.read import architecture

#: Image of vLLM workers, and the label that tells nodes of one GPU.
VLLM_IMAGE, _GPU_LABEL = "vllm/vllm-openai:v0.33.0", "pigou.dev/gpu"
_VALUES_HEADING = (
    "# helm install pigou deploy/helm/pigou --values values.yaml\n"
    f"# Give the model its hub id, and the nodes the label {_GPU_LABEL}.\n"
)


def plan_document(plan: CapacityPlan, request: PlanRequest) -> dict[str, Any]:
    """Return the document of `--json`."""
    demand, model = plan.demand, architecture(request.model)

    def document(item: PlannedConfiguration, standing: str) -> dict[str, Any]:
        joules = plan_joules_per_token(item.configuration, item.figures, demand.mix, model)
        return configuration_document(item, standing) | {"joules_per_output_token": joules}

    return {
        "model": request.model,
        "gpus": request.gpus,
        "slo": msgspec.to_builtins(request.slo),
        "workload": {
            "rate_rps": demand.rate_rps, "prompt_tokens": demand.mix.isl,
            "output_tokens": demand.mix.osl, "hit_rate": demand.mix.hit_rate,
        },
        "configurations": plan.configurations,
        "seconds": plan.seconds,
        "analytic_seconds": plan.analytic_seconds,
        "meets": plan.meets,
        "best": document(plan.best, "best"),
        "pareto": [document(item, "pareto") for item in plan.pareto],
        "dominated": [document(item, "dominated") for item in plan.dominated],
        "duals": plan.duals,
        "tiers": None if plan.tiers is None else msgspec.to_builtins(plan.tiers),
    }  # fmt: skip


def configuration_document(item: PlannedConfiguration, standing: str) -> dict[str, Any]:
    """Return the figures of a configuration; latencies at the percentile of the objective."""
    made, figures = item.configuration, item.figures
    return {
        "fleet": made.name,
        "standing": standing,
        "gpus": made.gpus,
        "tp": made.tp,
        "dp": made.dp,
        "workers": {pool.role.value: pool.workers for pool in made.pools},
        "batch": made.batch,
        "chunk": {pool.role.value: pool.kind.chunk for pool in made.pools},
        "kv_dtype": made.kv_dtype or "model",
        "rate_rps": figures.rate_rps,
        "ttft_s": figures.ttft_s,
        "itl_s": figures.itl_s,
        "e2e_s": figures.e2e_s,
        "output_tok_s_per_gpu": figures.output_tok_s_per_gpu,
        "usd_per_million_output": figures.usd_per_million_output,
        "attained": figures.attained,
        "analysed": {
            "ttft_s": item.analysed.ttft_s, "itl_s": item.analysed.itl_s,
            "e2e_s": item.analysed.e2e_s,
        },
        "error": item.error,
    }  # fmt: skip


def write_files(plan: CapacityPlan, request: PlanRequest, folder: Path) -> list[Path]:
    """Write the files of the recommended configuration.

    `fleet.yaml` is for `pigou simulate --fleet`; `serve.yaml` and `planner.yaml` for `pigou serve
    --config` on the gateway, of workers that stay and that a planner starts; `workers.sh` starts
    the workers, one command a pool; `values.yaml` are values of the Helm chart.
    """
    made = plan.best.configuration
    slo = request.slo
    objective = f"ttft={slo.ttft_s:g},itl={slo.itl_s:g},percentile={slo.percentile:g}"
    files = {
        "fleet.yaml": yaml.safe_dump({"workers": _groups(made)}, sort_keys=False),
        "serve.yaml": yaml.safe_dump(
            {"policy": "toll", "slo": objective, "attach": _addresses(made)}, sort_keys=False
        ),
        "planner.yaml": yaml.safe_dump(
            {
                "policy": "toll",
                "slo": objective,
                "planner": "price",
                "max-workers": sum(pool.workers for pool in made.pools),
            },
            sort_keys=False,
        ),
        "workers.sh": _worker_commands(made, request.model),
        "values.yaml": _VALUES_HEADING
        + yaml.safe_dump(helm_values(made, request), sort_keys=False),
    }
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
            written.append(folder / name)
    except OSError as error:
        raise ConfigError(f"--out is {str(folder)!r}: {error.strerror}") from None
    return written


def _groups(made: Configuration) -> list[dict[str, Any]]:
    return [
        {
            "role": pool.role.value, "count": pool.workers, "gpu": pool.kind.gpu,
            "tp": pool.kind.tp, "max_seqs": pool.kind.max_seqs,
            "max_batched_tokens": pool.kind.chunk,
            **({"dp": pool.kind.dp, "ep": pool.kind.ep} if pool.kind.ep else {}),
        }
        for pool in made.pools
    ]  # fmt: skip


def _addresses(made: Configuration) -> list[str]:
    return [
        f"http://{pool.role.value}-{number}:8000,role={pool.role.value}"
        for pool in made.pools
        for number in range(pool.workers)
    ]


def helm_values(made: Configuration, request: PlanRequest) -> dict[str, Any]:
    """Return values of `deploy/helm/pigou`: a `PigouFleet` of vLLM workers, within the GPUs."""
    name = re.sub("[^a-z0-9]+", "-", Path(request.model).name.lower()).strip("-")[:30].strip("-")
    if not name[:1].isalpha():
        name = f"m-{name}"[:30].strip("-")
    slo = request.slo
    spec: dict[str, Any] = {"image": "pigou-worker:0.1.0", "budget": {"gpus": made.total_gpus}}
    if max(slo.ttft_s, slo.itl_s) < float("inf"):
        spec["slo"] = {
            "ttftSeconds": slo.ttft_s, "itlSeconds": slo.itl_s, "percentile": slo.percentile,
        }  # fmt: skip
    spec["gateway"] = {
        "replicas": 1, "image": "pigou-gateway:0.1.0", "args": ["--policy", "toll"],
        "apiKeysSecret": "pigou-keys",
    }  # fmt: skip
    pools = [_helm_pool(pool) for pool in made.pools]
    spec["models"] = [{"name": name, "model": request.model, "pools": pools}]
    return {"fleet": {"name": name, "spec": spec}}


def _helm_pool(pool: PlannedPool) -> dict[str, Any]:
    return {
        "role": pool.role.value, "engine": "vllm", "image": VLLM_IMAGE,
        "replicas": pool.workers, "gpusPerReplica": pool.kind.gpus,
        **({"hostsPerReplica": pool.kind.gpus // 8} if pool.kind.gpus > 8 else {}),
        "parallelism": {"tp": pool.kind.tp}
        | ({"dp": pool.kind.dp, "ep": True} if pool.kind.ep else {}),
        "args": _limits(pool.kind),
        "nodeSelector": {_GPU_LABEL: pool.kind.gpu},
    }  # fmt: skip


def _limits(kind: WorkerKind) -> list[str]:
    options = ["--max-num-seqs", f"{kind.max_seqs}", "--max-num-batched-tokens", f"{kind.chunk}"]
    return [*options, "--kv-cache-dtype", kind.kv_dtype] if kind.kv_dtype else options


def _worker_commands(made: Configuration, model: str) -> str:
    """Return a vLLM command for a worker of each pool: workers of Pigou's own use one GPU."""
    lines = [
        "#!/bin/sh",
        "# One command a pool; start it as often as it says, on hosts of your own.",
        "# Model and GPU were simulated, not measured: see `pigou profile`.",
    ]
    for pool in made.pools:
        kind = pool.kind
        options = iter(_limits(kind))
        command = [f"vllm serve {model} --tensor-parallel-size {kind.tp}"]
        if kind.ep:
            command += [f"--data-parallel-size {kind.dp} --enable-expert-parallel"]
        command += [f"{option} {value}" for option, value in zip(options, options, strict=True)]
        lines.append(f"# {pool.workers} x {pool.role.value} on {kind.gpu}")
        lines.append(" \\\n  ".join(command))
    return "\n".join(lines) + "\n"
