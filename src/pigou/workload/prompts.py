"""Seeded prompts: of given lengths, from common words or a text, with shared prefixes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from pigou.workload.bench_config import LengthRange

Prompt = str | list[int]

#: Short common words: each is one token of most tokenizers, with the space before it.
WORDS = tuple(files("pigou.workload").joinpath("words.txt").read_text("ascii").split())
_PIECE = re.compile(r"\s*\S+")


@dataclass(frozen=True)
class PromptSource:
    """Source text or ids of prompts."""

    units: Sequence[int] | Sequence[str]  # token ids, or words with the space before
    running: bool  # prompts are passages of `units`; else each unit is drawn by itself
    tokens_per_unit: float = 1.0  # tokens that a unit makes on average; 1 for token ids

    def __post_init__(self) -> None:
        if not len(self.units):
            raise ValueError("the text has no words")

    def cut(self, tokens: int, rng: np.random.Generator) -> list[int] | list[str]:
        """Return units of about `tokens` tokens (exactly, for token ids)."""
        count = max(1, round(tokens / self.tokens_per_unit))
        size = len(self.units)
        if self.running:
            chosen = (int(rng.integers(size)) + np.arange(count)) % size
        else:
            chosen = rng.integers(size, size=count)
        return [self.units[i] for i in chosen.tolist()]  # type: ignore[return-value]


@dataclass(frozen=True)
class Shape:
    """Prompt and output lengths in tokens, and shared prefixes."""

    input: LengthRange  # prompt tokens after the shared prefix
    output: LengthRange
    prefixes: int = 0  # how many shared prefixes there are; 0 for none
    prefix_length: int = 0

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest prompt and its output together."""
        return self.prefix_length * bool(self.prefixes) + self.input.high + self.output.high


@dataclass(frozen=True)
class PromptJob:
    """One request to send."""

    prompt: Prompt  # token ids or text
    output: int  # tokens to ask for
    prefix: int | None = None  # number of the shared prefix it begins with; None for none
    session: str = ""  # name in a trace; empty for a request by itself
    think_s: float | None = None  # seconds after the session's last request; None for its first
    tenant: str = ""


def pieces(text: str) -> list[str]:
    """Split a text into words, each with the white space before it; joined, they are the text."""
    return _PIECE.findall(text)


def make_prefixes(
    source: PromptSource, shape: Shape, rng: np.random.Generator
) -> list[list[int] | list[str]]:
    """Return the shared prefixes, as units of the source."""
    return [source.cut(shape.prefix_length, rng) for _ in range(shape.prefixes)]


def jobs(
    source: PromptSource, shape: Shape, prefixes: Sequence[list[int] | list[str]],
    rng: np.random.Generator,
) -> Iterator[PromptJob]:  # fmt: skip
    """Yield jobs without end; the same generator state gives the same jobs."""
    while True:
        output = shape.output.draw(rng)
        prefix = int(rng.integers(len(prefixes))) if prefixes else None
        front = [] if prefix is None else prefixes[prefix]
        units: list[int | str] = [*front, *source.cut(shape.input.draw(rng), rng)]
        yield PromptJob(_join(units), output, prefix)


def _join(units: list[int | str]) -> Prompt:
    if isinstance(units[0], str):
        return "".join(map(str, units)).lstrip()
    return units  # type: ignore[return-value]
