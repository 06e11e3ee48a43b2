"""What a stream has said so far: all that is needed to go on elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from pigou.gateway import chunks


@dataclass(slots=True)
class Transcript:
    """What a client has been told by one stream.

    Attributes:
        head: id, time of creation and model, as the first chunk had them; None before it.
        prompt: token ids of the prompt, still as JSON; empty while no worker has said them.
        tokens: generated token ids, as many as workers have reported.
        shown: tokens whose text was shown entirely; later ones may be half a character.
        spoke: whether the client was told that the assistant speaks (chat).
        finish: why the choice ended; None while it runs.
        usage: whether the final usage was told.
        done: whether the stream is complete.
    """

    head: chunks.Head | None = None
    prompt: bytes = b""
    tokens: list[int] = field(default_factory=list)
    shown: int = 0
    spoke: bool = False
    finish: str | None = None
    usage: bool = False
    done: bool = False

    @property
    def begun(self) -> bool:
        """Whether the client has been told anything."""
        return self.head is not None

    @property
    def prompt_size(self) -> int:
        """Tokens of the prompt; 0 when no worker has said them."""
        return self.prompt.count(b",") + 1 if self.prompt else 0

    def prompt_ids(self) -> list[int]:
        """Return the prompt's token ids; empty when no worker has said them."""
        return chunks.ids(self.prompt) if self.prompt else []
