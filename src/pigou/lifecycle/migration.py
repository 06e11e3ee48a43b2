"""Stream migration: what a client has been told so far, and what goes on elsewhere from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

_ids = msgspec.json.Decoder(list[int]).decode


class ReplyHead(msgspec.Struct, frozen=True):
    """The fields that all chunks of a reply share."""

    id: str = ""
    created: int = 0
    model: str = ""


@dataclass(slots=True)
class StreamState:
    """State of a client's stream: all that another worker needs to go on with it."""

    # id, time of creation and model, as the first chunk had them; None before it.
    head: ReplyHead | None = None
    # token ids of the prompt, still as JSON; empty while no worker has said them.
    prompt: bytes = b""
    # generated token ids, as many as workers have reported.
    tokens: list[int] = field(default_factory=list)
    shown: int = 0  # tokens whose text was shown entirely; later ones may be half a character
    untold: bool = False  # text was shown whose token ids no worker has said
    finish: str | None = None  # why the sequence ended; None while it runs
    usage: bool = False  # whether the final usage was sent
    done: bool = False  # whether the stream is complete

    @property
    def begun(self) -> bool:
        """True if the client has been told anything."""
        return self.head is not None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 when no worker has said them."""
        return self.prompt.count(b",") + 1 if self.prompt else 0

    def prompt_ids(self) -> list[int]:
        """Return the prompt's token ids; empty when no worker has said them."""
        return _ids(self.prompt) if self.prompt else []

    def drop_unshown(self) -> int:
        """Forget tokens whose text was not shown entirely; return how many.

        A worker that is only told text generates them again, so that no character is cut in two.
        """
        dropped = len(self.tokens) - self.shown
        if dropped > 0:
            del self.tokens[self.shown :]
        return max(0, dropped)


def can_migrate(state: StreamState, *, single: bool, portable: bool, stock: bool) -> bool:
    """True if a broken stream can go on elsewhere without its client noticing.

    A stream of which the client has seen nothing always can. One that has begun needs the ids of
    its prompt and of all its tokens. On a stock worker nothing may depend on what came before but
    the tokens (stop strings, penalties, a grammar, a seed's generator), nor may the client count
    on exact ids.

    Args:
        state: of the client's stream.
        portable: the rest of the reply depends on nothing but the tokens so far.
        stock: the next worker knows nothing of `resume_tokens`.
    """
    if not state.begun:
        return True
    if not single or state.untold:
        return False
    if not state.tokens:
        return True
    if not state.prompt:
        return False
    return portable or not stock


class Continuation(NamedTuple):
    """The rest of a request once some output tokens have joined its prompt."""

    prompt_tokens: int  # tokens of the prompt, those so far included
    max_tokens: int  # most tokens that are still to come
    min_tokens: int = 0  # fewest tokens that are still to come

    @classmethod
    def after(
        cls, tokens: int, prompt_tokens: int, max_tokens: int, min_tokens: int = 0
    ) -> Continuation:
        """Return what is left after `tokens` output tokens."""
        return cls(prompt_tokens + tokens, max_tokens - tokens, max(0, min_tokens - tokens))
