"""What can be wrong with a model, its weights, or a grammar."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be run as it should: says which file or field, and what would do."""


class GrammarError(ValueError):
    """A grammar that cannot be honoured: says what is wrong with it."""
