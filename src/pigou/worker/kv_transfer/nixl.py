"""The backend `nixl`: one-sided reads by NIXL, over RDMA if UCX supports it, else TCP.

NIXL's progress thread busy-polls, so agents disable it. A sender's thread progresses UCX during
pulls; a receiver does while it waits.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pigou.config import ConfigError
from pigou.kv.block import Bytes
from pigou.registry import remedy
from pigou.request import SECOND, Ints
from pigou.runtime.stores.store import DeviceBlocks
from pigou.worker.kv_transfer.backends import (
    BackendUnavailable,
    ReceiveBackend,
    SendBackend,
    check_within,
    granted_blocks,
)
from pigou.worker.kv_transfer.block_store import ReceiveBuffer
from pigou.worker.kv_transfer.side_channel_protocol import (
    GrantFrame,
    SideChannelLink,
    expect_checksums,
)
from pigou.worker.kv_transfer.transfer_params import TransferError, TransferReason

log = logging.getLogger(__name__)

#: The package for the installed CUDA; otherwise any, as all move host memory.
_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
#: Bytes per NIXL request; each is bounded by the timeout, then verified.
_READ_BYTES = 16 << 20
#: Polling interval of a running transfer, in seconds.
_POLL_S = 0.0001
#: Seconds after which a stuck read is logged.
_STUCK_S = 5.0
#: Max peers of an agent.
_MAX_PEERS = 256


def load_nixl() -> Any:
    """Import NIXL's Python API; raises ConfigError if it is missing or broken."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it logs to stdout
    errors = []
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except Exception as error:
            errors.append(f"{package}: {error}")
    raise ConfigError(
        "kv_transfer has nixl, and NIXL cannot be loaded "
        f"({'; '.join(errors)}): {remedy('nixl')}, or leave nixl out"
    )


