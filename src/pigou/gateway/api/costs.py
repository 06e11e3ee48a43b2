"""Costs of the fleet: bills as JSON for `/costs`, as counters for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pigou.cost.cost_meter import CostMeter
from pigou.cost.fleet_bill import FleetBill, sum_bills
from pigou.cost.metered_plane import MeteredControlPlane
from pigou.gateway.metrics import TENANT
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import WorkerReport
from pigou.objectives import class_label
from pigou.wire.errors import APIError


def cost_meter(driver: PlaneDriver) -> CostMeter | None:
    """Return the cost meter of a driver; None without prices."""
    return driver.plane.cost_meter if isinstance(driver.plane, MeteredControlPlane) else None


def note_report(
    driver: PlaneDriver, worker: str, before: WorkerReport | None, report: WorkerReport
) -> None:
    """Tell the cost meter which tiers a worker has, and what its energy counter says.

    A counter says it since the report before.
    """
    meter = cost_meter(driver)
    if meter is None:
        return
    if report.tiers:
        meter.stores(worker, dict(report.tiers))
    if report.joules is not None:
        joules = report.joules if before is None or before.joules is None else before.joules
        meter.measured(worker, max(report.joules - joules, 0.0))


class Costs:
    """What `/costs` shows."""

    def __init__(self, drivers: Iterable[PlaneDriver]) -> None:
        self._drivers = list(drivers)

    @property
    def metered(self) -> bool:
        """Whether there are prices."""
        return any(cost_meter(driver) is not None for driver in self._drivers)

    def view(self, tenant: str | None) -> dict[str, Any]:
        """Return the bill as JSON builtins.

        Args:
            tenant: sees its own usage and allocation alone; None sees all.

        Raises:
            APIError: 404, there are no prices.
        """
        bill = sum_bills([self._bill(driver, meter) for driver, meter in self._metered()])
        document = bill.document(lambda key: tenant in (None, key.tenant))
        if tenant is not None:
            return {"tenant": tenant, "usages": document["usages"]}
        return document | {"energy": bill.energy_document(), "workers": self._workers()}

    def one(self, request: str, tenant: str | None) -> dict[str, Any]:
        """Return the bill of one request.

        Raises:
            APIError: 404, it is not known, or of another tenant, or there are no prices.
        """
        for _, meter in self._metered():
            usage, owner = meter.bills.get(request), meter.owners.get(request)
            if usage is not None and tenant in (None, owner):
                meter.settle(time.monotonic_ns())
                return {"id": request, "tenant": owner, **usage.document()}
        raise APIError(404, f"No bill of request {request[:64]!r} is known.")

    def _metered(self) -> list[tuple[PlaneDriver, CostMeter]]:
        pairs = [(driver, cost_meter(driver)) for driver in self._drivers]
        metered = [(driver, meter) for driver, meter in pairs if meter is not None]
        if not metered:
            raise APIError(404, "Costs are not metered: start the gateway with --prices.")
        return metered

    def _bill(self, driver: PlaneDriver, meter: CostMeter) -> FleetBill:
        view = driver.meter.view()
        attained = None if view is None else view["attained"]
        return meter.bill(time.monotonic_ns(), attained)

    def _workers(self) -> list[dict[str, Any]]:
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
            for _, meter in self._metered()
            for name, worker in sorted(meter.workers.items())
        ]


class CostMetrics(Collector):
    """The counters `pigou_cost_*` and `pigou_energy_*`, read anew at each scrape."""

    def __init__(self, meter: CostMeter) -> None:
        self._meter = meter

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known once there are values."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all counters."""
        bill = self._meter.bill(time.monotonic_ns())
        labels = [TENANT, "class", "phase"]
        usd = CounterMetricFamily(
            "pigou_cost_usd", "Dollars of GPU time that requests used.", labels=labels
        )
        joules = CounterMetricFamily(
            "pigou_energy_joules", "Energy of GPU time that requests used.", labels=labels
        )
        marginal = CounterMetricFamily(
            "pigou_cost_marginal_usd", "Dollars that requests added to steps.", labels=labels[:2]
        )
        for (tenant, workload), usage in bill.by("tenant", "workload").items():
            who = (tenant, class_label(workload))
            usd.add_metric((*who, "prefill"), usage.prefill_usd)
            usd.add_metric((*who, "restore"), usage.restore_usd)
            usd.add_metric((*who, "decode"), usage.decode_usd)
            joules.add_metric((*who, "prefill"), usage.prefill_joules)
            joules.add_metric((*who, "decode"), usage.decode_joules)
            marginal.add_metric(who, usage.marginal_usd)
        yield usd
        yield joules
        if bill.has_tolls:
            yield marginal
        for name, text, value in (
            ("pigou_cost_fleet_usd", "Dollars of all workers that were up.", bill.usd),
            ("pigou_cost_idle_usd", "Of those, dollars of idle GPU time.", bill.idle_usd),
            ("pigou_energy_fleet_joules", "Energy of all workers.", bill.joules),
            ("pigou_energy_idle_joules", "Of that, energy of idle GPU time.", bill.idle_joules),
        ):
            yield CounterMetricFamily(name, text, value=value)
        hourly = sum(worker.rate.usd_per_s for worker in self._meter.workers.values()) * 3600.0
        text = "Dollars an hour of the workers that are up."
        yield GaugeMetricFamily("pigou_cost_usd_per_hour", text, value=hourly)
