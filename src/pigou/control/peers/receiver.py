"""The receiver: puts together what other gateways say, in whatever order it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

from pigou.control.messages import PeerGone, PeerReport
from pigou.control.peers.bookings import TenantService, WorkerBookings
from pigou.control.peers.publisher import BUFFERED, PeerPublisher
from pigou.control.peers.sync_messages import PeerState, ResendRequest
from pigou.request import SECOND

#: A gateway that was silent for so long is taken for gone.
LEASE_NS = 5 * SECOND
#: Nanoseconds after which missing messages are asked for again.
_RETRY_NS = SECOND // 2
#: Lags after which an answer is overdue.
_LAGS = 3
#: Other gateways that are listened to.
MAX_PEERS = 64


@dataclass(slots=True)
class PeerFeed:
    """What is known of another gateway."""

    met_at: int  # when its first message came, in nanoseconds
    seen_at: int  # when its last one came
    seq: int = 0  # all messages up to this number are known
    ahead: set[int] = field(default_factory=set)  # numbers of later ones that are
    newest: int = 0  # number of the last message that came
    newest_at: int = 0  # when that came
    lag_ns: int = 0  # that messages take: half of the time there and back
    # what it has on each worker, with the number of the message that said so.
    workers: dict[str, tuple[int, WorkerBookings]] = field(default_factory=dict)
    # what it did for each tenant, likewise.
    tenants: dict[str, tuple[int, TenantService]] = field(default_factory=dict)
    asked_at: int = 0  # when missing messages were asked for last; 0 where none are missing


class PeerReceiver:
    """Turns messages of other gateways into observations of the ControlPlane.

    Each number has the sequence number of its message, and an older one never replaces it. So
    order, repetition and loss do not matter in the end: a gateway with the last messages, or with a
    snapshot, knows the sender's state. A gap is asked for once, and then a snapshot is: so is what
    the sender does not have any more.
    """

    def __init__(self, publisher: PeerPublisher, lease_ns: int = LEASE_NS) -> None:
        """Know nobody; `publisher` is of the own gateway."""
        self.peers: dict[str, PeerFeed] = {}
        self.gaps = self.snapshots = 0
        self._publisher, self._lease_ns = publisher, lease_ns

    def heard(self, now: int) -> dict[str, tuple[int, int]]:
        """Return the last message of each gateway, by name, and nanoseconds since that came."""
        return {name: (feed.newest, now - feed.newest_at) for name, feed in self.peers.items()}

    @property
    def lag_ns(self) -> int:
        """How old what is known of the others is, at most."""
        return max((feed.lag_ns for feed in self.peers.values()), default=0)

    def hello(self) -> ResendRequest:
        """Return what a new gateway asks all others: their snapshots."""
        return ResendRequest(self._publisher.gateway)

    def receive(
        self, state: PeerState, now: int
    ) -> tuple[PeerReport | PeerGone | None, ResendRequest | None]:
        """Take in a message; return what the plane is to observe, and what is to be asked."""
        name, feed = state.gateway, self.peers.get(state.gateway)
        if name == self._publisher.gateway:
            return None, None
        if state.leaves:
            return (None if self.peers.pop(name, None) is None else PeerGone(name)), None
        if feed is None:
            if len(self.peers) >= MAX_PEERS:
                return None, None
            feed = self.peers[name] = PeerFeed(now, now)
        feed.seen_at = now
        if state.seq > feed.newest:
            feed.newest, feed.newest_at = state.seq, now
        seq, since_ns = state.heard.get(self._publisher.gateway, (-1, 0))
        age_ns = self._publisher.age_ns(seq, now)
        if age_ns is not None:
            feed.lag_ns = max(0, age_ns - since_ns) // 2
        elif self._publisher.began_at and self._publisher.gateway not in state.heard:
            began_at = max(self._publisher.began_at, feed.met_at)
            feed.lag_ns = (now - began_at) // 2  # so old at most: none was answered
        is_new = state.snapshot or (state.seq > feed.seq and state.seq not in feed.ahead)
        report = self._news(state, feed, is_new)
        return report, self._ask(state, feed, now) if is_new else None

    def known(self, worker: str) -> list[PeerReport]:
        """Return what is known of a worker that came up here."""
        return [
            PeerReport(name, (feed.workers[worker][1],))
            for name, feed in self.peers.items()
            if worker in feed.workers
        ]

    def tick(self, now: int) -> tuple[list[PeerGone], list[ResendRequest]]:
        """Return the gateways that fell silent, and what is to be asked for once more."""
        gone = [n for n, feed in self.peers.items() if now - feed.seen_at > self._lease_ns]
        for name in gone:
            del self.peers[name]
        again = [
            self._request(name, feed, now, again=True)
            for name, feed in self.peers.items()
            if feed.asked_at and now - feed.asked_at >= max(_RETRY_NS, _LAGS * feed.lag_ns)
        ]
        return [PeerGone(name) for name in gone], again

    def _news(self, state: PeerState, feed: PeerFeed, is_new: bool) -> PeerReport | None:
        """Note the numbers that are newer than what is known; return them."""
        seq = state.seq
        workers, tenants = list(state.workers), list(state.tenants)
        if state.snapshot:  # who is left out has nothing
            present = {bookings.worker for bookings in workers}
            workers += [WorkerBookings(name) for name in feed.workers if name not in present]
            served = {service.tenant for service in tenants}
            tenants += [
                TenantService(name, last.prompt_tokens, last.output_tokens)
                for name, (_, last) in feed.tenants.items()
                if name not in served
            ]
        workers = [b for b in workers if seq >= feed.workers.get(b.worker, (0,))[0]]
        tenants = [s for s in tenants if seq >= feed.tenants.get(s.tenant, (0,))[0]]
        feed.workers.update((b.worker, (seq, b)) for b in workers)
        feed.tenants.update((s.tenant, (seq, s)) for s in tenants)
        prompts = state.prompts if is_new else ()
        if not (workers or tenants or prompts):
            return None
        return PeerReport(
            state.gateway, tuple(workers), tuple(tenants), prompts, lag_ns=self.lag_ns
        )

    def _ask(self, state: PeerState, feed: PeerFeed, now: int) -> ResendRequest | None:
        """Note that a message came; return what is missing before it, if that is news."""
        if state.snapshot:
            self.snapshots += 1
            feed.seq = max(feed.seq, state.seq)
        else:
            feed.ahead.add(state.seq)
        feed.ahead = {seq for seq in feed.ahead if seq > feed.seq}
        while feed.seq + 1 in feed.ahead:
            feed.seq += 1
            feed.ahead.remove(feed.seq)
        if not feed.ahead:
            feed.asked_at = 0
            return None
        if feed.asked_at:
            return None
        self.gaps += 1
        return self._request(state.gateway, feed, now)

    def _request(self, name: str, feed: PeerFeed, now: int, again: bool = False) -> ResendRequest:
        feed.asked_at = now
        own = self._publisher.gateway
        if again or len(feed.ahead) > BUFFERED or not feed.seq:
            return ResendRequest(own, name)
        return ResendRequest(own, name, feed.seq + 1, max(feed.ahead) - 1)
