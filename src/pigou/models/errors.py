"""What can be wrong with a model's files."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be run as it should: says which file or field, and what would do."""
