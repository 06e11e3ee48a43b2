"""Tickets against the prompts that they are shown for: blocks of one never enter as another's."""

from __future__ import annotations

import hmac
import logging
from typing import Any

from pigou.kv.hashing import chain
from pigou.request import BlockHashes
from pigou.wire.errors import bad_request
from pigou.worker.kv_transfer.result import Reason, TransferError
from pigou.worker.kv_transfer.transfer_params import Ticket, hash_text, read_ticket

log = logging.getLogger(__name__)


def checked_ticket(
    params: dict[str, Any], key: bytes, tokens: list[int], hashes: BlockHashes, seed: bytes
) -> Ticket | None:
    """Return the ticket of `kv_transfer_params` if it is for this prompt; None, and a log, if not.

    Args:
        params: as they came.
        key: of the fleet, by which tickets are signed; empty takes unsigned ones.
        tokens: of the prompt.
        hashes: of its blocks, as far as they are known already; shape (n, 2).
        seed: of the chain of its blocks, from its own tenure.

    Raises:
        APIError: 400, they are no ticket at all.
    """
    try:
        ticket = read_ticket(params, key)
        _check_prompt(ticket, tokens, hashes, seed)
    except TransferError as error:
        if error.reason is Reason.BAD_PARAMS:
            raise bad_request(error.detail, "kv_transfer_params") from None
        log.warning("a ticket is refused, and its prompt computed here: %s", str(error))
        return None
    return ticket


def _check_prompt(ticket: Ticket, tokens: list[int], hashes: BlockHashes, seed: bytes) -> None:
    """Raise `TransferError` unless the last block offered is that block of this prompt."""
    count, size = ticket.blocks, ticket.remote_block_size
    if ticket.remote_num_tokens % size or ticket.remote_num_tokens > len(tokens):
        raise TransferError(
            Reason.OTHER_PROMPT,
            f"ticket {ticket.remote_request_id!r} offers {ticket.remote_num_tokens} tokens in "
            f"blocks of {size}; the prompt has {len(tokens)}",
        )
    if len(hashes) < count:
        hashes = chain(tokens[: count * size], size, seed)
    own = hash_text(hashes[count - 1])
    if not hmac.compare_digest(own, ticket.remote_last_hash):
        raise TransferError(
            Reason.OTHER_PROMPT,
            f"ticket {ticket.remote_request_id!r} is for other tokens, or another tenure",
        )
