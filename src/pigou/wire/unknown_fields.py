"""Fields that a request body may have beyond those that are honoured.

A field of another server is refused by name with a remedy (`REFUSED`), unless its value is null
or asks for what happens anyway (`neutral`): then it is dropped. Any other field is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from pigou.wire.errors import REFUSED, bad_request, unknown_field

#: Response header that names the unknown fields of a request.
HEADER = "X-Pigou-Unknown-Fields"
#: What a server does with unknown fields.
MODES = ("warn", "refuse")
#: Most names in the header, and most characters of each.
_MAX_NAMES, _MAX_CHARS = 16, 64
#: Values of refused fields, beside null, that ask for what happens anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": ({},),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": ("",),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": ([],),
    "include_reasoning": (True, False),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"], []),
    "repetition_detection": ({},),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def neutral(name: str, value: Any, n: Any = None) -> bool:
    """Return whether a refused field's value asks for nothing; `n` is the request's choices."""
    if value is None:
        return True
    if name == "best_of" and n is not None and type(value) is int and value == n:
        return True  # every choice that is computed is returned
    return any(_same(value, item) for item in _NEUTRAL.get(name, ()))


def known_part(
    body: bytes, fields: Iterable[str], nested: Mapping[str, Iterable[str]], unknown: list[str]
) -> bytes:
    """Return a body without its unknown and neutral fields.

    Args:
        body: a JSON object.
        fields: names that the request's type has.
        nested: of fields that are objects themselves, the names that these have; `a.b` for the
            object in field `b` of `a`.
        unknown: the names of unknown fields are appended to it, as paths.

    Raises:
        APIError: 400, a field of another server asks for what is not done here.
        msgspec.DecodeError: the body is no JSON object.
    """
    parts = _fields.decode(body)
    n = _value(parts.get("n"))
    known = set(fields)
    for name in [name for name in parts if name not in known]:
        raw = parts.pop(name)
        if name in REFUSED:
            if not neutral(name, _value(raw), n):
                raise bad_request(f"{name} is refused: {REFUSED[name]}.", name)
        elif bytes(raw) != b"null":
            unknown.append(name)
    for path in nested:
        if path.split(".")[0] in parts and "." not in path:
            parts[path] = _pruned(parts[path], path, nested, unknown)
    return msgspec.json.encode(parts)


def _pruned(
    raw: msgspec.Raw, path: str, nested: Mapping[str, Iterable[str]], unknown: list[str]
) -> msgspec.Raw:
    """Do the same for an object within the body; what is no object is left as it is."""
    try:
        parts = _fields.decode(raw)
    except msgspec.ValidationError:
        return raw
    known = set(nested[path])
    for name in [name for name in parts if name not in known]:
        if bytes(parts.pop(name)) != b"null":
            unknown.append(f"{path}.{name}")
    for name in parts:
        if f"{path}.{name}" in nested:
            parts[name] = _pruned(parts[name], f"{path}.{name}", nested, unknown)
    return msgspec.Raw(msgspec.json.encode(parts))


def header_value(names: Iterable[str]) -> str:
    """Return the value of `X-Pigou-Unknown-Fields`: printable names, cut, with commas."""
    shown = list(dict.fromkeys(printable(name) for name in names))
    rest = len(shown) - _MAX_NAMES
    return ", ".join(shown[:_MAX_NAMES] + ([f"{rest} more"] if rest > 0 else []))


def printable(name: str) -> str:
    """Return a field's name as it may stand in a header or a log line."""
    return _UNPRINTABLE.sub("?", name[:_MAX_CHARS]) or "?"


class UnknownFields:
    """What a server does with unknown fields: refuse them, or warn of each name once."""

    #: Names that are remembered as logged; beyond it nothing more is logged.
    MAX_LOGGED = 256

    def __init__(self, mode: str, log: Callable[[str, str], None]) -> None:
        """Go by `mode`, one of `MODES`; `log` takes a message with one `%s`, and its value."""
        self._refuses = mode == "refuse"
        self._log = log
        self._logged: set[str] = set()

    def judge(self, names: Iterable[str]) -> dict[str, str]:
        """Return the response headers that tell of unknown fields.

        Raises:
            APIError: 400, they are refused.
        """
        names = list(names)
        if not names:
            return {}
        if self._refuses:
            raise unknown_field(names[0])
        for name in map(printable, names):
            if name not in self._logged and len(self._logged) < self.MAX_LOGGED:
                self._logged.add(name)
                self._log("requests have the unknown field %s, which has no effect", name)
        return {HEADER: header_value(names)}


def _value(raw: msgspec.Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)


def _same(value: Any, item: Any) -> bool:
    """Compare JSON values: 1 and 1.0 are the same, 1 and true are not."""
    return isinstance(value, bool) == isinstance(item, bool) and bool(value == item)
