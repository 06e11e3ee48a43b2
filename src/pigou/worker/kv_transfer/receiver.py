"""Receiver: the decode side of a transfer."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from pigou.background import Background
from pigou.kv import checksum
from pigou.logs import about
from pigou.request import SECOND, Ints
from pigou.runtime.stores.store import DeviceBlocks
from pigou.worker.kv_transfer.backends import (
    BackendUnavailable,
    ReceiveBackend,
    ShmImport,
    TcpImport,
)
from pigou.worker.kv_transfer.block_store import ReceiveBuffer
from pigou.worker.kv_transfer.side_channel_protocol import (
    Confirm,
    Decline,
    Done,
    GrantFrame,
    Open,
    Renew,
    SideChannelLink,
    expect,
    prove_as_receiver,
)
from pigou.worker.kv_transfer.transfer_params import (
    PATH_FAILURES,
    TransferConfig,
    TransferError,
    TransferParams,
    TransferReason,
    TransferResult,
    read_transfer_params,
)

log = logging.getLogger(__name__)

OnDone: TypeAlias = Callable[[TransferResult], None]
#: Seconds between an idle thread's sweeps.
_SWEEP = 5.0
#: Max bytes of a grant besides its blocks; NIXL metadata grows with network devices.
_MAX_GRANT = 32 << 10
#: Failures after which the receiver asks the sender to free the blocks.
_TELL = {
    TransferReason.LAYOUT, TransferReason.BAD_PARAMS, TransferReason.CORRUPT,
    TransferReason.CANCELLED, TransferReason.STORE, TransferReason.PROTOCOL,
}  # fmt: skip
Address: TypeAlias = tuple[str, int]
#: Initial pulls per backend and host, before times decide.
TRIES = 2
#: Max share of a host's pull time spent on exploring slower backends.
EXPLORED_SHARE = 0.02
#: Min pulls of a host between two explorations of a backend.
_MIN_IDLE = 32
#: Decay of old observations per pull.
_DECAY = 0.9
#: Pulls for which a failed backend comes last; doubled by each further failure.
_MIN_PAUSE, _MAX_PAUSE = 8, 256
#: Max hosts remembered, since a sender may claim any name.
_MAX_HOSTS = 1024


@dataclass(eq=False, slots=True)
class Pull:
    """A requested pull."""

    params: object
    first: int
    dest: Ints
    done: OnDone | None
    cancelled: bool = False

    def cancel(self) -> None:
        """Cancel; `done` is still called, and until then the blocks are in use."""
        self.cancelled = True


class Receiver:
    """Pulls blocks that other workers offer, on its own threads."""

    def __init__(
        self, store: DeviceBlocks, config: TransferConfig | None = None,
        background: Background | None = None, key: bytes = b"",
    ) -> None:  # fmt: skip
        """Start the threads; an empty `key` trusts everyone. Raises ConfigError."""
        self._key = key
        checksum.warm_up()
        self._config = config or TransferConfig()
        self._store = store
        self._fingerprint = store.layout.fingerprint()
        self._imports = [self._import(name) for name in self._config.backends]
        self._links = ConnectionPool(self._config.timeout, key)
        self._paths, self._lock = PathTimes(), threading.Lock()
        self._wake = threading.Condition()
        self._waiting: deque[Pull] = deque()
        self._closed = False
        background = background or Background()
        self._threads = [
            background.thread(f"kv-pull-{i}", self._run) for i in range(self._config.threads)
        ]
        for thread in self._threads:
            thread.start()

    def pull(self, params: object, first: int, dest: Ints, done: OnDone) -> Pull:
        """Pull blocks `first` to `first + len(dest)` of an offer into device blocks `dest`, (n,).

        The blocks belong to the receiver until `done`, which is called once, possibly from this
        call if BUSY or CLOSED; blocks beyond `TransferResult.blocks` hold garbage. Raises
        ValueError if a destination block does not exist.
        """
        self._check(first, dest)
        pull = Pull(params, first, dest.copy(), done)
        with self._wake:
            full = sum(p.done is not None for p in self._waiting) >= self._config.max_pending
            refused = (
                TransferReason.CLOSED if self._closed else TransferReason.BUSY if full else None
            )
            if refused is None:
                self._waiting.append(pull)
                self._wake.notify()
        if refused is not None:
            self._finish(pull, TransferResult("", 0, 0, refused, "the pull was not begun"))
        if refused is TransferReason.BUSY:
            self.decline(params)
        return pull

    def decline(self, params: object) -> None:
        """Tell the sender, in the background, that its blocks are not needed."""
        with self._wake:
            if not self._closed:
                self._waiting.append(Pull(params, 0, np.empty(0, dtype=np.int32), None))
                self._wake.notify()

    def close(self) -> None:
        """End all pulls (CLOSED) and threads; the store is unused afterwards."""
        with self._wake:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._wake.notify_all()
        self._links.close()
        for thread in self._threads:
            thread.join()
        for backend in self._imports:
            backend.close()
        for pull in left:
            self._finish(
                pull, TransferResult("", 0, 0, TransferReason.CLOSED, "the receiver was closed")
            )

    def _import(self, name: str) -> ReceiveBackend:
        if name == "nixl":
            from pigou.worker.kv_transfer.nixl import NixlImport

            return NixlImport(self._store, self._config.timeout)
        return ShmImport(self._config.copy_threads) if name == "shm" else TcpImport()

    def _check(self, first: int, dest: Ints) -> None:
        rows = self._store.as_bytes()
        if first < 0 or (dest.size and dest.min() < 0):
            raise ValueError("first and every destination block must be at least 0")
        if rows is not None and dest.size and dest.max() >= len(rows):
            raise ValueError(f"destination block {dest.max()} does not exist; {len(rows)} do")

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    if not self._wake.wait(_SWEEP):
                        self._sweep()
                if self._closed:
                    return
                pull = self._waiting.popleft()
            if pull.done is None:
                self._decline(pull)
            else:
                self._finish(pull, self._pull(pull))

    def _sweep(self) -> None:
        self._links.sweep()
        for backend in self._imports:
            backend.sweep()

    def _finish(self, pull: Pull, outcome: TransferResult) -> None:
        if outcome.reason is not TransferReason.OK:
            log.warning(
                "pull of request %s: %s %s",
                outcome.request or "(unknown)", outcome.reason, outcome.detail,
                extra=about(outcome.request),
            )  # fmt: skip
        if pull.done is None:
            return
        try:
            pull.done(outcome)
        except Exception:
            log.exception(
                "done failed for request %s", outcome.request, extra=about(outcome.request)
            )

    # --- one pull -------------------------------------------------------------------------------

    def _pull(self, pull: Pull) -> TransferResult:
        """Pull blocks; return the outcome, never raise."""
        try:
            ticket = read_transfer_params(pull.params, self._key)
        except TransferError as error:
            return TransferResult("", 0, 0, error.reason, error.detail)
        began = time.monotonic()
        run = _Run(ticket, pull)
        try:
            self._check_offer(run)
            self._by_any_backend(run)
            reason, detail = TransferReason.OK, ""
        except TransferError as error:
            reason, detail = self._early(run, error)
        except Exception as error:
            request = ticket.remote_request_id
            log.exception("pull of request %s failed", request, extra=about(request))
            reason, detail = self._early(run, TransferError(TransferReason.STORE, repr(error)))
        first, blocks = pull.first, run.blocks
        tokens = min(ticket.remote_num_tokens, (first + blocks) * ticket.remote_block_size)
        return TransferResult(
            request=ticket.remote_request_id,
            blocks=blocks,
            tokens=max(0, tokens - first * ticket.remote_block_size) if blocks else 0,
            reason=TransferReason.CLOSED
            if self._links.closed and reason is not TransferReason.OK
            else reason,
            detail=detail,
            backend=run.backend,
            bytes=blocks * self._store.layout.block_bytes,
            seconds=time.monotonic() - began,
        )

    def _decline(self, pull: Pull) -> None:
        try:
            self._tell(read_transfer_params(pull.params, self._key))
        except TransferError as error:
            log.info("an offer could not be declined, and will expire: %s", str(error))
        except Exception:
            log.exception("an offer could not be declined, and will expire")

    def _tell(self, ticket: TransferParams) -> bool:
        """Tell the sender to free the blocks; True if still held. Raises TransferError."""
        with self._links.link(ticket.address, fresh=True) as (link, _):
            link.send(
                Decline(ticket.remote_engine_id, ticket.remote_request_id, ticket.remote_secret)
            )
            return expect(link, Confirm).held

    def _check_offer(self, run: _Run) -> None:
        layout, ticket = self._store.layout, run.ticket
        if ticket.remote_layout != self._fingerprint:
            raise TransferError(
                TransferReason.LAYOUT,
                f"the offered blocks have the layout {ticket.remote_layout}; here it is "
                f"{self._fingerprint} ({layout}): both workers must serve the same model "
                "with the same dtype and block size",
            )
        first, end = run.pull.first, run.pull.first + len(run.pull.dest)
        if end > ticket.blocks:
            why = f"blocks {first} to {end} are wanted; {ticket.blocks} are offered"
            raise TransferError(TransferReason.BAD_PARAMS, why)

    def _by_any_backend(self, run: _Run) -> None:
        ticket, host = run.ticket, run.ticket.remote_host_id
        detail = f"the sender offers {ticket.remote_backends}"
        backends = {
            backend.name: backend
            for backend in self._imports
            if backend.name in ticket.remote_backends and backend.reaches(ticket)
        }
        size = len(run.pull.dest) * self._store.layout.block_bytes
        with self._lock:
            order = self._paths.order(host, list(backends), size)
        for name in order:
            began = time.monotonic()
            try:
                self._by(backends[name], run)
            except BackendUnavailable as error:
                detail = f"{name}: {error}"
                log.warning("pull by %s is not possible: %s", name, str(error))
                with self._lock:
                    self._paths.fail(host, name)
                continue
            except TransferError as error:
                if error.reason in PATH_FAILURES and run.backend == name:
                    with self._lock:
                        self._paths.fail(host, name)
                raise
            with self._lock:
                first = self._paths.add(host, name, size, time.monotonic() - began)
            if first:
                log.info("KV blocks come from %s:%s by %s", *ticket.address, name)
            return
        raise TransferError(TransferReason.UNREACHABLE, f"no backend reaches the sender; {detail}")

    def _by(self, backend: ReceiveBackend, run: _Run) -> None:
        used = False
        try:
            with self._links.link(run.ticket.address) as (link, used):
                self._over(link, backend, run)
        except TransferError as error:
            if not used or run.landing is not None or error.reason is not TransferReason.CUT:
                raise
            with self._links.link(run.ticket.address, fresh=True) as (link, _):
                self._over(link, backend, run)

    def _over(self, link: SideChannelLink, backend: ReceiveBackend, run: _Run) -> None:
        granted = self._open(link, backend.name, run)
        run.backend, run.needs_confirmation = backend.name, backend.needs_confirmation
        run.landing = ReceiveBuffer(self._store, run.pull.dest, lambda: run.pull.cancelled)
        backend.fetch(link, granted, run.landing, _Renewal(link, granted.patience))
        link.send(Done(run.landing.good))
        run.confirmed = expect(link, Confirm).held
        if not run.confirmed:
            raise TransferError(TransferReason.EXPIRED, "the lease was lost during the pull")

    def _open(self, link: SideChannelLink, backend: str, run: _Run) -> GrantFrame:
        ticket, count = run.ticket, len(run.pull.dest)
        link.send(
            Open(
                engine=ticket.remote_engine_id,
                request=ticket.remote_request_id,
                secret=ticket.remote_secret,
                layout=self._fingerprint,
                last_hash=ticket.remote_last_hash,
                first=run.pull.first,
                count=count,
                backend=backend,
            )
        )
        return expect(link, GrantFrame, _MAX_GRANT + 16 * count)

    def _early(self, run: _Run, error: TransferError) -> tuple[TransferReason, str]:
        """End a failed pull, freeing the sender's blocks before their lease expires."""
        if error.reason in _TELL and not self._links.closed:
            try:
                run.confirmed = self._tell(run.ticket)
            except Exception as failure:  # the waiting caller must be answered
                log.info("the sender could not be told: %s", str(failure))
        return error.reason, error.detail


