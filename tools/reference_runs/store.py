"""Where reference runs lie, and how they are written: small JSON files with sorted keys."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "reference"
SIMULATIONS = FOLDER / "simulations"
JOURNALS = FOLDER / "journals"
TEXTS = FOLDER / "texts"

#: Figures of the machine's clock and memory, not of the run. They are left out everywhere.
WALL_CLOCK = ("wall_s", "peak_rss_mb", "took_s")
#: Longest list of plain values that is kept whole; a longer one is kept as its digest.
MAX_LIST = 32
_HEAD, _TAIL = 4, 2


def read(path: Path) -> Any:
    """Return a stored document."""
    return json.loads(path.read_text())


def write(path: Path, document: Any) -> None:
    """Write a document: keys sorted, floats by repr."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False)
    path.write_text(text + "\n")


def without_wall_clock(value: Any) -> Any:
    """Return a document without the figures of `WALL_CLOCK`, at any depth."""
    if isinstance(value, dict):
        return {k: without_wall_clock(v) for k, v in value.items() if k not in WALL_CLOCK}
    if isinstance(value, list):
        return [without_wall_clock(each) for each in value]
    return value


def compact(value: Any) -> Any:
    """Return a document with its long lists of plain values as count, digest, head and tail."""
    if isinstance(value, dict):
        return {key: compact(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > MAX_LIST and not any(isinstance(each, dict | list) for each in value):
        digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
        return {
            "count": len(value),
            "sha256": digest,
            "head": value[:_HEAD],
            "tail": value[-_TAIL:],
        }
    return [compact(each) for each in value]
