"""The model that ships with the package, and what can be wrong with a model."""

from __future__ import annotations

from pathlib import Path


class ModelError(ValueError):
    """A model that cannot be run: says which file or field is wrong, and the remedy."""


def bundled_path() -> Path:
    """Return the folder of the bundled model: a Hugging Face folder with weights and tokenizer."""
    return Path(__file__).parent / "tiny"
