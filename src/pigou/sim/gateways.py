"""Several gateways on one simulated fleet, each a production ControlPlane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from random import Random
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.config import ConfigError, ControlConfig
from pigou.control.admission.queue_order import QueuedRequest
from pigou.control.messages import (
    Action,
    Assess,
    Assessed,
    Decision,
    Ended,
    Observation,
)
from pigou.control.peers.bookings import PeerState, ResendRequest, SyncMessage
from pigou.control.peers.sync import PeerPublisher, PeerReceiver
from pigou.control.plane import ControlPlane
from pigou.control.price_of_anarchy import PoASnapshot
from pigou.control.routing.policy import RoutingPolicy
from pigou.request import SECOND, Request
from pigou.sim.fleet_config import GatewaysConfig
from pigou.sim.virtual_clock import Clock, Phase

#: Key of the exchange among the clock's events of one time, after the control plane's ticks.
_KEY = -1
#: Gateways publish so often within the time that a message takes.
_PER_LAG = 5

#: Applies a call's decisions, at a time.
Take = Callable[[Callable[[], Sequence[Decision]], int], None]


class _Queues:
    def __init__(self, planes: Sequence[ControlPlane]) -> None:
        self._planes = planes

    def __len__(self) -> int:
        return sum(len(plane.queue) for plane in self._planes)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return (waiting for plane in self._planes for waiting in plane.queue)


class SimulatedGateways:
    """Takes the calls of a ControlPlane, each for the gateway that it concerns.

    Worker events reach all gateways at once; gateways' own changes reach the others after the lag.
    """

    def __init__(
        self, config: GatewaysConfig, control: ControlConfig, clock: Clock,
        policy: Callable[[], RoutingPolicy | None], seed: int,
    ) -> None:  # fmt: skip
        count = config.count
        self.planes = [
            ControlPlane(msgspec.structs.replace(control, seed=control.seed + number), policy())
            for number in range(count)
        ]
        self.queue = _Queues(self.planes)
        self.requests = [0] * count
        self.messages = 0
        self._config, self._clock, self._seed = config, clock, seed
        self._rng = Random(f"{seed} gateways")
        publishers = [PeerPublisher(f"g{n}", plane) for n, plane in enumerate(self.planes)]
        self._publishers = publishers
        self._receivers = [PeerReceiver(publisher) for publisher in publishers]
        self._lag_ns = round(config.lag_s * SECOND)
        self._every_ns = self._lag_ns // _PER_LAG
        self._due = [False] * count
        self._gateway: dict[str, int] = {}
        self._tenants: dict[str, int] = {}
        self._take: Take = lambda call, _: (call(), None)[1]
        self._lags: list[int] = []

    def follow(self, take: Take) -> None:
        """Let `take` apply decisions caused by messages."""
        self._take = take

    # --- the calls of a control plane ---------------------------------------------------------

    def submit(self, request: Request, now: int, exclude: frozenset[str] = frozenset()) -> Decision:
        """As `ControlPlane.submit`."""
        if request.id not in self._gateway:
            self._gateway[request.id] = self._choose(request)
            self.requests[self._gateway[request.id]] += 1
        gateway = self._gateway[request.id]
        decision = self.planes[gateway].submit(request, now, exclude)
        self._changed(gateway, now)
        return decision

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """As `ControlPlane.observe`."""
        if isinstance(observation, Assessed):
            return self.planes[0].observe(observation, now)
        request = getattr(observation, "request", None)
        if request is None:
            decisions = [d for plane in self.planes for d in plane.observe(observation, now)]
            if decisions:
                for gateway in range(len(self.planes)):
                    self._changed(gateway, now)
            return decisions
        if request not in self._gateway:  # it never reached a gateway
            return ()
        gateway = self._gateway[request]
        if isinstance(observation, Ended):
            del self._gateway[request]
        made = self.planes[gateway].observe(observation, now)
        self._changed(gateway, now)
        return made

    def slot(self, request: str) -> int:
        """As `ControlPlane.slot`; slots of different gateways are different numbers."""
        gateway = self._gateway.get(request)
        slot = -1 if gateway is None else self.planes[gateway].slot(request)
        return slot if slot < 0 else slot * len(self.planes) + (gateway or 0)

    def expected(self, request: str) -> int:
        """As `ControlPlane.expected`."""
        gateway = self._gateway.get(request)
        return 0 if gateway is None else self.planes[gateway].expected(request)

    def on_tokens(self, slots: NDArray[np.int64], counts: NDArray[np.int64], now: int) -> None:
        """As `ControlPlane.on_tokens`."""
        owners = slots % len(self.planes)
        for gateway in np.unique(owners).tolist():
            own = owners == gateway
            self.planes[gateway].on_tokens(slots[own] // len(self.planes), counts[own], now)
            self._changed(gateway, now)

    def tick(self, now: int) -> list[Action]:
        """As `ControlPlane.tick`; the Price of Anarchy is asked for once, of all requests."""
        actions: list[Action] = []
        for gateway, plane in enumerate(self.planes):
            for action in plane.tick(now):
                if isinstance(action, Assess):
                    actions += self._assess(action, gateway, now)
                else:
                    actions.append(action)
            self._changed(gateway, now)
            self._look(gateway, now)
        return actions

    def figures(self) -> dict[str, Any]:
        """Return how requests were split, and how the exchange went."""
        return {
            "count": len(self.planes),
            "lag_s": self._config.lag_s,
            "requests": self.requests,
            "messages": self.messages,
            "gaps": sum(receiver.gaps for receiver in self._receivers),
            "snapshots": sum(receiver.snapshots for receiver in self._receivers),
            "known_lag_s": float(np.mean(self._lags)) / SECOND if self._lags else 0.0,
        }

    # --- the exchange -------------------------------------------------------------------------

    def _choose(self, request: Request) -> int:
        count = len(self.planes)
        if self._config.split == "tenant":
            return self._tenants.setdefault(request.tenant, len(self._tenants) % count)
        return xxh3_64_intdigest(request.id.encode(), self._seed) % count

    def _assess(self, request: Assess, gateway: int, now: int) -> list[Assess]:
        if gateway:
            self.planes[gateway].observe(Assessed(None), now)
            return []
        others = [plane.tracker.snapshot(now) for plane in self.planes[1:]]
        return [Assess(_merged([request.snapshot, *(s for s in others if s is not None)]))]

    def _changed(self, gateway: int, now: int) -> None:
        """Publish a gateway's changes: now, or after an interval of the lag."""
        if self._due[gateway] or not self._config.exchanges:
            return
        self._due[gateway] = True
        at = now if not self._every_ns else now - now % self._every_ns + self._every_ns
        self._clock.at(at, Phase.TICK, _KEY, lambda time: self._publish(gateway, time))

    def _publish(self, gateway: int, now: int) -> None:
        self._due[gateway] = False
        publisher = self._publishers[gateway]
        state = publisher.changes(now, self._receivers[gateway].heard(now))
        if state is not None:
            self._send(gateway, state, now)

    def _send(self, gateway: int, message: SyncMessage, now: int) -> None:
        to = message.to if isinstance(message, ResendRequest) else ""
        for other in range(len(self.planes)):
            if other == gateway or to not in ("", f"g{other}"):
                continue
            self.messages += 1
            if self._config.loss and self._rng.random() < self._config.loss:
                continue
            if not self._lag_ns:
                self._deliver(other, message, now)
                continue
            deliver = partial(self._deliver, other, message)
            self._clock.at(now + self._lag_ns, Phase.TICK, _KEY, deliver)

    def _deliver(self, gateway: int, message: SyncMessage, now: int) -> None:
        if isinstance(message, ResendRequest):
            for state in self._publishers[gateway].answer(message):
                self._send(gateway, state, now)
            return
        self._hear(gateway, message, now)

    def _hear(self, gateway: int, state: PeerState, now: int) -> None:
        receiver, plane = self._receivers[gateway], self.planes[gateway]
        observation, request = receiver.receive(state, now)
        if observation is not None:
            self._take(lambda: plane.observe(observation, now), now)
            self._changed(gateway, now)
        if request is not None:
            self._send(gateway, request, now)

    def _look(self, gateway: int, now: int) -> None:
        """Advance a gateway's view of the others."""
        receiver = self._receivers[gateway]
        if receiver.peers:
            self._lags.append(receiver.lag_ns)
        gone, requests = receiver.tick(now)
        for request in requests:
            self._send(gateway, request, now)
        for end in gone:
            self._take(partial(self.planes[gateway].observe, end, now), now)


