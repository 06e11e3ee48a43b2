"""Costs of a live fleet: a metered control plane, out of the options of the gateway."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from pigou.config import ConfigError, ControlConfig
from pigou.control.plane import ControlPlane
from pigou.cost.cost_meter import CostMeter, MeteredControlPlane
from pigou.cost.price_list import PriceList
from pigou.cost.usage import WorkerRate
from pigou.gateway.config import GatewayConfig
from pigou.gateway.plane_driver import PlaneDriver
from pigou.models import bundled_path
from pigou.models.architecture import Architecture
from pigou.models.gpus import gpu as gpu_named
from pigou.models.read import architecture
from pigou.request import Request, Role, Worker
from pigou.sim.cost import gpu_rate, price_list

_ITEM = re.compile(r"(?:(prefill|decode|both)=)?([^=:,]+)(?::(\d+))?")


def read_worker_gpus(text: str) -> dict[Role, tuple[str, int]]:
    """Read `H100:4`, or `prefill=H100:4,decode=H200:8`: GPU and count by role; or ConfigError."""
    gpus: dict[Role, tuple[str, int]] = {}
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None or match[3] == "0":
            raise ConfigError(f"gpu has {item!r}; write NAME[:GPUS] or ROLE=NAME[:GPUS]: H100:4")
        kind = gpu_named(match[2]).name, int(match[3] or 1)
        for role in [Role(match[1])] if match[1] else Role:
            if role in gpus:
                raise ConfigError(f"gpu names {role.value} workers twice; name each role once")
            gpus[role] = kind
    return gpus


def make_plane(control: ControlConfig, gateway: GatewayConfig) -> ControlPlane:
    """Return a model's control plane, with a cost meter where there are prices, or ConfigError."""
    if control.lengths.get("predictor") == "oracle":
        raise ConfigError("lengths is oracle, and only the simulator knows lengths; give online")
    if not gateway.prices:
        for name in ("gpu", "priced_model"):
            if value := getattr(gateway, name):
                raise ConfigError(f"{name} is {value!r}, and there are no prices: give --prices")
        return ControlPlane(control)
    if not gateway.gpu:
        raise ConfigError(
            "prices is given, and gpu is not: say which GPUs a worker has, like --gpu H100:4"
        )
    prices, gpus = price_list(gateway.prices), read_worker_gpus(gateway.gpu)
    for kind, _ in gpus.values():
        prices.gpu(kind)
    model = architecture(gateway.priced_model) if gateway.priced_model else None
    return MeteredControlPlane(
        control, CostMeter(_LiveRates(prices, gpus, model), storage=prices.tier_usd_per_s)
    )


class _LiveRates:
    """Rates of workers; `model_of` returns the model of one, once a driver has it."""

    def __init__(
        self, prices: PriceList, gpus: Mapping[Role, tuple[str, int]], model: Architecture | None
    ) -> None:
        self._prices, self._gpus, self._model = prices, gpus, model
        self.model_of: Callable[[str], Architecture | None] = lambda _: None

    def __call__(self, worker: Worker) -> WorkerRate:
        """Return a worker's rate; without a GPU for its role, that of any other."""
        gpu, count = self._gpus.get(worker.role) or next(iter(self._gpus.values()))
        return gpu_rate(self._prices, gpu, count, self._model or self.model_of(worker.id))


def follow_driver(driver: PlaneDriver) -> None:
    """Let the cost meter of a driver's plane, if it has one, know models and classes."""
    if not isinstance(driver.plane, MeteredControlPlane):
        return
    meter = driver.plane.cost_meter

    def model(_: str) -> str:
        return driver.meter.model()

    def workload(request: Request) -> str:
        return driver.meter.class_of(request)

    def model_of(worker: str) -> Architecture | None:
        upstream = driver.upstreams.get(worker)
        return None if upstream is None else read_model(upstream.engine.root)

    if isinstance(meter.rate, _LiveRates):
        meter.rate.model_of = model_of
    meter.model, meter.workload = model, workload


def read_model(root: str) -> Architecture | None:
    """Return the model of a folder, as a worker names it; None where its layers are not known."""
    path = (bundled_path() if root == "bundled" else Path(root)) / "config.json"
    try:
        return architecture(str(path)) if root and path.is_file() else None
    except (ConfigError, OSError):
        return None