@dataclass(eq=False, slots=True)
class _Run:
    """State of a running pull."""

    ticket: TransferParams
    pull: Pull
    backend: str = ""
    needs_confirmation: bool = False
    confirmed: bool = False
    landing: ReceiveBuffer | None = None

    @property
    def blocks(self) -> int:
        """Leading valid blocks."""
        if self.landing is None or (self.needs_confirmation and not self.confirmed):
            return 0
        return self.landing.good


class _Renewal:
    """Renews the lease after a quarter of the sender's patience."""

    def __init__(self, link: SideChannelLink, patience: float) -> None:
        self._link = link
        self._every = patience / 4
        self._last = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last >= self._every:
            self._link.send(Renew())
            self._last = now


class ConnectionPool:
    """Pools connections; one that failed is closed."""

    def __init__(self, timeout: int, key: bytes = b"") -> None:
        """Bound each wait by `timeout` ns and idle time by half; an empty `key` skips proofs."""
        self._key = key
        self._timeout = timeout
        self._lock = threading.Lock()
        self._in_use: set[SideChannelLink] = set()
        self._idle: dict[Address, list[tuple[int, SideChannelLink]]] = {}
        self.closed = False

    @contextmanager
    def link(self, address: Address, fresh: bool = False) -> Iterator[tuple[SideChannelLink, bool]]:
        """Lend a connection, and tell if it was used before; raises TransferError."""
        link = None if fresh else self._take(address)
        used = link is not None
        if link is None:
            link = self._connect(address)
        try:
            if self._key and not used:
                prove_as_receiver(link, self._key)
            yield link, used
        except BaseException:
            with self._lock:
                self._in_use.discard(link)
            link.close()
            raise
        self._give_back(address, link)

    def sweep(self) -> None:
        """Close idle connections."""
        past = time.monotonic_ns() - self._timeout // 2
        with self._lock:
            old = [link for idle in self._idle.values() for since, link in idle if since < past]
            young = {
                address: [(since, link) for since, link in idle if since >= past]
                for address, idle in self._idle.items()
            }
            self._idle = {address: idle for address, idle in young.items() if idle}
        for link in old:
            link.close()

    def close(self) -> None:
        """Cut all connections, and refuse new ones."""
        with self._lock:
            self.closed = True
            links = [*self._in_use, *(link for idle in self._idle.values() for _, link in idle)]
            self._idle.clear()
        for link in links:
            link.close()

    def _take(self, address: Address) -> SideChannelLink | None:
        self.sweep()
        with self._lock:
            idle = self._idle.get(address)
            if not idle:
                return None
            _, link = idle.pop()
            self._in_use.add(link)
            return link

    def _give_back(self, address: Address, link: SideChannelLink) -> None:
        with self._lock:
            self._in_use.discard(link)
            if not self.closed:
                self._idle.setdefault(address, []).append((time.monotonic_ns(), link))
                return
        link.close()

    def _connect(self, address: Address) -> SideChannelLink:
        try:
            sock = socket.create_connection(address, self._timeout / SECOND)
        except (OSError, UnicodeError) as error:
            where = f"{address[0]}:{address[1]}"
            raise TransferError(TransferReason.UNREACHABLE, f"{where}: {error}") from error
        link = SideChannelLink(sock, self._timeout)
        with self._lock:
            if not self.closed:
                self._in_use.add(link)
                return link
        link.close()
        raise TransferError(TransferReason.CLOSED, "the receiver was closed")