#: Control planes that the dispatcher drives.
AnyPlane: TypeAlias = ControlPlane | SimulatedGateways


def make_gateways(
    config: GatewaysConfig, control: ControlConfig, clock: Clock,
    policy: RoutingPolicy | None, seed: int, pulls: bool,
) -> SimulatedGateways | None:  # fmt: skip
    """Return the gateways of a fleet, each with a copy of `policy` if it is given; None for one."""
    if config.count == 1:
        return None
    if pulls:
        raise ConfigError(
            f"prefill_queue is pull, and count of gateways {config.count}; a prefill queue is "
            "simulated with one gateway: leave one of the two out"
        )
    return SimulatedGateways(config, control, clock, lambda: deepcopy(policy), seed)


def _merged(snapshots: Sequence[PoASnapshot]) -> PoASnapshot:
    """Return the merged snapshot; speeds are the first gateway's."""
    first = snapshots[0]
    ended = [r for s in snapshots for r, scored in zip(s.records, s.scored, strict=True) if scored]
    running = [
        r for s in snapshots for r, scored in zip(s.records, s.scored, strict=True) if not scored
    ]
    scored = np.arange(len(ended) + len(running)) < len(ended)
    return PoASnapshot(
        (*ended, *running), scored, first.workers, first.prefill, first.estimates
    )  # fmt: skip
