"""The model that ships with the package."""

from __future__ import annotations

from pathlib import Path


def bundled_path() -> Path:
    """Return the folder of the bundled model: a Hugging Face folder with weights and tokenizer."""
    return Path(__file__).parent / "tiny"
