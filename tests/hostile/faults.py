"""A fault put into workers of the real executor: a sequence with one seed fails at its third token.

`injected/sitecustomize.py` calls `inject` in processes whose PYTHONPATH has that folder.
"""

from __future__ import annotations

BAD_SEED = 666_666


def inject() -> None:
    """Let each sequence with `BAD_SEED` raise from within the engine's step."""
    from pigou.runtime.sequence import TokenSequence

    append = TokenSequence.append

    def failing(self: TokenSequence, token: int) -> bool:
        if self.params.seed == BAD_SEED and self.generated >= 2:
            raise IndexError("injected")
        return append(self, token)

    TokenSequence.append = failing  # type: ignore[method-assign]
