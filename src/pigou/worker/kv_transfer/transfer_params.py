"""TransferParams: the ticket (`kv_transfer_params`) that a sender gives a receiver."""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any

import msgspec

from pigou.config import ConfigError, check_fields
from pigou.kv.hashing import chain
from pigou.request import SECOND, BlockHashes
from pigou.wire.errors import bad_request
from pigou.wire.names import WILD

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
log = logging.getLogger(__name__)
_POSITIVE = ("lease", "timeout", "threads", "copy_threads", "max_pending", "max_connections")
#: Default backends, the preferred first; and all supported ones.
BACKENDS = ("shm", "tcp")
ALL_BACKENDS = ("nixl", *BACKENDS)


class TransferParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An offer of blocks."""

    remote_engine_id: _Name  # the sender, unique per process start
    remote_request_id: _Name
    # the sender's side channel.
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_host_id: _Name  # sender's machine and shared-memory file system
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]  # tokens offered
    remote_block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]  # tokens
    remote_layout: _Name  # fingerprint of the sender's layout: whole blocks, of all KV heads
    remote_tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 1  # sender's ranks
    remote_secret: _Name  # required to get the blocks
    remote_backends: Annotated[list[str], msgspec.Meta(min_length=1, max_length=16)]
    remote_lease_seconds: float  # hold time without a receiver
    # chain hash of the last block offered, under the prompt's tenure; empty if unknown.
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
        """Blocks offered, holding `remote_num_tokens`."""
        return -(-self.remote_num_tokens // self.remote_block_size)

    def to_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` dict."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params


def signed(ticket: TransferParams, key: bytes) -> TransferParams:
    """Return a signed ticket; unchanged without a key."""
    return msgspec.structs.replace(ticket, remote_mac=_mac(ticket, key)) if key else ticket


def hash_text(hash: BlockHashes) -> str:
    """Format a block's hash, shape (2,), as tickets do."""
    return hash.astype(">u8").tobytes().hex()


def read_transfer_params(params: object, key: bytes = b"") -> TransferParams:
    """Parse and verify a ticket; raises TransferError BAD_PARAMS or FORGED."""
    try:
        ticket = msgspec.convert(params, TransferParams)
    except msgspec.ValidationError as error:
        raise TransferError(TransferReason.BAD_PARAMS, f"kv_transfer_params: {error}") from error
    if not ticket.do_remote_prefill:
        why = "kv_transfer_params: do_remote_prefill is false; nothing is offered"
        raise TransferError(TransferReason.BAD_PARAMS, why)
    if key and not hmac.compare_digest(ticket.remote_mac, _mac(ticket, key)):
        why = f"the ticket {ticket.remote_request_id!r} is not signed by this fleet"
        raise TransferError(TransferReason.FORGED, why)
    return ticket


def _mac(ticket: TransferParams, key: bytes) -> str:
    values = msgspec.to_builtins(ticket)
    # Either leg's flag is the gateway's to set, where a ticket is passed on.
    unsigned = ("remote_mac", "do_remote_decode")
    fields = sorted((name, value) for name, value in values.items() if name not in unsigned)
    return hmac.new(key, b"ticket:" + msgspec.msgpack.encode(fields), sha256).hexdigest()


def checked_transfer_params(
    params: dict[str, Any], key: bytes, tokens: list[int], hashes: BlockHashes, seed: bytes
) -> TransferParams | None:
    """Return the ticket if it matches this prompt; otherwise log and return None.

    `key` as in `read_transfer_params`; `hashes` are the block hashes known so far, (n, 2). Raises
    APIError 400 if it is malformed.
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
    """Raise `TransferError` unless the last offered block is this prompt's."""
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
        why = f"ticket {ticket.remote_request_id!r} is for other tokens, or another tenure"
        raise TransferError(TransferReason.OTHER_PROMPT, why)


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a worker's Sender and Receiver; all times in nanoseconds."""

    host: str = "127.0.0.1"  # bind address of the side channel
    port: int = 0  # 0 for a free port
    advertise: str = ""  # address told to receivers; empty for `host`
    backends: tuple[str, ...] = BACKENDS
    lease: int = 30 * SECOND  # hold time without a sign of life of a receiver
    max_hold: int = 300 * SECOND  # max hold time
    timeout: int = 5 * SECOND  # max silence of a peer during a pull or handshake
    tensor_parallel_size: int = 1  # told to receivers
    threads: int = 2  # concurrent pulls of a Receiver
    copy_threads: int = 2  # threads per large shared-memory pull
    max_pending: int = 1024  # max queued pulls
    max_connections: int = 128  # max concurrent receivers of a Sender

    def __post_init__(self) -> None:
        check_fields(self, *_POSITIVE, ge=1)
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
    """Outcome of a pull."""

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


#: Failures of the path, not of the request.
PATH_FAILURES = {TransferReason.CUT, TransferReason.TIMEOUT}


class TransferError(Exception):
    """Raised when a transfer cannot continue: a reason, and details for the log."""

    def __init__(self, reason: TransferReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a pull."""

    request: str  # request id at the sender; empty if the ticket was unreadable
    blocks: int  # leading verified destination blocks
    tokens: int  # tokens in those blocks (a prompt's last block may be partial)
    reason: TransferReason
    detail: str = ""  # for the log; empty on success
    backend: str = ""  # backend that moved the bytes; empty if none did
    bytes: int = 0  # bytes in `blocks`
    seconds: float = 0.0  # excluding the wait for a thread