@dataclass(slots=True)
class _PathLaw:
    """Models pull seconds as base + size * seconds_per_byte, by decayed least squares."""

    pulls: int = 0
    failures: int = 0
    paused_until: int = 0
    last: int = 0
    weight: float = 0.0
    mean_size: float = 0.0
    mean_s: float = 0.0
    size_var: float = 0.0
    covariance: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        old = self.weight * _DECAY
        self.weight = old + 1.0
        off_size, off_s = size - self.mean_size, seconds - self.mean_s
        self.mean_size += off_size / self.weight
        self.mean_s += off_s / self.weight
        part = old / self.weight
        self.size_var = part * (self.size_var + off_size * off_size / self.weight)
        self.covariance = part * (self.covariance + off_size * off_s / self.weight)
        self.pulls += 1
        self.failures = 0

    def predict(self, size: int) -> float:
        """Predict the seconds of a pull; proportional to bytes if only one size was seen."""
        proportional = self.mean_s / max(self.mean_size, 1.0)
        if self.size_var <= (0.05 * self.mean_size) ** 2:
            return proportional * size
        slope = min(max(self.covariance / self.size_var, 0.0), proportional)
        return self.mean_s + slope * (size - self.mean_size)


@dataclass(slots=True)
class _HostPaths:
    laws: dict[str, _PathLaw] = field(default_factory=dict)
    pulls: int = 0
    total_s: float = 0.0
    explored_s: float = 0.0


