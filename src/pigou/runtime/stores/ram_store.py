"""Store of KV blocks in the machine's shared memory: it survives its worker, not the machine."""

from __future__ import annotations

from pathlib import Path

from pigou.runtime.stores.disk_store import DiskStore

_FOLDER = Path("/dev/shm/pigou-tiers")


def open_ram(uri: str, namespace: bytes, block_bytes: int, cap_bytes: int) -> DiskStore:
    """Open the blocks under the name `uri`; raises StoreError if another worker uses it."""
    if not uri or ".." in uri:
        raise ValueError(f"its place is {uri!r}; it must be a name, as in ram=8GiB@chat")
    return DiskStore(_FOLDER / uri, namespace, block_bytes, cap_bytes)
