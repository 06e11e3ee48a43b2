"""The first differences between two documents, by JSON path."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_SHOWN = 20
#: Shown for a field that a document lacks.
ABSENT = "(absent)"
_WIDTH = 160


class Difference(NamedTuple):
    """A place at which two documents differ."""

    path: str
    old: str
    new: str


def differences(
    old: Any, new: Any, tolerance: float = 0.0, path: str = "$"
) -> Iterator[Difference]:
    """Yield the places at which two JSON documents differ.

    Args:
        old: the recorded document.
        tolerance: relative error that numbers may have; 0 compares to the last digit.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            here = f"{path}.{key}"
            if key not in old or key not in new:
                yield Difference(here, _shown(old, key), _shown(new, key))
            else:
                yield from differences(old[key], new[key], tolerance, here)
    elif isinstance(old, list) and isinstance(new, list):
        for place, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from differences(one, other, tolerance, f"{path}[{place}]")
        if len(old) != len(new):
            yield Difference(f"{path}.length", str(len(old)), str(len(new)))
    elif not _equal(old, new, tolerance):
        yield Difference(path, _text(old), _text(new))


def _equal(old: Any, new: Any, tolerance: float) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool)
                  for each in (old, new))  # fmt: skip
    if numbers and tolerance:
        return math.isclose(old, new, rel_tol=tolerance, abs_tol=tolerance)
    return type(old) is type(new) and bool(old == new)


def _shown(document: dict[str, Any], key: str) -> str:
    return _text(document[key]) if key in document else ABSENT


def _text(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
