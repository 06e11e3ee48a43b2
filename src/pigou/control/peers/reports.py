"""Reports of other gateways: how they change a ControlPlane."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from pigou.control.admission.admission_controller import AdmissionController
from pigou.control.messages import PeerGone, PeerReport
from pigou.control.peers.bookings import TenantService, growth
from pigou.control.prefix_index import PrefixIndex
from pigou.control.request_tracker import RequestTracker
from pigou.request import SECOND

#: Tenants of one gateway that are remembered; then those that have nothing now are forgotten.
MAX_TENANTS = 2048
#: Nanoseconds between two samples of the service here.
_SAMPLE_NS = SECOND // 100


class PeerReports:
    """Applies reports of other gateways to load, arrival rates, fair order and tenant shares."""

    def __init__(
        self, admission: AdmissionController, tracker: RequestTracker, index: PrefixIndex
    ) -> None:
        self._admission, self._tracker, self._index = admission, tracker, index
        self.tenants: dict[str, dict[str, TenantService]] = {}  # by gateway
        self._past: deque[tuple[int, int]] = deque()
        self._sent = 0  # prompts of all other gateways

    def observe(self, message: PeerReport | PeerGone, now: int) -> None:
        """Apply a report, or a gateway's departure."""
        self._observe(message, now)
        if self.tenants:
            self.tick(now)
        else:
            self._admission.allowance.limit = math.inf

    def tick(self, now: int) -> None:
        """Update this gateway's share of streams; there are other gateways."""
        others = [s for tenants in self.tenants.values() for s in tenants.values()]
        self._admission.update_allowance(self._tracker.state, others, now)

    def _observe(self, message: PeerReport | PeerGone, now: int) -> None:
        gateway, state = message.gateway, self._tracker.state
        if isinstance(message, PeerGone):
            self._tracker.book(gateway, state.peers.forget(gateway), now)
            state.peers.remove(gateway)
            self._admission.lanes.others.pop(gateway, None)
            for service in self.tenants.pop(gateway, {}).values():
                self._change(service, TenantService(service.tenant), now)
            return
        self._note_lag(message.lag_ns, now)
        self._sent += self._tracker.book(gateway, message.workers, now)
        if message.classes is not None:
            self._admission.lanes.others[gateway] = message.classes
        tenants = self.tenants.setdefault(gateway, {})
        for service in message.tenants:
            before = tenants.get(service.tenant)
            tenants[service.tenant] = service
            if before is None:  # earlier service is not charged now
                before = msgspec.structs.replace(service, streams=0, waiting=0)
            self._change(before, service, now)
        if len(tenants) > MAX_TENANTS:
            active = {name: last for name, last in tenants.items() if last.streams or last.waiting}
            self.tenants[gateway] = active
        for prompt in message.prompts:
            row = state.row.get(prompt.worker)
            if row is not None and not state.workers[row].events and len(prompt.keys):
                self._index.predict(prompt.worker, prompt.keys, now)

    def _note_lag(self, lag_ns: int, now: int) -> None:
        past = self._past
        if not past or now - past[-1][0] >= _SAMPLE_NS:
            past.append((now, self._sent))
        while len(past) > 1 and past[1][0] <= now - lag_ns:
            past.popleft()
        unseen = self._sent - past[0][1]
        lasting = self._tracker.booked_s
        self._tracker.state.peers.set_weights(
            lag_ns / SECOND, unseen if lag_ns else 0.0, lasting.prompt, lasting.stream
        )

    def _change(self, before: TenantService, after: TenantService, now: int) -> None:
        change = TenantService(
            after.tenant, growth(before.prompt_tokens, after.prompt_tokens),
            growth(before.output_tokens, after.output_tokens), after.streams - before.streams,
            after.waiting - before.waiting, growth(before.kv_token_ms, after.kv_token_ms),
        )  # fmt: skip
        self._admission.peer_service(change, bool(after.streams or after.waiting), now)
