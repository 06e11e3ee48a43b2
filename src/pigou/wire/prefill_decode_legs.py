"""Prefill/decode legs over HTTP, as vLLM's connectors; `kv_transfer_params` is opaque."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pigou.wire.errors import bad_field

#: `kv_transfer_params` that make a prefill worker hold its blocks.
ASK: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Fields without meaning for one discarded token.
_DROPPED = ("stream_options", "min_tokens", "n", "logprobs", "top_logprobs", "prompt_logprobs",
            "echo", "response_format", "structured_outputs", "stop", "resume_tokens")  # fmt: skip


class _Ticketed(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_reply = msgspec.json.Decoder(_Ticketed)


def leg_one(
    body: Mapping[str, Any], *, chat: bool, read: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the prefill worker's body: one token, no stream, blocks held."""
    leg = {name: value for name, value in body.items() if name not in _DROPPED}
    leg |= {"stream": False, "max_tokens": 1, "kv_transfer_params": dict(ASK)}
    if read is not None:
        leg["kv_transfer_params"] = {**read, "do_remote_decode": True}
    if chat:
        leg["max_completion_tokens"] = 1
    return leg


def leg_two(body: Mapping[str, Any], ticket: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for the decode worker: the client's, with the prefill worker's ticket."""
    return {**body, "kv_transfer_params": ticket}


def ticket(reply: bytes) -> dict[str, Any] | None:
    """Return a prefill worker's `kv_transfer_params`, None without. Raises msgspec.DecodeError."""
    return _reply.decode(reply).kv_transfer_params


def asks_to_hold(params: Mapping[str, Any] | None) -> bool:
    """Whether this is leg 1: keep the blocks for another worker to pull."""
    return params is not None and _flag(params, "do_remote_decode")


def offers_blocks(params: Mapping[str, Any] | None) -> bool:
    """Whether this is leg 2: another worker holds the prompt's blocks."""
    return params is not None and _flag(params, "do_remote_prefill")


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_field(f"kv_transfer_params.{name}", f"is {value!r}; it must be true or false.")
    return value
