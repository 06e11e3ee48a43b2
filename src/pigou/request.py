"""The nouns that every floor shares: a request, a worker, a role, block hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

#: Nanoseconds in a second. All times in the cores are integer nanoseconds.
SECOND = 1_000_000_000
#: A time that never comes (int64 nanoseconds).
NEVER = 2**63 - 1

#: Hashes of consecutive full blocks, shape (blocks, 2): 128 bits as two uint64, (high, low).
#: The pair (0, 0) means "no hash": such a block is never shared.
BlockHashes: TypeAlias = NDArray[np.uint64]
#: The router's keys of consecutive full blocks, shape (blocks,); a collision only misroutes.
BlockKeys: TypeAlias = NDArray[np.uint64]
#: Indices of blocks, slots or tokens.
Ints: TypeAlias = NDArray[np.int32]
#: Nanoseconds.
Nanos: TypeAlias = NDArray[np.int64]
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
#: Writable, as all other keys are: kernels are compiled anew for arrays that are not.
_NO_KEYS: BlockKeys = np.empty(0, dtype=np.uint64)


def no_hashes() -> BlockHashes:
    """Return an empty array of block hashes, shape (0, 2)."""
    return np.empty((0, 2), dtype=np.uint64)


class Role(StrEnum):
    """What a worker is asked to do. Every worker is able to do both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        """Whether prompts may be sent here for another worker to decode."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether streams may run here."""
        return self is not Role.PREFILL


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_NO_HASHES = no_hashes()
_NO_HASHES.flags.writeable = False


class Request(msgspec.Struct, frozen=True, eq=False, omit_defaults=True):  # made often
    """One sequence to compute: lengths, block hashes and urgency, but no token ids."""

    id: str  # unique among the requests in flight
    prompt: int  # tokens of the prompt, at least 1
    max_tokens: int  # most tokens to generate, at least 1
    # hashes of the prompt's full blocks, shape (prompt // block_size, 2); fewer rows leave the
    # other blocks unshared.
    hashes: BlockHashes = _NO_HASHES
    priority: int = 0  # lower goes first (vLLM's convention)
    arrival: int = 0  # when it arrived, in nanoseconds
    deadline: int = NEVER  # by when its first token is wanted, in nanoseconds
    tenant: str = ""
    remote: int = 0  # tokens of the prompt whose KV another worker offers; 0 for none
    # keep the prompt's blocks after the finish, until they are released (prefill leg).
    hold: bool = False
    # the router's keys of the prompt by block size; a size that is not there falls back to the low
    # halves of `hashes`.
    keys: Mapping[int, BlockKeys] = _NOTHING
    # parameters of the routing policy that hold for this request only.
    overrides: Mapping[str, float] = _NOTHING
    streamed: bool = True  # the driver sees tokens as they come, and reports them
    splits: bool = True  # another worker than the streaming one may compute the prompt
    # end of its tenure, when its cached blocks become void, in nanoseconds since 1970.
    expiry: int = NEVER
    sequences: int = 1  # sequences that its worker computes together, at least 1
    # id of the client's request that it is a sequence of; empty for a single sequence.
    group: str = ""
    held: int = 0  # sequences of the group that its driver has not submitted yet
    held_tokens: int = 0
    # requested model name where it differs from its workers' own, as for an adapter.
    model: str = ""
    eligible: frozenset[str] = frozenset()  # ids of the workers that can serve it; empty for all

    @property
    def is_follower(self) -> bool:
        """Whether it is a further sequence of a group, the first of which was accepted."""
        return self.group not in ("", self.id)

    def keys_of(self, block_size: int) -> BlockKeys:
        """Return the router's keys of the prompt's full blocks of this size, shape (blocks,)."""
        keys = self.keys.get(block_size)
        if keys is not None:
            return keys
        return self.hashes[:, 1] if len(self.hashes) else _NO_KEYS


class Rehearsed(NamedTuple):
    """What a worker measured before it was ready: a prompt, streams, or a prompt beside streams."""

    tokens: int  # prompt length, nothing cached; 0 for no prompt
    streams: int  # streams that decoded a token in each step; 0 for none
    steps: int
    seconds: float


class Location(NamedTuple):
    """Where a worker runs, by the labels of its node; empty where a label is not known."""

    host: str = ""  # the machine; unique over all racks
    rack: str = ""
    zone: str = ""


UNKNOWN_LOCATION = Location()


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the control plane knows it."""

    id: str
    url: str  # base address of its HTTP server, without a trailing slash
    role: Role = Role.BOTH
    block_size: int = 16  # tokens in one of its KV blocks
    blocks: int = 0  # KV blocks; 0 if unknown
    max_seqs: int = 0  # maximum of concurrent sequences; 0 if unknown
    events: bool = True  # whether it publishes KV events; if not, what it holds is predicted
    # whether its requests of a lower priority overtake others between any two steps, prompts that
    # were begun among them.
    overtakes: bool = False
    # layout id of its cache; workers of one layout read from each other, "" takes no part.
    layout: str = ""
    # own speed, measured at startup; empty if unknown.
    rehearsed: tuple[Rehearsed, ...] = ()
    location: Location = UNKNOWN_LOCATION  # the labels of its node
    version: str = ""  # deployment version; workers of different versions exchange no KV

    @property
    def fetch_layout(self) -> str:
        """What two workers must have in common to read each other's caches; "" for none may."""
        return f"{self.layout}@{self.version}" if self.layout and self.version else self.layout
