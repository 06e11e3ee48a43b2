"""A gateway's prefill queue on NATS: the publisher, with the control plane's prices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pigou.control.pull_queue.config import PullQueueConfig
from pigou.control.pull_queue.messages import PrefillItem, ServiceTable
from pigou.control.pull_queue.service_law import cached_at, service_table
from pigou.fleet.prefill_queue.broker import BrokerUnavailable, PrefillBroker
from pigou.fleet.prefill_queue.messages import MessageSigner, QueueAddress
from pigou.fleet.prefill_queue.publisher import (
    NobodyPulls,
    PrefillPublisher,
    PullWorker,
    UncomputedPrefill,
)
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.pulled_prefill import (
    NO_BROKER,
    NO_PULLER,
    LocalPrefill,
    PrefillDropped,
    PrefillLeg,
    PulledPrefill,
)
from pigou.gateway.upstream import Upstream
from pigou.request import SECOND, Request
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import PullPool


class NatsPrefillQueue:
    """A `GatewayPrefillQueue`: prompts go through NATS, claims are priced by the control plane.

    A broker that is away stops nobody: prompts stay at their decode workers until it is back.
    """

    def __init__(
        self, address: QueueAddress, plane_driver: PlaneDriver,
        secret: FleetSecret | None = None, config: PullQueueConfig | None = None, *,
        takes_unsigned: bool = False,
    ) -> None:  # fmt: skip
        """Prepare for `run`.

        Args:
            plane_driver: whose control plane knows the workers, and their prefixes.
            takes_unsigned: workers need not know the secret, as this gateway made it.
        """
        self._plane_driver = plane_driver
        self._queue, self._secret = address.name, secret
        self._requests: dict[str, Request] = {}
        self._incarnations = 0
        self.config = config or PullQueueConfig()
        self._publisher = PrefillPublisher(
            PrefillBroker(address),
            self.config,
            self._service,
            self._workers,
            MessageSigner(secret, takes_unsigned=takes_unsigned),
        )
        self._max_wait_ns = round(address.max_age_s * SECOND)

    @property
    def length(self) -> int:
        """Prompts of all gateways that wait, or are claimed."""
        return self._publisher.length

    async def run(self) -> None:
        """Keep connected, until cancelled."""
        await self._publisher.run()

    async def prefill(
        self, request: Request, leg: PrefillLeg, on_claim: Callable[[str, int], None]
    ) -> PulledPrefill | LocalPrefill:
        """As `GatewayPrefillQueue.prefill`."""
        now_ns, plane = time.monotonic_ns(), self._plane_driver.plane
        wait_ns = min(plane.config.queue_timeout, self._max_wait_ns)
        self._incarnations += 1
        item = PrefillItem(
            request.id, request.prompt, request.arrival or now_ns, self._incarnations,
            min(request.deadline, now_ns + wait_ns), request.priority,
        )  # fmt: skip
        fields: dict[str, Any] = {"path": leg.path, "wire_id": leg.wire_id, "mark": leg.mark}
        fields |= {"body": msgspec.json.encode(leg.body), "traceparent": leg.traceparent}
        expected = self._plane_driver.upstreams.get(leg.worker)
        if expected is None:
            return LocalPrefill(NO_PULLER)
        pool = self._pool(expected)
        self._requests[request.id] = request

        def claimed(worker: str) -> None:
            on_claim(worker, cached_at(plane, request, worker, time.monotonic_ns()))

        try:
            offer = await self._publisher.prefill(item, fields, pool, claimed)
        except BrokerUnavailable:
            return LocalPrefill(NO_BROKER)
        except NobodyPulls:
            return LocalPrefill(NO_PULLER)
        except UncomputedPrefill as dropped:
            raise PrefillDropped(str(dropped), expired=dropped.expired) from dropped
        finally:
            if self._requests.get(request.id) is request:
                del self._requests[request.id]
        return PulledPrefill(offer.status, offer.reply)

    def _service(self, items: Sequence[PrefillItem], workers: Sequence[str]) -> ServiceTable:
        requests = [self._requests[item.request] for item in items]
        return service_table(self._plane_driver.plane, requests, workers, time.monotonic_ns())

    def _pool(self, worker: Upstream) -> PullPool:
        """Return the pool that a worker pulls from, if it pulls."""
        secret = self._secret if worker.knows_secret else None
        return PullPool.of(self._queue, worker.engine.model, worker.worker.version, secret)

    def _workers(self) -> Mapping[str, PullWorker]:
        """Return the workers for prefill alone, by their incarnations."""
        state, upstreams = self._plane_driver.plane.state, self._plane_driver.upstreams
        columns = state.columns
        return {
            upstreams[id_].engine.incarnation: PullWorker(id_, self._pool(upstreams[id_]))
            for row, id_ in enumerate(state.ids)
            if id_ in upstreams
            and upstreams[id_].engine.incarnation
            and columns.prefills[row]
            and not columns.decodes[row]
        }
