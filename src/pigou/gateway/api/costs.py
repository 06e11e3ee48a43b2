"""Costs of the fleet: bills as JSON for `/costs`, as counters for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client.core import Metric

from pigou.cost.cost_meter import CostMeter, MeteredControlPlane
from pigou.cost.fleet_bill import FleetBill, sum_bills
from pigou.gateway.api.page import APIPage, APIPages, json_response, seen_tenant
from pigou.gateway.gateway import Gateway
from pigou.gateway.metrics import TENANT
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import WorkerReport
from pigou.metric_rows import counter_family, gauge_family
from pigou.objectives import class_label
from pigou.wire.errors import APIError


def cost_meter(driver: PlaneDriver) -> CostMeter | None:
    """Return the cost meter of a driver; None without prices."""
    return driver.plane.cost_meter if isinstance(driver.plane, MeteredControlPlane) else None


def request_bill(driver: PlaneDriver, request: str) -> Callable[[], float]:
    """Return what tells a request's dollars so far; 0 without prices."""
    meter = cost_meter(driver)
    usage = None if meter is None else meter.bills.get(request)

    def usd() -> float:
        if meter is None or usage is None:
            return 0.0
        meter.settle(time.monotonic_ns())
        return usage.usd

    return usd


def note_report(
    driver: PlaneDriver, worker: str, before: WorkerReport | None, report: WorkerReport
) -> None:
    """Update the cost meter with a worker's tiers, and its energy since the last report."""
    meter = cost_meter(driver)
    if meter is None:
        return
    if report.tiers:
        meter.stores(worker, dict(report.tiers))
    if report.joules is not None:
        joules = report.joules if before is None or before.joules is None else before.joules
        meter.measured(worker, max(report.joules - joules, 0.0))


def pages(gateway: Gateway) -> APIPages:
    """Return `/costs`, per tenant or all for an administrator, and a request's bill."""
    drivers = [model.plane_driver for model in gateway.routing]
    for model in gateway.routing:
        if (meter := cost_meter(model.plane_driver)) is not None:
            model.metrics.scrape(partial(cost_families, meter))

    def metered() -> list[tuple[PlaneDriver, CostMeter]]:
        pairs = [(driver, meter) for driver in drivers if (meter := cost_meter(driver)) is not None]
        if not pairs:
            raise APIError(404, "Costs are not metered: start the gateway with --prices.")
        return pairs

    async def costs(_: web.Request) -> web.Response:
        bill = sum_bills([_bill(driver, meter) for driver, meter in metered()])
        tenant = seen_tenant()
        document = bill.document(lambda key: tenant in (None, key.tenant))
        if tenant is not None:
            return json_response({"tenant": tenant, "usages": document["usages"]})
        workers = [row for _, meter in metered() for row in _workers(meter)]
        energy = bill.energy_document()
        return json_response(document | {"energy": energy, "workers": workers})

    async def cost(request: web.Request) -> web.Response:
        id = request.match_info["id"]
        for _, meter in metered():
            usage, owner = meter.bills.get(id), meter.owners.get(id)
            if usage is not None and seen_tenant() in (None, owner):
                meter.settle(time.monotonic_ns())
                return json_response({"id": id, "tenant": owner, **usage.document()})
        raise APIError(404, f"No bill of request {id[:64]!r} is known.")

    return APIPages([APIPage("/costs", costs), APIPage("/costs/{id}", cost)])


def _bill(driver: PlaneDriver, meter: CostMeter) -> FleetBill:
    view = driver.meter.view()
    return meter.bill(time.monotonic_ns(), None if view is None else view["attained"])


def _workers(meter: CostMeter) -> list[dict[str, Any]]:
    return [
        {
            "worker": name,
            "usd_per_hour": worker.rate.usd_per_s * 3600.0,
            "gpus": worker.rate.gpus,
            "seconds": worker.seconds,
            "idle_s": worker.idle_s,
            "joules": worker.joules,
            "energy": worker.energy_source,
        }
        for name, worker in sorted(meter.workers.items())
    ]


def cost_families(meter: CostMeter) -> Iterator[Metric]:
    """Yield the counters `pigou_cost_*` and `pigou_energy_*`."""
    bill = meter.bill(time.monotonic_ns())
    usages = {
        (tenant, class_label(workload)): usage
        for (tenant, workload), usage in bill.by("tenant", "workload").items()
    }
    usd, joules = (
        [
            ((*who, phase), getattr(usage, f"{phase}_{unit}"))
            for who, usage in usages.items()
            for phase in phases
        ]
        for unit, phases in (
            ("usd", ("prefill", "restore", "decode")), ("joules", ("prefill", "decode"))
        )
    )  # fmt: skip
    who = (TENANT, "class")
    text = "Dollars of GPU time that requests used."
    yield counter_family("pigou_cost_usd", text, usd, *who, "phase")
    text = "Energy of GPU time that requests used."
    yield counter_family("pigou_energy_joules", text, joules, *who, "phase")
    if bill.has_tolls:
        marginal = [(labels, usage.marginal_usd) for labels, usage in usages.items()]
        text = "Dollars that requests added to steps."
        yield counter_family("pigou_cost_marginal_usd", text, marginal, *who)
    for name, field, text in (
        ("sequences", "sequences", "Sequences that were sent to workers."),
        ("kv_token_seconds", "kv_token_s", "KV tokens times seconds that requests held."),
        ("read_tokens", "read_tokens", "Tokens of KV that were moved between workers."),
        ("displaced_tokens", "displaced_tokens", "Cached tokens that requests pushed out."),
    ):
        used = [(labels, getattr(usage, field)) for labels, usage in usages.items()]
        yield counter_family(f"pigou_cost_{name}", text, used, *who)
    for name, text, value in (
        ("pigou_cost_fleet_usd", "Dollars of all workers that were up.", bill.usd),
        ("pigou_cost_idle_usd", "Dollars of idle GPU time.", bill.idle_usd),
        ("pigou_energy_fleet_joules", "Energy of all workers.", bill.joules),
        ("pigou_energy_idle_joules", "Energy of idle GPU time.", bill.idle_joules),
    ):
        yield counter_family(name, text, value)
    hourly = sum(worker.rate.usd_per_s for worker in meter.workers.values()) * 3600.0
    text = "Dollars an hour of the workers that are up."
    yield gauge_family("pigou_cost_usd_per_hour", text, hourly)
