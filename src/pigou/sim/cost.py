"""Costs of simulated workers, and the inputs of their energy estimate."""

from __future__ import annotations

from dataclasses import replace

from pigou.config import ConfigError
from pigou.cost.cost_meter import CostMeter
from pigou.cost.price_list import HOUR_S, PriceList, read_price_list
from pigou.cost.usage import WorkerRate
from pigou.models.architecture import Architecture
from pigou.models.gpus import GIB, PowerModel
from pigou.models.gpus import gpu as gpu_named
from pigou.models.read import architecture
from pigou.objectives import Objectives
from pigou.request import Request, Worker
from pigou.sim.fleet_config import FleetConfig, WorkerGroup
from pigou.sim.setup import Setup


def price_list(text: str) -> PriceList:
    """Read a price list, its GPUs by any of their names."""
    return read_price_list(text, lambda name: gpu_named(name).name)


def gpu_rate(
    prices: PriceList, gpu: str, gpus: int, model: Architecture | None = None,
    tiers: dict[str, float] | None = None,
) -> WorkerRate:  # fmt: skip
    """Return a worker's rate; `tiers` are bytes by name, beyond the device."""
    device = gpu_named(gpu)
    rate = WorkerRate(
        usd_per_s=prices.gpu(device.name) * gpus / HOUR_S,
        storage_usd_per_s=prices.tier_usd_per_s(tiers or {}),
        gpus=gpus,
        power=PowerModel(device.max_watts),
        bytes_per_s=device.bandwidth * gpus,
    )
    if model is None:
        return rate
    return replace(
        rate,
        weight_bytes=float(model.weight_bytes),
        kv_bytes=float(model.kv_bytes),
        flops=device.peak(model.compute_dtype) * gpus,
        token_flops=2.0 * model.active_parameters,
    )


def simulated_cost_meter(setup: Setup, fleet: FleetConfig, objectives: Objectives) -> CostMeter:
    """Return the cost meter of a simulated fleet."""
    if fleet.gateways.count > 1:
        raise ConfigError(
            "prices is given, and there are several gateways; costs are metered at one: leave one "
            "of the two out"
        )
    prices = price_list(setup.prices)
    model = architecture(setup.model) if setup.model else None
    if model is not None and setup.kv_dtype:
        model = replace(model, kv_dtype=setup.kv_dtype)
    rates = [_group_rate(prices, setup, group, model) for group in fleet.workers]
    numbers = [number for number, group in enumerate(fleet.workers) for _ in range(group.count)]
    by_role = {group.role: rate for group, rate in zip(fleet.workers, rates, strict=True)}

    def rate(worker: Worker) -> WorkerRate:
        number = int(worker.id.rpartition("-")[2])
        known = number < len(numbers)  # the others were added by a planner
        return rates[numbers[number]] if known else by_role.get(worker.role, rates[0])

    def workload(request: Request) -> str:
        return objectives.name_of(request.tenant, request.prompt)

    return CostMeter(rate, lambda _: setup.model, workload)


def _group_rate(
    prices: PriceList, setup: Setup, group: WorkerGroup, model: Architecture | None
) -> WorkerRate:
    gpu = group.gpu or setup.gpu
    if not gpu:
        raise ConfigError("prices is given, and no GPU of the workers: give --gpu")
    tiers = group.tiers or (setup.tiers if group.prefix_caching else ())
    sizes = {tier.name: tier.gib * GIB for tier in tiers}
    return gpu_rate(prices, gpu, group.parallelism(setup).gpus, model, sizes)
