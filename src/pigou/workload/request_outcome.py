"""The outcome of one request: its stream of tokens, or why it failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

#: What told how many tokens a chunk held: a running usage, a usage of each chunk's own, token ids,
#: or nothing (one each).
Counted = Literal["usage", "usage_per_chunk", "token_ids", "chunks"]


@dataclass(frozen=True)
class Stream:
    """A stream that ended well. Times are nanoseconds of the client's monotonic clock."""

    first: int  # when the first token arrived
    last: int  # when the last token arrived
    tokens: int
    prompt_tokens: int | None  # as the endpoint counted them; None when it did not say
    cached_tokens: int | None  # of the prompt, not computed anew; None when it did not say
    chunks: int
    counted: Counted  # what told how many tokens a chunk held
    # between a token and the one before it, nanoseconds, shape (tokens - 1,), and their sum is last
    # - first. Tokens that arrive in one chunk have no gap between them. Under "chunks" there is one
    # gap a chunk after the first, whatever the chunks held.
    gaps: npt.NDArray[np.int64] = field(repr=False)


@dataclass(frozen=True)
class Failure:
    """Why a request did not end well."""

    reason: str  # one of few, to count by, like "HTTP 503" or "timeout"
    detail: str


@dataclass(frozen=True)
class SentRequest:
    """One request of a run. Times are nanoseconds of the client's monotonic clock."""

    intended: int  # when it was meant to be sent
    sent: int  # when the client began to send it
    asked_tokens: int  # output tokens asked for
    result: Stream | Failure  # the stream, or why there is none
