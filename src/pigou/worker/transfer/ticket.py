"""Ticket: the `kv_transfer_params` that travel from the sender to the receiver, opaque between."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pigou.worker.transfer.outcome import Reason, TransferError

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An offer of blocks, as the receiver is told of it.

    Attributes:
        remote_engine_id: the sender; a new one at each start of its process.
        remote_request_id: the offer.
        remote_host: address of the sender's side channel.
        remote_port: its port.
        remote_host_id: the sender's machine and shared-memory file system.
        remote_num_tokens: tokens whose KV is offered.
        remote_block_size: tokens in a block.
        remote_layout: fingerprint of the sender's layout.
        remote_secret: what a receiver must show to get the blocks.
        remote_backends: how the blocks can be had.
        remote_lease_seconds: how long they are kept for a receiver that does not call.
    """

    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_host_id: _Name
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    remote_block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    remote_layout: _Name
    remote_secret: _Name
    remote_backends: Annotated[list[str], msgspec.Meta(min_length=1, max_length=16)]
    remote_lease_seconds: float
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


def read_ticket(params: object) -> Ticket:
    """Return the ticket in `kv_transfer_params`.

    Raises:
        TransferError: BAD_PARAMS, naming the field that is missing, unknown or wrong.
    """
    try:
        ticket = msgspec.convert(params, Ticket)
    except msgspec.ValidationError as error:
        raise TransferError(Reason.BAD_PARAMS, f"kv_transfer_params: {error}") from error
    if not ticket.do_remote_prefill:
        raise TransferError(
            Reason.BAD_PARAMS, "kv_transfer_params: do_remote_prefill is false; nothing is offered"
        )
    return ticket
