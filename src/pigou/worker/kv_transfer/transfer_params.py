"""Ticket: the `kv_transfer_params` that travel from the sender to the receiver, opaque between."""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any

import msgspec

from pigou.config import ConfigError
from pigou.kv.hashing import chain
from pigou.request import SECOND, BlockHashes
from pigou.wire.errors import bad_request
from pigou.wire.names import WILD

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class TransferParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An offer of blocks, as the receiver is told of it."""

    remote_engine_id: _Name  # the sender; a new one at each start of its process
    remote_request_id: _Name
    # address of the sender's side channel.
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_host_id: _Name  # the sender's machine and shared-memory file system
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]  # tokens whose KV is offered
    remote_block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]  # tokens in a block
    remote_layout: _Name  # fingerprint of the sender's layout
    remote_secret: _Name  # what a receiver must show to get the blocks
    # how the blocks can be had.
    remote_backends: Annotated[list[str], msgspec.Meta(min_length=1, max_length=16)]
    remote_lease_seconds: float  # how long they are kept for a receiver that does not call
    # of the last block offered, in the chain of the prompt's blocks under its tenure: 32
    # hexadecimal digits; empty where the sender did not say.
    remote_last_hash: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")] = ""
    # HMAC-SHA256 of all other fields under the fleet's key; empty without one.
    remote_mac: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""
    do_remote_prefill: bool = True
    do_remote_decode: bool = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the side channel."""
        return self.remote_host, self.remote_port

    @property
    def blocks(self) -> int:
        """Blocks offered: those that hold `remote_num_tokens`."""
        return -(-self.remote_num_tokens // self.remote_block_size)

    def to_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` dict."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params


def signed(ticket: TransferParams, key: bytes) -> TransferParams:
    """Return a ticket with its signature; as it is where there is no key."""
    return msgspec.structs.replace(ticket, remote_mac=_mac(ticket, key)) if key else ticket


def hash_text(hash: BlockHashes) -> str:
    """Return a block's hash, shape (2,), as tickets write it."""
    return hash.astype(">u8").tobytes().hex()


def read_transfer_params(params: object, key: bytes = b"") -> TransferParams:
    """Return the ticket in `kv_transfer_params`, signed by the fleet's `key` unless that is empty.

    Raises TransferError: BAD_PARAMS, naming the field that is missing, unknown or wrong; FORGED,
    when no sender of this fleet made it.
    """
    try:
        ticket = msgspec.convert(params, TransferParams)
    except msgspec.ValidationError as error:
        raise TransferError(TransferReason.BAD_PARAMS, f"kv_transfer_params: {error}") from error
    if not ticket.do_remote_prefill:
        raise TransferError(
            TransferReason.BAD_PARAMS,
            "kv_transfer_params: do_remote_prefill is false; nothing is offered",
        )
    if key and not hmac.compare_digest(ticket.remote_mac, _mac(ticket, key)):
        raise TransferError(
            TransferReason.FORGED,
            f"the ticket {ticket.remote_request_id!r} is not signed by this fleet",
        )
    return ticket


def _mac(ticket: TransferParams, key: bytes) -> str:
    values = msgspec.to_builtins(ticket)
    # Either leg's flag is the gateway's to set, where a ticket is passed on.
    unsigned = ("remote_mac", "do_remote_decode")
    fields = sorted((name, value) for name, value in values.items() if name not in unsigned)
    return hmac.new(key, b"ticket:" + msgspec.msgpack.encode(fields), sha256).hexdigest()


log = logging.getLogger(__name__)


def checked_transfer_params(
    params: dict[str, Any], key: bytes, tokens: list[int], hashes: BlockHashes, seed: bytes
) -> TransferParams | None:
    """Return the ticket of `kv_transfer_params` if it is for this prompt; None, and a log, if not.

    Args:
        key: of the fleet, by which tickets are signed; empty takes unsigned ones.
        hashes: of its blocks, as far as they are known already; shape (n, 2).

    Raises:
        APIError: 400, they are no ticket at all.
    """
    try:
        ticket = read_transfer_params(params, key)
        _check_prompt(ticket, tokens, hashes, seed)
    except TransferError as error:
        if error.reason is TransferReason.BAD_PARAMS:
            raise bad_request(error.detail, "kv_transfer_params") from None
        log.warning("a ticket is refused, and its prompt computed here: %s", str(error))
        return None
    return ticket


def _check_prompt(
    ticket: TransferParams, tokens: list[int], hashes: BlockHashes, seed: bytes
) -> None:
    """Raise `TransferError` unless the last block offered is that block of this prompt."""
    count, size = ticket.blocks, ticket.remote_block_size
    if ticket.remote_num_tokens % size or ticket.remote_num_tokens > len(tokens):
        raise TransferError(
            TransferReason.OTHER_PROMPT,
            f"ticket {ticket.remote_request_id!r} offers {ticket.remote_num_tokens} tokens in "
            f"blocks of {size}; the prompt has {len(tokens)}",
        )
    if len(hashes) < count:
        hashes = chain(tokens[: count * size], size, seed)
    own = hash_text(hashes[count - 1])
    if not hmac.compare_digest(own, ticket.remote_last_hash):
        raise TransferError(
            TransferReason.OTHER_PROMPT,
            f"ticket {ticket.remote_request_id!r} is for other tokens, or another tenure",
        )


_POSITIVE = ("lease", "timeout", "threads", "copy_threads", "max_pending", "max_connections")
#: Backends where nobody says, the preferred one first; and all that there are.
BACKENDS = ("shm", "tcp")
ALL_BACKENDS = ("nixl", *BACKENDS)


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of one worker's Sender and Receiver; all times in nanoseconds."""

    host: str = "127.0.0.1"  # address that the side channel binds to
    port: int = 0  # its port; 0 takes a free one
    advertise: str = ""  # address that receivers are told; empty for `host`
    backends: tuple[str, ...] = BACKENDS
    # how long offered blocks are kept for a receiver that shows no sign of life.
    lease: int = 30 * SECOND
    max_hold: int = 300 * SECOND  # longest time that blocks are kept, whatever a receiver does
    timeout: int = 5 * SECOND  # longest silence of a peer during a pull or a handshake
    threads: int = 2  # pulls that a Receiver runs at once
    copy_threads: int = 2  # threads that copy one large pull from shared memory
    max_pending: int = 1024  # pulls that may wait for a thread; one more is refused
    max_connections: int = 128  # receivers that a Sender serves at once; one more is turned away

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_hold < self.lease:
            raise ConfigError(f"max_hold is {self.max_hold}; it must be at least lease")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 0 (any free port) to 65535")
        if not self.backends or set(self.backends) - set(ALL_BACKENDS):
            known = ", ".join(ALL_BACKENDS)
            raise ConfigError(f"backends is {list(self.backends)}; give one or more of: {known}")
        if self.host in WILD and not self.advertise:
            raise ConfigError(
                f"host is {self.host!r}, which no receiver can connect to; also give `advertise`"
            )


class TransferReason(StrEnum):
    """Why a pull brought all, or not all, of the blocks."""

    OK = "ok"
    BAD_PARAMS = "bad_params"
    LAYOUT = "layout_mismatch"
    UNKNOWN = "unknown_request"
    FORGED = "forged_ticket"
    UNPROVEN = "unproven_peer"
    OTHER_PROMPT = "other_prompt"
    EXPIRED = "lease_expired"
    CORRUPT = "checksum_mismatch"
    UNREACHABLE = "sender_unreachable"
    CUT = "connection_lost"
    TIMEOUT = "timeout"
    PROTOCOL = "protocol_error"
    STORE = "store_error"
    BUSY = "busy"
    CANCELLED = "cancelled"
    CLOSED = "closed"


class TransferError(Exception):
    """A transfer that cannot go on: the reason, and a detail for the log."""

    def __init__(self, reason: TransferReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What a pull brought."""

    request: str  # id of the request at the sender; empty when the ticket could not be read
    blocks: int  # leading destination blocks that hold verified bytes
    tokens: int  # tokens in those blocks (the last block of a prompt may be part full)
    reason: TransferReason  # why it ended there
    detail: str = ""  # for the log; empty when all went well
    backend: str = ""  # which moved the bytes; empty when none did
    bytes: int = 0  # bytes in `blocks`
    seconds: float = 0.0  # from the beginning of the pull (not counting its wait for a thread)
