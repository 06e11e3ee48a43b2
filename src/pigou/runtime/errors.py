"""What can be wrong with a grammar."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar that cannot be honoured: says what is wrong with it."""
