"""KV transfer: blocks move from the worker that computed them to the one that decodes.

A `Sender` offers blocks under a lease, and answers with an opaque ticket; a `Receiver` pulls them
by shared memory or TCP, verifies every block, and says how many it has.
"""

from pigou.worker.transfer.auth import transfer_key
from pigou.worker.transfer.config import TransferConfig
from pigou.worker.transfer.memory import SharedMemory, remove_orphans
from pigou.worker.transfer.outcome import Outcome, Reason, Stats, TransferError
from pigou.worker.transfer.receiver import Pull, Receiver
from pigou.worker.transfer.sender import Sender
from pigou.worker.transfer.store import BlockStore, HostStore

__all__ = [
    "BlockStore",
    "HostStore",
    "Outcome",
    "Pull",
    "Reason",
    "Receiver",
    "Sender",
    "SharedMemory",
    "Stats",
    "TransferConfig",
    "TransferError",
    "remove_orphans",
    "transfer_key",
]
