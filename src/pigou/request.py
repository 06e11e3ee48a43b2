"""The nouns that every floor shares: requests, sampling parameters, workers, KV events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import KVQuota

#: Nanoseconds in a second. All times in the cores are integer nanoseconds.
SECOND = 1_000_000_000
#: Account of all that have no weight of their own, where it has one.
POOL = "*"
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
#: Counts, flags, and real numbers, mostly one per worker.
Counts: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
Shares: TypeAlias = NDArray[np.float64]
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
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
    local: bool = True  # the streaming one may compute it
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
    # counts of words and marks in the prompt's text (`pigou.control.lengths`); empty if not read.
    features: tuple[float, ...] = ()
    expected: int = 0  # output tokens that its server predicts; 0 for unknown
    payer: str = ""  # account of its weight, counters and quota; empty for its tenant's
    workload: str = ""  # name of its workload class; empty without one
    salt: str = ""  # salt of the tenure, if that ends: at `expiry`, or before

    @property
    def account(self) -> str:
        """Name that admission shares by: of the payer, or else of the tenant."""
        return self.payer or self.tenant

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


def payer_of(account: str, weights: Mapping[str, float]) -> str:
    """Return whose weight an account has: that of all without one is `*`, where `*` has one."""
    return POOL if POOL in weights and account not in weights else account


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match."""

    kind: GrammarKind  # the language that `source` is written in
    # a JSON schema as text, a regular expression, a Lark grammar, or a JSON list of strings
    # (`choice`); empty for `json_object`.
    source: str = ""
    flexible: bool = False  # JSON may have white space between its parts
    # regular expression of that white space; None for the usual characters.
    whitespace: str | None = None
    # tokens after which JSON ends as soon as its schema allows; 0 for no bound.
    close_after: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, already checked."""

    max_tokens: int  # most tokens to generate, at least 1
    min_tokens: int = 0  # no end or stop token before this many
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability, in (0, 1]
    # keep tokens at least this share as probable as the most probable, in [0, 1].
    min_p: float = 0.0
    presence_penalty: float = 0.0  # subtracted once from the logit of every token generated before
    frequency_penalty: float = 0.0  # subtracted for every time that the token was generated before
    # divides (or multiplies, when negative) the logits of tokens of the prompt and the output; 1
    # does nothing.
    repetition_penalty: float = 1.0
    # key of the generator, with the position: a sequence continued elsewhere draws the same tokens.
    seed: int = 0
    # how many most probable tokens to report beside the chosen; None for no report.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for every token of the prompt
    pooling: str | None = None  # how the prompt's hidden states are pooled: last or mean
    # end the sequence; the token counts as generated, and its text is not shown.
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # the model's end token does not end the sequence
    # added to the logits of these tokens.
    logit_bias: dict[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None


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
    long_lane: str = ""  # lane for long prompts, as `LaneConfig.parse` reads it; "" for none

    @property
    def fetch_layout(self) -> str:
        """What two workers must have in common to read each other's caches; "" for none may."""
        return f"{self.layout}@{self.version}" if self.layout and self.version else self.layout


class EndedTenures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tenures that ended, by the `cache_salt` of their requests."""

    salts: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=128)]], msgspec.Meta(max_length=1024)
    ]


class EngineLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a worker's engine; None for those that it was started with."""

    max_seqs: Annotated[int, msgspec.Meta(ge=1)] | None = None  # running requests
    max_batched_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None  # tokens per step
    # KV quotas by tenant, as workers know them; None to leave them.
    kv_quotas: dict[str, KVQuota] | None = None

    def over(self, other: EngineLimits) -> EngineLimits:
        """Return these limits, and another's where these are None."""
        return EngineLimits(
            self.max_seqs or other.max_seqs,
            self.max_batched_tokens or other.max_batched_tokens,
            other.kv_quotas if self.kv_quotas is None else self.kv_quotas,
        )


class Medium(StrEnum):
    """The tier that holds a block, by vLLM's names on the wire."""

    DEVICE = "GPU"
    HOST = "CPU"
    STORAGE = "STORAGE"


class BlockStored(msgspec.Struct, frozen=True):
    """Consecutive blocks of one request became full, and can be hit from now on.

    Those of a tier beyond the device arrived there: they are nobody's request's. The worker joins
    the token ids that the wire format wants (`pigou.wire.kv_event_decoding`).
    """

    request: str  # id of the request that computed (or loaded) them; empty for a tier
    first: int  # index of the first of these blocks within the request
    hashes: BlockHashes  # shape (blocks, 2)
    # hash of the block before `first`, shape (1, 2); shape (0, 2) at the beginning.
    parent: BlockHashes
    medium: Medium = Medium.DEVICE


class BlockRemoved(msgspec.Struct, frozen=True):
    """Blocks can no longer be hit: their memory was reused."""

    hashes: BlockHashes  # shape (blocks, 2)
    medium: Medium = Medium.DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The whole cache was emptied."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
