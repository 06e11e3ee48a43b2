"""`results.json`: what was run, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.experiments.fleets import BARGING, POOL, Fleet, Reading
from pigou.experiments.rows import Row

RESULTS = "results.json"


def document(
    experiment: str, fleet: Fleet, reading: Reading, seeds: Sequence[int], rows: Sequence[Row],
    summary: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return results as JSON has them; `summary` is what the rows add up to."""
    law = msgspec.to_builtins(fleet.law(reading))
    pooled = reading == "client-pool"
    return {
        "experiment": experiment,
        "fleet": fleet.name,
        "reading": reading,
        "seeds": list(seeds),
        "constants": {"law": law, "pool": POOL if pooled else 0,
                      "barging": BARGING if pooled else 0.0},
        "summary": dict(summary),
        "rows": list(rows),
    }  # fmt: skip


def prepared(folder: Path) -> Path:
    """Make a folder to write results into, and return it.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out is {str(folder)!r}: {error}; name a folder to write to") from None
    return folder


def write(folder: Path, found: Mapping[str, Any]) -> Path:
    """Write results into a folder, which is made; return the file.

    Raises:
        ConfigError: it cannot be written.
    """
    path = prepared(folder) / RESULTS
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out is {str(folder)!r}: {error}; name a folder to write to") from None
    return path
