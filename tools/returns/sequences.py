"""What a model reads while its cache is watched: text, dialogues, and pairs told and asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from pigou_lab.recall import KEYS, VALUES, is_held_out, pair_line
from tiny.corpus import Corpus

Random = np.random.Generator
Line = list[int]

MOST = 48  # pairs in a sequence
TOLD = 0.6  # share of the sequence in which pairs are told, at most


class Sequences:
    """Sequences over one corpus, in the tokens of any tokenizer."""

    def __init__(self, tokenizer: Tokenizer, corpus: Corpus) -> None:
        self.tokenizer = tokenizer
        self.begin = tokenizer.token_to_id("<|begin|>")
        documents = [text.splitlines(keepends=True) for text in corpus.documents]
        self.documents = [self._encode(lines) for lines in documents if len(lines) > 1]
        self.sizes = np.array([sum(map(len, lines)) for lines in self.documents], dtype=float)
        self.turns = self._encode([_chat(turns, tokenizer) for turns in corpus.dialogues])

    def draw(self, rng: Random, length: int) -> list[int]:
        """A sequence of `length` tokens: three in ten text, one in ten dialogue, else pairs."""
        kind = rng.random()
        lines = self._lines(rng, dialogue=kind < 0.1)
        ids = [self.begin] if self.begin is not None and rng.random() < 0.5 else []
        if kind < 0.4:
            while len(ids) < length:
                ids += next(lines)
            return ids[:length]
        return (ids + self._woven(rng, lines, length))[:length]

    def _woven(self, rng: Random, lines: Iterator[Line], length: int) -> list[int]:
        """Pair lines between lines of text, told again later: scattered, or all at the end."""
        most = min(MOST, length // 16)
        count = max(int(min(most, np.exp(rng.uniform(0, np.log(most + 1))))), 1)
        pairs = self._encode([pair_line(*pair) for pair in _pairs(rng, count)])
        told = np.sort(rng.random(count)) * rng.uniform(0.05, TOLD)
        asked = rng.permutation(count)
        again = rng.uniform(told[asked], 1.0) if rng.random() < 0.5 else np.ones(count)
        places = np.concatenate((told, again)) * (length - sum(map(len, pairs)))
        order = np.argsort(places, kind="stable")
        ids: list[int] = []
        for index in order:
            while len(ids) < places[index]:
                ids += next(lines)
            ids += pairs[index if index < count else asked[index - count]]
        while len(ids) < length:
            ids += next(lines)
        return ids

    def _lines(self, rng: Random, *, dialogue: bool) -> Iterator[Line]:
        """Lines without end, from a random place on; documents as likely as they are long."""
        while True:
            if dialogue and self.turns:
                yield self.turns[rng.integers(len(self.turns))]
                continue
            lines = self.documents[rng.choice(len(self.sizes), p=self.sizes / self.sizes.sum())]
            yield from lines[rng.integers(len(lines)) :]

    def _encode(self, lines: list[str]) -> list[Line]:
        return [e.ids for e in self.tokenizer.encode_batch(lines, add_special_tokens=False)]


def _pairs(rng: Random, count: int) -> Iterator[tuple[str, str]]:
    """Pairs of different keys, none held out of training."""
    for key in rng.permutation(len(KEYS))[:count]:
        free = [value for value in VALUES if not is_held_out(KEYS[key], value)]
        yield KEYS[key], free[rng.integers(len(free))]


def _chat(turns: list[str], tokenizer: Tokenizer) -> str:
    """A dialogue in the bundled model's template, or as paragraphs where it has no roles."""
    if tokenizer.token_to_id("<|user|>") is None:
        return "\n\n".join(turns) + "\n\n"
    end = "<|end|>" if tokenizer.token_to_id("<|end|>") is not None else ""
    roles = ("user", "assistant")
    return "".join(f"<|{roles[i % 2]}|>\n{turn}{end}\n" for i, turn in enumerate(turns))
