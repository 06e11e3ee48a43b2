"""The folder of traces, corpora, profiles and peer scripts that several checkouts share."""

from __future__ import annotations

import os
from pathlib import Path

#: Used where $PIGOU_SHARED names none: beside the checkout.
_DEFAULT = Path(__file__).resolve().parents[3] / "shared"


def shared_folder() -> Path:
    """Return $PIGOU_SHARED, else `../shared` beside the checkout; it may not exist."""
    return Path(os.environ.get("PIGOU_SHARED", _DEFAULT))
