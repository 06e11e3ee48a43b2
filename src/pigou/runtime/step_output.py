"""What an executor reports of a step. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pigou.request import Ints


@dataclass(frozen=True, slots=True)
class RankedLogprobs:
    """How probable a token was: log-softmax of the raw logits, before temperature and penalties."""

    token: int  # the token chosen (or, in a prompt, given)
    logprob: float
    rank: int  # its place by probability, from 1
    top: NDArray[np.int64]  # ids of the most probable tokens, most probable first, shape (k,)
    logprobs: NDArray[np.float32]  # their log probabilities, shape (k,)


@dataclass(slots=True)
class StepOutput:
    """What one step yielded, by entry of the plan."""

    tokens: Ints  # sampled, shape (n,); -1 where none was
    # whether the sequence ended with this token (an end token, a stop token, or a grammar that
    # allows nothing more), or failed; the length limit is the core's affair.
    finished: NDArray[np.bool_]
    # why a sequence cannot go on, by entry; it has no token in this step.
    failed: dict[int, str] = field(default_factory=dict)
    # of the sampled token, for entries that asked.
    logprobs: dict[int, RankedLogprobs] = field(default_factory=dict)
    # of a prompt that was finished in this step, for entries that asked: one for each of its
    # tokens; None for the first, and for those whose KV was not computed here but found in the
    # cache.
    prompt_logprobs: dict[int, list[RankedLogprobs | None]] = field(default_factory=dict)
    # what was raised for one entry alone; it has no token, and finished with this step.
    broken: dict[int, str] = field(default_factory=dict)


def is_contained(error: BaseException) -> bool:
    """Whether an exception says nothing of the process as a whole.

    Panics of libraries in Rust are no `Exception`, but concern what they were asked alone. After
    an error of the CUDA device its context cannot be used any further.
    """
    if type(error).__name__ == "PanicException":
        return True
    return isinstance(error, Exception) and not is_device_error(error)


def is_device_error(error: BaseException) -> bool:
    """Whether the accelerator failed, and with it all that is on it."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def described(error: BaseException) -> str:
    """Return what a client is told of an exception."""
    return f"{type(error).__name__}: {error}"[:300]


class GrammarError(ValueError):
    """A grammar that cannot be honoured: says what is wrong with it."""
