"""Prefill/decode legs over HTTP, as vLLM, SGLang and TensorRT-LLM have them; tickets are opaque."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from pigou.wire.errors import bad_field
from pigou.wire.names import url_host

#: `kv_transfer_params` that make a prefill worker hold its blocks.
ASK: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
#: Fields without meaning for one discarded token.
_DROPPED = ("stream_options", "min_tokens", "n", "logprobs", "top_logprobs", "prompt_logprobs",
            "echo", "response_format", "structured_outputs", "stop", "resume_tokens")  # fmt: skip
#: Fields of other engines' tickets, which join the body as they are.
_ROOM, _CONTEXT = "bootstrap_room", "disaggregated_params"
#: TensorRT-LLM's ids of requests from outside begin here.
_FIRST_ID = 2**40


class _Ticketed(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class _ContextChoice(msgspec.Struct):
    disaggregated_params: dict[str, Any] | None = None
    finish_reason: str | None = None


class _ContextReply(msgspec.Struct):
    choices: list[_ContextChoice]
    prompt_token_ids: list[int] | None = None


_reply = msgspec.json.Decoder(_Ticketed)
_context_reply = msgspec.json.Decoder(_ContextReply)


def leg_one(
    body: Mapping[str, Any], *, chat: bool, read: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the prefill worker's body: one token, no stream, blocks held."""
    leg = {name: value for name, value in body.items() if name not in _DROPPED}
    leg |= {"stream": False, "kv_transfer_params": dict(ASK)}
    if (sampling := body.get("sampling_params")) is not None:  # vLLM's generate endpoint
        rest = {name: value for name, value in sampling.items() if name not in _DROPPED}
        leg["sampling_params"] = {**rest, "max_tokens": 1}
    else:
        leg["max_tokens"] = 1
    if read is not None:
        leg["kv_transfer_params"] = {**read, "do_remote_decode": True}
    if chat and sampling is None:
        leg["max_completion_tokens"] = 1
    return leg


def leg_two(body: Mapping[str, Any], ticket: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for the decode worker: the client's, with the prefill worker's ticket."""
    if _ROOM in ticket or _CONTEXT in ticket:
        return {**body, **ticket}
    return {**body, "kv_transfer_params": ticket}


def room_ticket(host: str, port: int) -> dict[str, Any]:
    """Return SGLang's fields by which both legs, sent at once, meet at a bootstrap server."""
    room = secrets.randbits(63)
    return {"bootstrap_host": url_host(host), "bootstrap_port": port, _ROOM: room}


def first_token_leg(body: Mapping[str, Any], ticket: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the prefill body of an engine whose prefill worker samples the first token.

    Sampling fields and grammar stay. A `ticket` is SGLang's; None asks TensorRT-LLM for its own.
    """
    leg = {name: value for name, value in body.items() if name != "stream_options"}
    number = _FIRST_ID + secrets.randbelow(2**62)
    context = {"request_type": "context_only", "disagg_request_id": number}
    return {**leg, "stream": False, **({_CONTEXT: context} if ticket is None else ticket)}


def context_ticket(reply: bytes, *, chat: bool) -> dict[str, Any] | None:
    """Return TensorRT-LLM's ticket, None without or after a reply of one token.

    Raises msgspec.DecodeError.
    """
    read = _context_reply.decode(reply)
    choice = read.choices[0] if len(read.choices) == 1 else _ContextChoice()
    params = choice.disaggregated_params
    if params is None or choice.finish_reason not in ("length", "not_finished"):
        return None
    ids = "prompt_token_ids" if chat else "prompt"
    ticket: dict[str, Any] = {_CONTEXT: {**params, "request_type": "generation_only"}}
    return ticket if read.prompt_token_ids is None else ticket | {ids: read.prompt_token_ids}


def ticket(reply: bytes) -> dict[str, Any] | None:
    """Return a prefill worker's `kv_transfer_params`, None without. Raises msgspec.DecodeError."""
    return _reply.decode(reply).kv_transfer_params


def asks_to_hold(params: Mapping[str, Any] | None) -> bool:
    """Whether this is leg 1: keep the blocks for another worker to pull."""
    return _flag(params, "do_remote_decode")


def offers_blocks(params: Mapping[str, Any] | None) -> bool:
    """Whether this is leg 2: another worker holds the prompt's blocks."""
    return _flag(params, "do_remote_prefill")


def _flag(params: Mapping[str, Any] | None, name: str) -> bool:
    value = (params or {}).get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_field(f"kv_transfer_params.{name}", f"is {value!r}; it must be true or false.")
    return bool(value)