class PathTimes:
    """Learns pull times by host and backend; deterministic, without a clock."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, _HostPaths] = OrderedDict()

    def order(self, host: str, names: Sequence[str], size: int) -> list[str]:
        """Return backends in the order to try: fastest predicted first.

        Those with fewer than `TRIES` pulls come before it, as does one idle for `_MIN_IDLE` pulls
        if trying it keeps exploration within `EXPLORED_SHARE` of the host's time. Recently failed
        ones come last.
        """
        paths = self._paths(host)
        laws = {name: paths.laws.setdefault(name, _PathLaw()) for name in names}
        well = [name for name in names if laws[name].paused_until <= paths.pulls]
        paused = [name for name in names if name not in well]
        new = [name for name in well if laws[name].pulls < TRIES]
        known = sorted(
            (name for name in well if name not in new), key=lambda name: laws[name].predict(size)
        )
        if not new and len(known) > 1:
            best_s = laws[known[0]].predict(size)
            left_s = EXPLORED_SHARE * paths.total_s - paths.explored_s
            stale = min(known[1:], key=lambda name: laws[name].last)
            idle = paths.pulls - laws[stale].last >= _MIN_IDLE
            if idle and laws[stale].predict(size) - best_s <= left_s:
                known.remove(stale)
                known.insert(0, stale)
        return [*new, *known, *paused]

    def add(self, host: str, name: str, size: int, seconds: float) -> bool:
        """Record a complete pull; True if it is the path's first."""
        paths = self._paths(host)
        law = paths.laws.setdefault(name, _PathLaw())
        others = [other for key, other in paths.laws.items() if key != name and other.pulls]
        if law.pulls >= TRIES and others:
            best_s = min(other.predict(size) for other in others)
            if law.predict(size) > best_s:  # an exploration
                paths.explored_s += max(0.0, seconds - best_s)
        paths.pulls += 1
        paths.total_s += seconds
        law.add(size, seconds)
        law.last = paths.pulls
        return law.pulls == 1

    def fail(self, host: str, name: str) -> None:
        """Record a failed pull."""
        paths = self._paths(host)
        law = paths.laws.setdefault(name, _PathLaw())
        paths.pulls += 1
        law.paused_until = paths.pulls + min(_MAX_PAUSE, _MIN_PAUSE << law.failures)
        law.failures += 1

    def predict(self, host: str, name: str, size: int) -> float | None:
        """Predict a pull's seconds; None before the first one."""
        law = self._paths(host).laws.get(name)
        return law.predict(size) if law is not None and law.pulls else None

    def _paths(self, host: str) -> _HostPaths:
        paths = self._hosts.setdefault(host, _HostPaths())
        self._hosts.move_to_end(host)
        if len(self._hosts) > _MAX_HOSTS:
            self._hosts.popitem(last=False)
        return paths
