"""An executor's output of one step. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pigou.request import Ints


@dataclass(frozen=True, slots=True)
class RankedLogprobs:
    """Log-softmax of the raw logits for a token, before temperature and penalties."""

    token: int  # sampled, or given in a prompt
    logprob: float
    rank: int  # by probability, from 1
    top: NDArray[np.int64]  # ids by descending probability, shape (k,)
    logprobs: NDArray[np.float32]  # one per id in `top`, shape (k,)


@dataclass(slots=True)
class StepOutput:
    """Output of one step, by plan entry."""

    tokens: Ints  # sampled, shape (n,); -1 for none
    # Ended by an end token, stop token or grammar, or failed; the core applies length limits.
    finished: NDArray[np.bool_]
    failed: dict[int, str] = field(default_factory=dict)  # reason by entry without a token
    # Sampled tokens' logprobs by entry, if requested.
    logprobs: dict[int, RankedLogprobs] = field(default_factory=dict)
    # Prompt logprobs by entry, for prompts that finish in this step, if requested; None for the
    # first token and cached ones.
    prompt_logprobs: dict[int, list[RankedLogprobs | None]] = field(default_factory=dict)
    # Pooled hidden states by entry, for prompts that finish in this step, if requested.
    pooled: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    # Error raised by one entry, which finishes without a token.
    broken: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of_none(cls, entries: int) -> StepOutput:
        """Return an output without a token."""
        return cls(np.full(entries, -1, dtype=np.int32), np.zeros(entries, dtype=np.bool_))


def is_contained(error: BaseException) -> bool:
    """True unless an error affects the process as a whole.

    Panics of Rust libraries are not `Exception`, yet concern one call; a CUDA error breaks the
    whole context.
    """
    if type(error).__name__ == "PanicException":
        return True
    return isinstance(error, Exception) and not is_device_error(error)


def is_device_error(error: BaseException) -> bool:
    """True if the accelerator failed."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def described(error: BaseException) -> str:
    """Return the error message for clients."""
    return f"{type(error).__name__}: {error}"[:300]


class GrammarError(ValueError):
    """Raised for a grammar that cannot be honoured."""
