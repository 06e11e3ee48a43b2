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
    """A stream that ended well. Times are nanoseconds of the client's monotonic clock.

    Attributes:
        first: when the first token arrived.
        last: when the last token arrived.
        tokens: that the output had.
        prompt_tokens: as the endpoint counted them; None when it did not say.
        cached_tokens: of the prompt, not computed anew; None when it did not say.
        chunks: that brought tokens.
        counted: what told how many tokens a chunk held.
        gaps: between a token and the one before it, nanoseconds, shape (tokens - 1,), and their
            sum is last - first. Tokens that arrive in one chunk have no gap between them. Under
            "chunks" there is one gap a chunk after the first, whatever the chunks held.
    """

    first: int
    last: int
    tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    chunks: int
    counted: Counted
    gaps: npt.NDArray[np.int64] = field(repr=False)


@dataclass(frozen=True)
class Failure:
    """Why a request did not end well.

    Attributes:
        reason: one of few, to count by, like "HTTP 503" or "timeout".
        detail: what was seen.
    """

    reason: str
    detail: str


@dataclass(frozen=True)
class SentRequest:
    """One request of a run. Times are nanoseconds of the client's monotonic clock.

    Attributes:
        intended: when it was meant to be sent.
        sent: when the client began to send it.
        asked_tokens: output tokens asked for.
        result: the stream, or why there is none.
    """

    intended: int
    sent: int
    asked_tokens: int
    result: Stream | Failure
