"""KV events: what a cache tells the world, as values.

Core events carry (request, block range, hashes, parent); the worker joins the token ids that
the wire format wants (`pigou.wire.kv_event_decoding`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from pigou.request import BlockHashes


class Medium(StrEnum):
    """The tier that holds a block, by vLLM's names on the wire."""

    DEVICE = "GPU"
    HOST = "CPU"
    STORAGE = "STORAGE"


class BlockStored(msgspec.Struct, frozen=True):
    """Consecutive blocks of one request became full, and can be hit from now on.

    Those of a tier beyond the device arrived there: they are nobody's request's.
    """

    request: str  # id of the request that computed (or loaded) them; empty for a tier
    first: int  # index of the first of these blocks within the request
    hashes: BlockHashes  # shape (blocks, 2)
    # hash of the block before `first`, shape (1, 2); shape (0, 2) at the beginning.
    parent: BlockHashes
    medium: Medium = Medium.DEVICE


class BlockRemoved(msgspec.Struct, frozen=True):
    """Blocks can no longer be hit: their memory was handed out again."""

    hashes: BlockHashes  # shape (blocks, 2)
    medium: Medium = Medium.DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The whole cache was emptied."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
