"""KV transfer between vLLM servers, in two halves: one in its scheduler, one in each worker.

Both use Pigou's sender, receiver and tickets, and import nothing of vLLM: `connector` binds them.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from pigou.config import ConfigError
from pigou.kv import checksum
from pigou.kv.block import Bytes, KVLayout
from pigou.request import SECOND, Ints
from pigou.wire.fleet_secret import FleetSecret
from pigou.worker.kv_transfer.lease import LeasedBlocks
from pigou.worker.kv_transfer.receiver import Pull, Receiver
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.side_channel_protocol import transfer_key
from pigou.worker.kv_transfer.transfer_params import (
    BACKENDS,
    TransferConfig,
    TransferError,
    TransferParams,
    TransferReason,
    TransferResult,
    read_transfer_params,
    signed,
)

log = logging.getLogger("vllm.pigou")  # below vLLM's logger, which has the handlers
_SENT = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of `kv_connector_extra_config`."""

    host: str = "127.0.0.1"  # bind address of the side channel
    port: int = 0  # rank 0's, the next ranks follow; 0 for free ports
    advertise: str = ""  # address told to receivers; empty for `host`
    backends: tuple[str, ...] = BACKENDS
    lease_s: float = 30.0  # hold time without a sign of life of a receiver
    timeout_s: float = 5.0  # longest silence of a peer
    fleet_secret_file: str = ""  # else PIGOU_FLEET_SECRET of the environment

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Parse `kv_connector_extra_config`; raises ConfigError."""
        try:
            config = msgspec.convert(dict(extra), cls)
            config.transfer(0)
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"kv_connector_extra_config: {error}; fields are {known}") from None
        return config

    def transfer(self, rank: int) -> TransferConfig:
        """Return the limits of a rank's sender and receiver; raises ConfigError."""
        lease, port = int(self.lease_s * SECOND), self.port + rank if self.port else 0
        return TransferConfig(
            host=self.host, port=port, advertise=self.advertise, backends=self.backends,
            lease=lease, max_hold=10 * lease, timeout=int(self.timeout_s * SECOND),
        )  # fmt: skip

    def key(self) -> bytes:
        """Return the key of the fleet secret, empty without one; raises ConfigError."""
        secret = FleetSecret.given(self.fleet_secret_file, dict(os.environ))
        return b"" if secret is None else transfer_key(secret)


def prompt_hash(request: Any, tokens: int) -> str:
    """Hash a prompt's first tokens with its salt, adapter and media, 32 hexadecimal digits."""
    media = [(item.identifier, item.mm_position.offset) for item in request.mm_features]
    lora = request.lora_request and request.lora_request.lora_name
    tenure = msgspec.msgpack.encode([request.cache_salt, lora, media, tokens])
    ids = np.asarray(request.prompt_token_ids[:tokens], dtype="<i8").tobytes()
    return blake2b(tenure + ids, digest_size=16, person=b"pigou-vllm").hexdigest()


@dataclass
class StepWork:
    """What a step's scheduler asks of the workers."""

    # True for a request whose blocks will be offered, False if it ended without.
    expect: dict[str, bool] = field(default_factory=dict)
    # (block ids, tokens, hash, secret) by request.
    offers: dict[str, tuple[list[int], int, str, str]] = field(default_factory=dict)
    # (tickets by rank, first block, block ids to fill) by request.
    pulls: dict[str, tuple[list[dict[str, Any]], int, list[int]]] = field(default_factory=dict)
    cancel: list[str] = field(default_factory=list)  # requests that end with a pull
    decline: list[list[dict[str, Any]]] = field(default_factory=list)  # unused tickets by rank


