"""Energy of a configuration at its load, by the power model: what a plan shows beside dollars."""

from __future__ import annotations

from dataclasses import replace

from pigou.capacity.plan.configuration import Configuration, LoadFigures, PlannedPool
from pigou.cost.energy import MAX_WATTS, PowerModel, joules_per_token
from pigou.models.architecture import Architecture
from pigou.performance.speed import RequestMix
from pigou.request import Role
from pigou.sim.gpus import gpu as gpu_named


def plan_joules_per_token(
    made: Configuration, figures: LoadFigures, mix: RequestMix, model: Architecture
) -> float | None:
    """Return the joules of all GPUs for an output token; None where a GPU's power is not known."""
    tok_s = figures.rate_rps * mix.osl
    if tok_s <= 0.0 or any(name not in MAX_WATTS for name in made.gpus):
        return None
    return joules_per_token(sum(_watts(pool, figures, mix, model) for pool in made.pools), tok_s)


def _watts(pool: PlannedPool, figures: LoadFigures, mix: RequestMix, model: Architecture) -> float:
    """Return the watts of a pool.

    Prompts take their FLOPs at what large products reach, at full power; the rest of the time is of
    streams, whose number follows from the rate (Little), or idle.
    """
    kind, device = pool.kind, gpu_named(pool.kind.gpu)
    power = PowerModel(MAX_WATTS[device.name])
    if kind.kv_dtype:
        model = replace(model, kv_dtype=kind.kv_dtype)
    rate, prompts = figures.rate_rps / pool.workers, 0.0
    if pool.role is not Role.DECODE:
        speed = device.peak(model.compute_dtype) * device.compute * kind.tp
        prompts = min(rate * mix.computed * 2.0 * model.active_parameters / speed, 1.0)
    watts = prompts * power.prefill_watts(device.compute)
    if pool.role is Role.PREFILL:
        return (watts + (1.0 - prompts) * power.idle_w) * pool.gpus
    streams = rate * mix.osl * figures.itl_s
    busy = min(streams, 1.0) * (1.0 - prompts)
    read = model.weight_bytes + max(streams, 1.0) * mix.context * model.kv_bytes
    step_s = max(figures.itl_s * (1.0 - prompts), 1e-9)
    watts += busy * power.decode_watts(read / step_s / (device.bandwidth * kind.tp))
    return (watts + max(1.0 - prompts - busy, 0.0) * power.idle_w) * pool.gpus
