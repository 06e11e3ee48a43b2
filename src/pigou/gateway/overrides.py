"""The header by which a request sets parameters of its own routing."""

from __future__ import annotations

import math
import re

from pigou.wire.errors import APIError, bad_request

HEADER = "X-Pigou-Routing"
_NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_MOST = 32


def read_overrides(text: str | None) -> dict[str, float]:
    """Read `name=number`, several with commas: `temperature=0.7,overlap_weight=2`.

    Which names there are is the routing policy's to say.

    Raises:
        APIError: 400, naming what is not understood.
    """
    if text is None:
        return {}
    items = text.split(",")
    if len(items) > _MOST:
        raise bad_request(f"{HEADER} has {len(items)} items; at most {_MOST} are read.", HEADER)
    found: dict[str, float] = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not _NAME.fullmatch(name):
            raise bad_request(
                f"{HEADER} has {item.strip()[:60]!r}; write name=number, several with commas.",
                HEADER,
            )
        if name in found:
            raise bad_request(f"{HEADER} has {name} twice; keep one.", HEADER)
        found[name] = _number(name, value)
    return found


def refused(why: Exception) -> APIError:
    """Return the error for overrides that the routing policy refuses."""
    return bad_request(f"{HEADER}: {why}.", HEADER)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise bad_request(f"{HEADER} has {name}={text[:40]!r}; it must be a number.", HEADER)
    return value