class NixlAgent:
    """A NIXL agent with one store's blocks registered; calls must not overlap."""

    def __init__(self, rows: Bytes | None) -> None:
        """Create an agent, registering `rows`; raises ConfigError without NIXL or UCX."""
        api = load_nixl()
        self.name = f"pigou-{uuid.uuid4()}"
        self.lock = threading.Lock()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self._agent = api.nixl_agent(self.name, config)
            self._registered = [] if rows is None else [self.register(rows)]
        except Exception as error:
            raise ConfigError(f"kv_transfer has nixl, and no agent of it starts: {error}") from None
        self._peers: dict[bytes, str] = {}

    def register(self, rows: Bytes) -> Any:
        """Register memory; return the handle for `deregister`."""
        with self.lock:
            region = (rows.ctypes.data, rows.nbytes, 0, "")
            return self._agent.register_memory([region], "DRAM")

    def deregister(self, region: Any) -> None:
        """Deregister memory."""
        with self.lock:
            self._agent.deregister_memory(region)

    def metadata(self) -> bytes:
        """Return the metadata other agents need to read the registered memory."""
        with self.lock:
            return bytes(self._agent.get_agent_metadata())

    def progress(self) -> None:
        """Let UCX make progress."""
        with self.lock:
            self._agent.get_new_notifs()

    def peer(self, metadata: bytes) -> str:
        """Return the name of the agent that made `metadata`, adding it if new."""
        with self.lock:
            if metadata not in self._peers:
                if len(self._peers) >= _MAX_PEERS:
                    self._forget(next(iter(self._peers)))
                name = self._agent.add_remote_agent(metadata)
                self._peers[metadata] = name if isinstance(name, str) else name.decode()
            return self._peers[metadata]

    def forget(self, metadata: bytes) -> None:
        """Disconnect from the agent that made `metadata`."""
        with self.lock:
            self._forget(metadata)

    def _forget(self, metadata: bytes) -> None:
        name = self._peers.pop(metadata, None)
        if name is not None and name not in self._peers.values():
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:
                log.debug("NIXL cannot let go of %s: %s", name, str(error))

    def read(self, peer: str, local: Any, remote: Any) -> Any:
        """Start a read and return its handle; `local` is (n, 3): address, bytes, device."""
        with self.lock:
            ours = self._agent.get_xfer_descs(local, "DRAM")
            theirs = self._agent.get_xfer_descs(remote, "DRAM")
            handle = self._agent.initialize_xfer("READ", ours, theirs, peer)
            self._agent.transfer(handle)
            return handle

    def state(self, handle: Any) -> str:
        """Return a read's state: PROC, DONE or ERR."""
        with self.lock:
            return str(self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> bool:
        """Cancel or free a read; True if no more bytes can arrive."""
        with self.lock:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:
                log.debug("a read by NIXL cannot be released yet: %s", str(error))
                return False
            return True

    def close(self) -> None:
        """Disconnect from all peers, and deregister all memory."""
        for metadata in list(self._peers):
            self.forget(metadata)
        for region in self._registered:
            self.deregister(region)
        self._registered.clear()
        del self._agent


class NixlExport(SendBackend):
    """Sender of `nixl`: tells where the blocks are, and progresses UCX during reads."""

    name = "nixl"

    def __init__(self, store: DeviceBlocks) -> None:
        self._store = store
        self._rows = store.as_bytes()
        self._agent = NixlAgent(self._rows)
        self._metadata = b"" if self._rows is None else self._agent.metadata()
        self._staged: dict[int, tuple[Bytes, Any]] = {}
        self._wake = threading.Condition()
        self._pulls, self._closed = 0, False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    def details(self, blocks: Ints) -> dict[str, bytes | int]:
        """Return agent metadata, block addresses and block ids (int32, little-endian)."""
        rows, metadata, ids = self._rows, self._metadata, blocks
        if rows is None:
            rows, ids = self._store.read(blocks), np.arange(len(blocks), dtype=np.int32)
            region = self._agent.register(rows)
            metadata = self._agent.metadata()
            self._staged[rows.ctypes.data] = rows, region
        with self._wake:
            self._pulls += 1
            self._wake.notify()
        return {
            "metadata": metadata,
            "address": int(rows.ctypes.data),
            "rows": len(rows),
            "blocks": ids.astype("<i4").tobytes(),
        }

    def finish(self, details: dict[str, bytes | int]) -> None:
        """Stop progressing for this pull, and deregister its memory."""
        with self._wake:
            self._pulls -= 1
        address = details["address"]
        if isinstance(address, int) and address in self._staged:
            self._agent.deregister(self._staged.pop(address)[1])

    def close(self) -> None:
        """Stop the thread, and deregister the memory."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self._agent.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pulls or self._closed)
                if self._closed:
                    return
            self._agent.progress()
            time.sleep(_POLL_S)


class NixlImport(ReceiveBackend):
    """Receiver of `nixl`: reads the sender's memory into the blocks."""

    name = "nixl"
    needs_confirmation = True

    def __init__(self, store: DeviceBlocks, timeout: int) -> None:
        """Read into `store`; a request without progress for `timeout` ns fails."""
        self._agent = NixlAgent(store.as_bytes())
        self._in_place = store.as_bytes() is not None
        self._timeout_s = timeout / SECOND

    def fetch(
        self, link: SideChannelLink, granted: GrantFrame, landing: ReceiveBuffer,
        renew: Callable[[], None],
    ) -> None:  # fmt: skip
        """Read piece by piece, verifying each on arrival."""
        sums = expect_checksums(link, len(landing))
        metadata, remote = _source(granted, landing)
        try:
            peer = self._agent.peer(metadata)
        except Exception as error:
            raise BackendUnavailable(f"NIXL does not know the sender: {error}") from error
        landing.verify(sums)
        step = max(1, _READ_BYTES // landing.block_bytes)
        for first in range(0, len(landing), step):
            count = min(step, len(landing) - first)
            targets = landing.targets(first, count)
            region = None if self._in_place else self._agent.register(targets[0])
            try:
                self._read(peer, metadata, _addresses(targets), remote[first : first + count],
                           landing.block_bytes, first == 0, renew)  # fmt: skip
            finally:
                if region is not None:
                    self._agent.deregister(region)
            landing.accept(first, targets)

    def close(self) -> None:
        """Close the agent."""
        self._agent.close()

    def _read(
        self, peer: str, metadata: bytes, local: Any, remote: Any, size: int, first: bool,
        renew: Callable[[], None],
    ) -> None:  # fmt: skip
        try:
            handle = self._agent.read(peer, *merged(local, remote, size))
        except Exception as error:
            self._agent.forget(metadata)
            if first:
                raise BackendUnavailable(f"NIXL cannot read: {error}") from error
            raise TransferError(TransferReason.CUT, f"NIXL cannot read: {error}") from error
        state, why, deadline = "ERR", "", time.monotonic() + self._timeout_s
        try:
            while (state := self._agent.state(handle)) == "PROC":
                if time.monotonic() > deadline:
                    raise TransferError(TransferReason.TIMEOUT, "NIXL read nothing for too long")
                renew()
                time.sleep(_POLL_S)
        except TransferError:
            raise
        except Exception as failure:  # NIXL raises on lost peers
            why = str(failure)
        finally:
            self._end(handle, metadata, state == "DONE")
        if state != "DONE":
            raise TransferError(TransferReason.CUT, f"a read by NIXL failed: {why or state}")

    def _end(self, handle: Any, metadata: bytes, done: bool) -> None:
        """Free a read; return once nothing can write to its blocks."""
        began, logged = time.monotonic(), False
        released = self._agent.release(handle)
        if not done:
            self._agent.forget(metadata)
        while not (released or self._agent.release(handle)):
            if not logged and time.monotonic() - began > _STUCK_S:
                log.error("a read by NIXL does not end; its blocks stay taken")
                logged = True
            time.sleep(10 * _POLL_S)


def merged(local: Any, remote: Any, size: int) -> tuple[Any, Any]:
    """Merge blocks consecutive at both ends; returns (pieces, 3): address, bytes, device."""
    step = np.uint64(size)
    cuts = (local[1:] - local[:-1] != step) | (remote[1:] - remote[:-1] != step)
    starts = np.concatenate([[0], cuts.nonzero()[0] + 1])
    blocks = np.diff(np.append(starts, len(local))).astype(np.uint64)
    zeros = np.zeros(len(starts), dtype=np.uint64)
    ours, theirs = (
        np.stack([address[starts], blocks * step, zeros], axis=1) for address in (local, remote)
    )
    return ours, theirs


def _addresses(runs: Sequence[Bytes]) -> Any:
    """Return the address of each row, uint64."""
    parts = [
        np.uint64(run.ctypes.data) + np.arange(len(run), dtype=np.uint64) * np.uint64(run.shape[1])
        for run in runs
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


def _source(granted: GrantFrame, landing: ReceiveBuffer) -> tuple[bytes, Any]:
    """Return the sender's agent metadata and block addresses, uint64."""
    metadata, address = granted.details.get("metadata"), granted.details.get("address")
    count = granted.details.get("rows")
    if not (isinstance(metadata, bytes) and isinstance(address, int) and isinstance(count, int)):
        raise TransferError(TransferReason.PROTOCOL, "the grant names no NIXL agent")
    ids = granted_blocks(granted, landing)
    check_within(ids, count)
    if not 0 < address < 2**63 - count * landing.block_bytes:
        raise TransferError(TransferReason.PROTOCOL, f"no memory lies at {address}")
    return metadata, np.uint64(address) + ids.astype(np.uint64) * np.uint64(landing.block_bytes)
