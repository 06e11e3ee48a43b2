"""Journals of version 1: their lines, put into the words of today's messages.

Such a line had the message's fields beside `k`, `now`, `out` and `error`, under shorter names;
its decisions had no `kind`, and words were the same base 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pigou.control.journal import JournalEntry, JournalError, decode_value
from pigou.control.price_of_anarchy import PoAEstimate

VERSION = 1

#: By `k`: the message's kind, and today's name of each of its fields.
_MESSAGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "up": ("worker_up", {"worker": "worker"}),
    "down": ("worker_down", {"worker": "worker"}),
    "prefilled": ("prefill_done", {"id": "request", "well": "well"}),
    "unread": ("read_failed", {"id": "request"}),
    "first": ("first_token", {"id": "request"}),
    "end": ("ended", {"id": "request", "reason": "reason"}),
    "group": ("group_ended", {"id": "group"}),
    "cache": ("cache_keyed", {"worker": "worker", "events": "events"}),
    "lost": ("cache_lost", {"worker": "worker"}),
    "load": (
        "load_report",
        {"worker": "worker", "running": "running", "waiting": "waiting", "usage": "kv_usage"},
    ),
    "assessed": ("assessed", {"found": "assessment"}),
    "tick": ("tick", {}),
    "tokens": ("tokens", {"id": "id", "count": "count"}),
    "submit": ("submit", {"exclude": "exclude"}),
}
#: Of a request, those of its fields whose names differ.
_REQUEST = {"most": "max_tokens"}
#: Fields of a KV event, which was an array.
_EVENTS = {
    "stored": ("hashes", "keys", "parent", "medium"),
    "removed": ("hashes", "medium"),
    "cleared": (),
}
#: A decision's kind, by a field that only it had.
_DECISIONS = {
    "choice": "route", "ahead": "queue", "retry_after": "shed", "worker": "recall",
    "assess": "assess",
}  # fmt: skip


def decode(line: bytes) -> JournalEntry:
    """Return the entry of a line.

    Raises:
        JournalError: it is none.
    """
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        entry: dict[str, Any] = {
            name: fields.pop(name) for name in ("now", "error") if name in fields
        }
        entry |= {"k": "call", "out": [_decision(decision) for decision in fields.pop("out", [])]}
        entry["message"] = _message(fields.pop("k"), fields)
        return msgspec.convert(entry, JournalEntry, strict=False, dec_hook=decode_value)
    except KeyError as error:
        raise JournalError(f"there is no {error}") from error
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise JournalError(str(error)) from error


def _decision(decision: dict[str, Any]) -> dict[str, Any]:
    kind = next(kind for field, kind in _DECISIONS.items() if field in decision)
    rest = {} if kind == "assess" else decision
    return {"kind": kind, **rest}


def _message(k: str, fields: dict[str, Any]) -> dict[str, Any]:
    kind, names = _MESSAGES[k]
    message: dict[str, Any] = {"kind": kind}
    if kind == "submit":
        exclude = fields.pop("exclude", [])
        return message | {"request": _request(fields), "exclude": exclude}
    message |= {names[field]: value for field, value in fields.items()}
    if kind == "tokens":
        return {"kind": kind, "counts": [(fields["id"], fields["count"])]}
    if kind == "cache_keyed":
        message["events"] = [_event(*event) for event in fields["events"]]
    if kind == "assessed":
        message["assessment"] = _finite(fields.get("found"))
    return message


def _request(fields: dict[str, Any]) -> dict[str, Any]:
    request = {_REQUEST.get(field, field): value for field, value in fields.items()}
    if request.get("hashes"):
        request["hashes"] = {"columns": 2, "words": request["hashes"]}
    return request


def _event(kind: str, *values: Any) -> dict[str, Any]:
    return {"kind": kind, **dict(zip(_EVENTS[kind], values, strict=True))}


def _finite(estimate: Any) -> Any:
    """Return an assessment without infinite parts, which were null; None for others."""
    try:
        msgspec.convert(estimate, PoAEstimate | None)
    except msgspec.ValidationError:
        return None
    return estimate
