"""What can be wrong with a model, its weights, or a grammar."""

from __future__ import annotations

from pigou.models.errors import ModelError

__all__ = ["GrammarError", "ModelError"]


class GrammarError(ValueError):
    """A grammar that cannot be honoured: says what is wrong with it."""
