"""KV transfer: blocks move from the worker that computed them to the one that decodes.

A `Sender` offers blocks under a lease, and answers with an opaque ticket; a `Receiver` pulls them
by shared memory or TCP, verifies every block, and says how many it has.
"""

from pigou.worker.kv_transfer.block_store import (
    BlockStore,
    HostBlockStore,
    SharedMemory,
    remove_orphans,
)
from pigou.worker.kv_transfer.receiver import Pull, Receiver
from pigou.worker.kv_transfer.result import (
    TransferError,
    TransferReason,
    TransferResult,
    TransferStats,
)
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.side_channel_protocol import transfer_key
from pigou.worker.kv_transfer.transfer_config import TransferConfig

__all__ = [
    "BlockStore",
    "HostBlockStore",
    "Pull",
    "Receiver",
    "Sender",
    "SharedMemory",
    "TransferConfig",
    "TransferError",
    "TransferReason",
    "TransferResult",
    "TransferStats",
    "remove_orphans",
    "transfer_key",
]