class SchedulerHalf:
    """Decides what is offered and pulled; methods are named as vLLM's."""

    def open_scheduler(
        self, block_size: int, key: bytes = b"", *, sends: bool = True, pulls: bool = True
    ) -> None:
        """Begin; `sends` and `pulls` are the producer's and the consumer's role."""
        self._size = block_size
        self._key, self._sends, self._pulls_blocks = key, sends, pulls
        self._ranks: list[TransferParams] = []
        # tickets and their tokens by request; None once used or refused.
        self._tickets: dict[str, tuple[list[TransferParams], int] | None] = {}
        self._work = StepWork()

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take the blank tickets of this server's workers, by tensor-parallel rank."""
        self._ranks = [metadata[rank] for rank in sorted(metadata)]

    def on_new_request(self, request: Any) -> None:
        """Announce an offer before its ticket can arrive at another server."""
        if self._sends and _flag(request, "do_remote_decode"):
            self._work.expect[request.request_id] = True

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that a verified ticket offers beyond those computed; asynchronous."""
        offer = self._offer(request)
        count = 0 if offer is None else max(0, offer[1] - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pull into the allocated blocks, once a request; without tokens to load, decline."""
        offer = self._offer(request)
        if offer is None:
            return
        params, tokens = [ticket.to_params() for ticket in offer[0]], offer[1]
        self._tickets[request.request_id] = None
        if not num_external_tokens:
            self._work.decline.append(params)
            return
        first, last = (tokens - num_external_tokens) // self._size, -(-tokens // self._size)
        ids = blocks.get_block_ids()[0][first:last]
        self._work.pulls[request.request_id] = params, first, ids

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:  # noqa: ARG002
        """Return and reset the work of this step."""
        work, self._work = self._work, StepWork()
        return work

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold a prompt's blocks and return their tickets; end what the request had pending."""
        request_id = request.request_id
        if (offer := self._offer(request)) is not None:
            self._work.decline.append([ticket.to_params() for ticket in offer[0]])
        elif request_id in self._tickets:
            self._work.cancel.append(request_id)
        self._tickets.pop(request_id, None)
        if not self._sends or not _flag(request, "do_remote_decode"):
            return False, None
        held = len(block_ids[0]) * self._size
        tokens = min(request.num_prompt_tokens, request.num_computed_tokens, held)
        if request.status.name not in _SENT or not _has_ids(request) or not tokens:
            self._work.expect[request_id] = False
            return False, None
        digest, secret = prompt_hash(request, tokens), secrets.token_hex(16)
        self._work.offers[request_id] = (
            block_ids[0][: -(-tokens // self._size)],
            tokens,
            digest,
            secret,
        )
        fields = {"remote_request_id": request_id, "remote_num_tokens": tokens,
                  "remote_last_hash": digest, "remote_secret": secret}  # fmt: skip
        tickets = [msgspec.structs.replace(rank, **fields) for rank in self._ranks]
        params = [signed(ticket, self._key).to_params() for ticket in tickets]
        return True, {"do_remote_prefill": True, "do_remote_decode": False, "tickets": params}

    def _offer(self, request: Any) -> tuple[list[TransferParams], int] | None:
        """Return a request's tickets and tokens; a refused one is logged, and None."""
        if not self._pulls_blocks or not _flag(request, "do_remote_prefill"):
            return None
        request_id = request.request_id
        if request_id not in self._tickets:
            try:
                self._tickets[request_id] = self._verified(request)
            except TransferError as error:
                log.warning("%s computes its prompt, its ticket is refused: %s", request_id, error)
                self._tickets[request_id] = None
        return self._tickets[request_id]

    def _verified(self, request: Any) -> tuple[list[TransferParams], int]:
        given = request.kv_transfer_params.get("tickets")
        if not isinstance(given, list) or not given:
            raise TransferError(TransferReason.BAD_PARAMS, "no tickets of a PigouConnector")
        tickets = [read_transfer_params(ticket, self._key) for ticket in given]
        if [t.remote_layout for t in tickets] != [t.remote_layout for t in self._ranks]:
            raise TransferError(
                TransferReason.LAYOUT,
                "both servers need the same vLLM, model, dtype, block size and TP size",
            )
        tokens, total = tickets[0].remote_num_tokens, request.num_prompt_tokens
        digest = prompt_hash(request, tokens) if _has_ids(request) and tokens <= total else ""
        if any((t.remote_num_tokens, t.remote_last_hash) != (tokens, digest) for t in tickets):
            raise TransferError(TransferReason.OTHER_PROMPT, "for other tokens, or another salt")
        return tickets, tokens if tokens == total else tokens - tokens % self._size


def _flag(request: Any, name: str) -> bool:
    return bool(request.kv_transfer_params) and request.kv_transfer_params.get(name) is True


def _has_ids(request: Any) -> bool:
    """False for prompts that are, in part, embeddings."""
    return bool(request.prompt_token_ids) and request.prompt_embeds is None


class CacheBlocks:
    """A vLLM KV cache as `DeviceBlocks`: block b is the rows b, b + blocks, ... of all planes.

    There is one plane where vLLM puts a block's layers together, else one a layer.
    """

    def __init__(self, rows: Any, planes: int, blocks: int, layout: KVLayout) -> None:
        """Use `rows`: on the host an array, (planes * blocks, bytes), else `DeviceCopies`."""
        self.layout = layout
        self._rows = rows
        self._first = np.arange(planes, dtype=np.int32) * blocks

    def as_bytes(self) -> None:
        """Return None: blocks are copied by `read` and `write`."""

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks out, shape (n, block_bytes)."""
        rows = self._rows_of(ids)
        if isinstance(self._rows, np.ndarray):
            out = np.empty((len(rows), self._rows.shape[1]), dtype=np.uint8)
            checksum.copy(self._rows, rows, out, np.arange(len(rows), dtype=np.int32))
        else:
            out = self._rows.read(rows)
        return out.reshape(len(ids), -1)

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, (n, block_bytes), into blocks `ids`."""
        rows = self._rows_of(ids)
        data = np.ascontiguousarray(data).reshape(len(rows), -1)
        if isinstance(self._rows, np.ndarray):
            checksum.copy(data, np.arange(len(rows), dtype=np.int32), self._rows, rows)
        else:
            self._rows.write(rows, data)

    def _rows_of(self, ids: Ints) -> Ints:
        return (ids[:, None] + self._first).reshape(-1).astype(np.int32)


class WorkerHalf:
    """Serves and pulls blocks of one worker; methods are named as vLLM's."""

    def open_worker(
        self, store: CacheBlocks, config: TransferConfig, key: bytes, rank: int
    ) -> None:
        """Start the sender and the receiver; raises OSError if the address is taken."""
        self._rank = rank
        self._sent: deque[str] = deque()
        self._arrivals: deque[tuple[str, TransferResult]] = deque()
        self._pulls: dict[str, Pull] = {}
        self._failed: set[int] = set()
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # threads inherit it; vLLM pins its own
        self._sender = Sender(store, self._sent.append, config, key=key)
        self._receiver = Receiver(store, config, key=key)
        os.sched_setaffinity(0, own)

    def get_handshake_metadata(self) -> TransferParams:
        """Return a blank ticket, which the scheduler completes for each offer."""
        return self._sender.ticket(LeasedBlocks("-", np.empty(0, dtype=np.int32), 1))

    def run(self, work: StepWork) -> None:
        """Begin a step's work; nothing waits."""
        for request, expected in work.expect.items():
            self._sender.expect(request, expected)
        for request, (ids, tokens, digest, secret) in work.offers.items():
            try:
                self._sender.offer(request, np.asarray(ids, np.int32), tokens, digest, secret)
            except (ValueError, TransferError):
                log.exception("blocks of %s are not offered", request)
                self._sent.append(request)
        for request, (tickets, first, ids) in work.pulls.items():
            dest = np.asarray(ids, np.int32)
            done = partial(self._arrived, request)
            self._pulls[request] = self._receiver.pull(tickets[self._rank], first, dest, done)
        for request in work.cancel:
            if (pull := self._pulls.get(request)) is not None:
                pull.cancel()
        for tickets in work.decline:
            self._receiver.decline(tickets[self._rank])

    def _arrived(self, request: str, result: TransferResult) -> None:
        log.debug(
            "pull of %s: %s, %d bytes in %.6f s by %s",
            request, result.reason, result.bytes, result.seconds, result.backend,
        )  # fmt: skip
        self._arrivals.append((request, result))

    def get_finished(
        self, finished_req_ids: set[str]  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:  # fmt: skip
        """Return requests whose blocks were released, and those whose pull ended."""
        sent = {self._sent.popleft() for _ in range(len(self._sent))}
        received = set()
        for _ in range(len(self._arrivals)):
            request, result = self._arrivals.popleft()
            received.add(request)
            self._failed.update(self._pulls.pop(request).dest[result.blocks :].tolist())
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that no pull filled; vLLM computes them."""
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        """End all transfers."""
        if hasattr(self, "_sender"):
            self._receiver.close()
            self._sender.close()
