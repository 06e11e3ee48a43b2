"""The backend `tcp`: blocks travel over the side channel itself."""

from __future__ import annotations

from collections.abc import Callable

from pigou.kv.block import Bytes
from pigou.request import Ints
from pigou.worker.kv_transfer.block_store import BlockStore
from pigou.worker.kv_transfer.receive_buffer import ReceiveBuffer, runs_of
from pigou.worker.kv_transfer.result import TransferError, TransferReason
from pigou.worker.kv_transfer.side_channel_protocol import (
    Data,
    GrantFrame,
    SideChannelLink,
    expect,
    expect_checksums,
)
from pigou.worker.kv_transfer.transfer_params import TransferParams

#: Bytes that follow one Data frame, when blocks are smaller than that.
MESSAGE_BYTES = 1 << 20


class TcpExport:
    """The sender's end: streams blocks straight out of the cache where it is host memory."""

    name = "tcp"

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._step = max(1, MESSAGE_BYTES // store.layout.block_bytes)

    def details(self, blocks: Ints) -> dict[str, bytes | int]:  # noqa: ARG002
        """Nothing: the blocks come by themselves."""
        return {}

    def push(self, link: SideChannelLink, blocks: Ints, keep: Callable[[], None]) -> None:
        """Send every block; each message's bytes are valid as the lease held after it."""
        rows = self._store.as_bytes()
        for i in range(0, len(blocks), self._step):
            ids = blocks[i : i + self._step]
            runs = [self._store.read(ids)] if rows is None else runs_of(rows, ids)
            keep()
            link.send(Data(len(ids)), [_flat(run) for run in runs])

    def finish(self, details: dict[str, bytes | int]) -> None:
        """Nothing: no pull has anything of its own."""

    def close(self) -> None:
        """Nothing is kept between pulls."""


class TcpImport:
    """The receiver's end: receives straight into the cache where it is host memory."""

    name = "tcp"
    needs_confirmation = False

    def reaches(self, ticket: TransferParams) -> bool:  # noqa: ARG002
        """Always: the side channel is reached, or nothing is."""
        return True

    def fetch(
        self,
        link: SideChannelLink,
        granted: GrantFrame,  # noqa: ARG002
        landing: ReceiveBuffer,
        renew: Callable[[], None],  # noqa: ARG002
    ) -> None:
        """Receive until every block is there."""
        landing.verify(expect_checksums(link, len(landing)))
        arrived = 0
        while arrived < len(landing):
            count = expect(link, Data).blocks
            if not 0 < count <= len(landing) - arrived:
                raise TransferError(TransferReason.PROTOCOL, f"{count} blocks after {arrived}")
            for first, size in landing.chunks(arrived, arrived + count):
                targets = landing.targets(first, size)
                link.receive_into([_flat(run) for run in targets])
                landing.accept(first, targets)
            arrived += count

    def sweep(self) -> None:
        """Nothing is kept between pulls."""

    def close(self) -> None:
        """Nothing is kept between pulls."""


def _flat(run: Bytes) -> memoryview:
    return run.reshape(-1).data
