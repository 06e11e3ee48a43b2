"""Dynamo's own planner as a planner of Pigou's: its windows in, its targets out.

`dynamo_driver.py` runs Dynamo's code in the environment that PIGOU_PEER_DYNAMO names, on the
forward passes, traffic and counts that the planner `dynamo` gets, with the same profile.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from benchmarks.lib.dynamo_mockers import dynamo_home
from benchmarks.lib.peers import PeerMissing
from pigou.control.planner.planner import PlannerSetup
from pigou.performance.model import PerformanceModel
from pigou.request import Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState
from pigou_lab.planner.dynamo import DynamoPlannerParams
from pigou_lab.planner.dynamo_passes import ForwardPass, forward_pass, profile_passes
from pigou_lab.planner.dynamo_sla import interval_load
from pigou_lab.planner.history_planner import HistoryPlanner, prefill_and_decode

DRIVER = Path(__file__).with_name("dynamo_driver.py")
PACKAGES = (
    "'kubernetes<33' scikit-learn prophet pmdarima filterpy prometheus-api-client grpcio, and "
    "aisimulate of the same day (--pre --no-deps)"
)
#: Dynamo's names of its predictors.
PREDICTORS = {"dynamo-kalman": "kalman", "dynamo-arima": "arima", "last-value": "constant"}
_MAX_TOKENS = 2**31


def planner_python() -> Path:
    """Return the interpreter of an environment with Dynamo's planner.

    Raises:
        PeerMissing: there is none; the message says how to make it.
    """
    python = dynamo_home("PIGOU_PEER_DYNAMO") / "bin" / "python"
    packages = python.parents[1] / "lib"
    for module in ("aisimulate_core", "prophet", "prometheus_api_client"):
        if not any(packages.glob(f"python*/site-packages/{module}")):
            raise PeerMissing(f"PIGOU_PEER_DYNAMO has no {module}; install there: {PACKAGES}")
    return python


def as_metrics(step: ForwardPass) -> dict[str, Any]:
    """Return a forward pass as `dynamo_driver.metrics` takes it."""
    return {
        "worker": step.worker,
        "wall_s": step.seconds,
        "scheduled": {
            "num_prefill_requests": step.prompts,
            "sum_prefill_tokens": step.prompt_tokens,
            "sum_prefill_kv_tokens": step.prompt_kv_tokens,
            "num_decode_requests": step.streams,
            "sum_decode_kv_tokens": step.stream_tokens,
        },
        "queued": {
            "num_prefill_requests": step.queued_prompts,
            "sum_prefill_tokens": step.queued_prompt_tokens,
            "num_decode_requests": step.queued_streams,
            "sum_decode_kv_tokens": step.queued_stream_tokens,
        },
    }


class DynamoProcess:
    """Dynamo's planner of one model, in a process of its own.

    Args:
        setup: as `dynamo_driver.DynamoDriver` takes it.
    """

    def __init__(self, python: Path, setup: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [python, DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True,
        )  # fmt: skip
        self.answer = self.ask(setup)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return what it answers.

        Raises:
            RuntimeError: it ended; with its last words.
        """
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            pipe_in.write(json.dumps(message) + "\n")
            pipe_in.flush()
            line = pipe_out.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"Dynamo's planner ended: {self._errors.read()[-2000:]}")
        self.answer = json.loads(line)
        return self.answer

    def close(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()
        self._errors.close()


class DynamoPeer(HistoryPlanner):
    """Dynamo's own planner: one process for each model, each with the budget of its model.

    Its targets are carried out as those of `dynamo` are.

    Args:
        params: as of `dynamo`; the loops' intervals are whole seconds.
    """

    name: ClassVar[str] = "dynamo-peer"
    Params: ClassVar[type[msgspec.Struct]] = DynamoPlannerParams

    def __init__(self, setup: PlannerSetup, params: DynamoPlannerParams) -> None:
        super().__init__(setup, params.predictive_interval_s or 180.0)
        if not params.consolidation:
            raise ValueError(
                "Dynamo 1.6.1 counts the load of a removed worker; leave consolidation"
            )
        self.params = params
        loops = (params.reactive_interval_s, params.predictive_interval_s)
        self.interval_s = min(seconds for seconds in loops if seconds > 0)
        self._python = planner_python()
        self._processes: dict[str, DynamoProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()

    def answer(self, model: str = "") -> dict[str, Any]:
        """Return what the process of a model said last."""
        return self._processes[model].answer

    def _targets(
        self,
        window: PlannerWindow,
        now_ns: int,  # noqa: ARG002
    ) -> tuple[dict[str, int], list[str]]:
        targets: dict[str, int] = {}
        reasons = []
        for model in window.models:
            pools = [pool for pool in prefill_and_decode(window, model) if pool is not None]
            if model not in self._processes:
                self._processes[model] = DynamoProcess(self._python, self._setup_of(model, pools))
            process = self._processes[model]
            by_role = {_role_of(pool, len(pools)): pool for pool in pools}
            answer = process.ask(self._seen(window, model, by_role, process.answer["traffic_s"]))
            targets |= {
                by_role[role].name: count
                for role, count in answer["targets"].items() if role in by_role
            }  # fmt: skip
            reasons.append(f"{model}: {', '.join(filter(None, answer['reasons']))}")
        return targets, reasons

    def _performance(self, pool: PoolWindow) -> PerformanceModel:
        return self.setup.performance[pool.name]

    def _setup_of(self, model: str, pools: list[PoolWindow]) -> dict[str, Any]:
        params, slo = self.params, self.setup.class_of("", model).slo
        budget = self.setup.budget
        limits = [budget.max_gpus, budget.model_gpus.get(model)]
        most = min((limit for limit in limits if limit is not None), default=-1)
        minima = {_role_of(pool, len(pools)): budget.min_of(pool.name) for pool in pools}
        capabilities, profile = {}, {}
        for pool in pools:
            performance, role = self._performance(pool), _role_of(pool, len(pools))
            capabilities[role] = {
                "num_gpu": pool.gpus,
                "max_num_batched_tokens": performance.chunk_tokens,
                "max_num_seqs": performance.max_seqs,
                "max_kv_tokens": int(min(performance.kv_tokens, _MAX_TOKENS)),
            }
            passes = profile_passes(performance, _engine_role(pool, len(pools)))
            profile[role] = [as_metrics(each) for each in passes]
        mode = "disagg" if len(pools) == 2 else "agg" if pools[0].role is Role.BOTH else None
        mode = mode or pools[0].role.value
        config: dict[str, Any] = {
            "mode": mode,
            "optimization_target": "sla",
            "environment": "virtual",
            "pre_deployment_sweeping_mode": "none",
            "ttft_ms": min(slo.ttft_s, 1e6) * 1e3,
            "itl_ms": min(slo.itl_s, 1e6) * 1e3,
            "enable_throughput_scaling": params.predictive_interval_s > 0,
            "enable_load_scaling": params.reactive_interval_s > 0,
            "throughput_adjustment_interval_seconds": round(params.predictive_interval_s) or 180,
            "load_adjustment_interval_seconds": round(params.reactive_interval_s) or 5,
            "load_predictor": PREDICTORS.get(params.predictor, params.predictor),
            "load_scaling_down_sensitivity": round(params.sensitivity * 100),
            "max_throughput_scaling_replicas": params.max_step,
            "max_gpu_budget": most,
            "min_gpu_budget": params.min_gpus or -1,
            "min_endpoint": min(minima.values()),
            "report_interval_hours": None,
            "live_dashboard_port": 0,
            "control_api_port": 0,
        }
        if mode == "disagg":
            config |= {f"{role}_min_endpoint": max(count, 1) for role, count in minima.items()}
        return {"config": config, "capabilities": capabilities, "profile": profile}

    def _seen(
        self, window: PlannerWindow, model: str, by_role: dict[str, PoolWindow], traffic_s: float
    ) -> dict[str, Any]:
        """Return what Dynamo sees of a window: counts, passes, and traffic where it asks."""
        now = interval_load([window], model, window.seconds)
        context = (now.isl or 0.0) + 0.5 * (now.osl or 0.0)
        passes: dict[str, list[dict[str, Any]]] = {}
        counts: dict[str, Any] = {}
        stable = not any(pool.starting or pool.draining for pool in by_role.values())
        draining = any(pool.draining for pool in by_role.values())
        for role, pool in by_role.items():
            kind = _engine_role(pool, len(by_role))
            chunk = self._performance(pool).chunk_tokens
            passes[role] = [
                as_metrics(forward_pass(worker, kind, window.seconds, chunk, context, now.hit_rate))
                for worker in pool.in_state(WorkerState.READY)
            ]
            counts |= {
                f"ready_num_{role}": pool.ready,
                f"expected_num_{role}": pool.ready if stable else None,
                f"{role}_scaling_in_progress": not stable,
                f"pending_num_{role}": 0 if draining else pool.starting,
            }
        traffic = None
        if traffic_s:
            load = interval_load(self._history, model, traffic_s)
            if load.requests is not None:
                traffic = {
                    "duration_s": traffic_s, "num_req": load.requests,
                    "isl": load.isl or 0.0, "osl": load.osl or 0.0, "kv_hit_rate": load.hit_rate,
                }  # fmt: skip
        return {"counts": counts, "passes": passes, "traffic": traffic}


def _role_of(pool: PoolWindow, pools: int) -> str:
    """Return Dynamo's name of a pool: an aggregated one is the decode pool."""
    return "prefill" if pool.role is Role.PREFILL and pools else "decode"


def _engine_role(pool: PoolWindow, pools: int) -> Role:
    return Role.DECODE if pools == 2 and pool.role.decodes else pool.role
