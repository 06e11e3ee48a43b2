"""What the tiny model trains on: token sequences with a weight for each token as a target.

Every task is a function of a generator and a length, and returns `Sequence`; weights are 0 where
nothing can
be predicted (a new key), 1 for text, and `ANSWER` where the token can be recalled from before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pigou_lab.recall import KEYS, MARK, VALUES, is_held_out
from tiny.corpus import Corpus
from tiny.tokenizer import BOS, EOS, SPECIAL, special

ANSWER = 4.0  # weight of a token that must be recalled
FAINT = 0.02  # weight of a token that only luck could predict
ECHO = 2.0  # weight of a token in a repeated run

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]
Random = np.random.Generator


class Sequence(NamedTuple):
    """Token ids and target weights, both of shape (length,)."""

    ids: Ids
    weights: Weights


@dataclass(frozen=True)
class Alphabet:
    """Token ids of keys and values, the mark and the newline, and which (key, value) may be
    trained on.
    """

    keys: Ids
    values: Ids
    mark: int
    newline: int
    allowed: NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Alphabet:
        """The alphabet of `pigou_lab.recall` in this tokenizer; held-out combinations are
        not allowed.
        """

        def one(word: str) -> int:
            (token,) = tokenizer.encode(word).ids
            return int(token)

        return cls(
            np.array([one(key) for key in KEYS]),
            np.array([one(f" {value}") for value in VALUES]),
            one(MARK),
            one("\n"),
            np.array([[not is_held_out(key, value) for value in VALUES] for key in KEYS]),
        )

    def pairs(self, rng: Random, count: int, keys: int, values: int) -> Ids:
        """`count` lines `key = value \\n` as (count, 4): different keys, of the first `keys` and
        `values` words.
        """
        chosen = rng.permutation(keys)[:count]
        scores = rng.random((len(chosen), values)) * self.allowed[chosen, :values]
        given = scores.argmax(axis=1)
        lines = np.empty((len(chosen), 4), np.int64)
        lines[:, 0], lines[:, 1] = self.mark, self.keys[chosen]
        lines[:, 2], lines[:, 3] = self.values[given], self.newline
        return lines


class Tasks:
    """The tasks over one corpus."""

    def __init__(self, tokenizer: Tokenizer, corpus: Corpus) -> None:
        self.alphabet = Alphabet.of(tokenizer)
        self.vocab_size = tokenizer.get_vocab_size()
        self.bos, self.eos = special(tokenizer, BOS), special(tokenizer, EOS)
        self.user, self.assistant = (
            special(tokenizer, f"<|{role}|>") for role in ("user", "assistant")
        )
        self.colon = special(tokenizer, ":")
        self.special = len(SPECIAL)
        documents = [np.array(e.ids, np.int64) for e in tokenizer.encode_batch(corpus.documents)]
        play, rest = documents[0], documents[1:]
        self.texts = [play, np.concatenate([np.append(d, self.eos) for d in rest])]
        chats = [_chat(turns) for turns in corpus.dialogues]
        self.chats = [np.array(e.ids, np.int64) for e in tokenizer.encode_batch(chats)]
        self.breaks = [_line_starts(text, self.alphabet.newline) for text in self.texts]

    def text(self, rng: Random, length: int) -> Sequence:
        """A stretch of text; three in four are Shakespeare, half begin with the begin token."""
        source = self.texts[0 if rng.random() < 0.75 else 1]
        start = rng.integers(len(source) - length)
        ids = source[start : start + length].copy()
        if rng.random() < 0.5:
            ids[0] = self.bos
        return Sequence(ids, np.ones(length, np.float32))

    def chat(self, rng: Random, length: int) -> Sequence:
        """Whole dialogues in the chat template, one after another, cut to `length`."""
        parts: list[Ids] = []
        room = length
        while room > 0:
            parts.append(self.chats[rng.integers(len(self.chats))])
            room -= len(parts[-1])
        return Sequence(np.concatenate(parts)[:length], np.ones(length, np.float32))

    def echo(self, rng: Random, length: int, keys: int) -> Sequence:
        """A run of random tokens, told again and again: induction. Any token, once all `keys` are
        in use.
        """
        period = int(rng.integers(8, max(length // 2, 9)))
        if keys < len(self.alphabet.keys):
            run = self.alphabet.keys[rng.integers(keys, size=period)]
        else:
            run = rng.integers(self.special, self.vocab_size, period)
        ids = np.resize(run, length)
        weights = np.full(length, ECHO, np.float32)
        weights[:period] = 0
        return Sequence(ids, weights)

    def stream(
        self, rng: Random, length: int, keys: int, values: int, *, bare: bool = False
    ) -> Sequence:
        """Nothing but pairs, each told several times: as lines, or `bare`, as key and value
        alone.
        """
        parts = [1, 2] if bare else [0, 1, 2, 3]
        width = len(parts)
        count = int(rng.integers(2, min(keys, max(length // (2 * width), 3)) + 1))
        lines = self.alphabet.pairs(rng, count, keys, values)
        order = rng.integers(len(lines), size=length // width + 1)
        _, first = np.unique(order, return_index=True)
        weights = np.full((len(order), 4), FAINT, np.float32)
        weights[:, 2], weights[:, 3] = ANSWER, 1.0
        weights[first, 2] = 0
        return Sequence(lines[order][:, parts].ravel()[:length], weights[:, parts].ravel()[:length])

    def woven(
        self, rng: Random, length: int, keys: int, values: int, *, few: float = 1.0
    ) -> Sequence:
        """Pair lines between lines of text, and told again later: scattered, or all of them at
        the end. Fewer answers than `few` weigh as much as `few`.
        """
        most = min(keys, 48, length // 16)
        count = int(min(most, np.exp(rng.uniform(0, np.log(most + 1)))))
        lines = self.alphabet.pairs(rng, max(count, 1), keys, values)
        count = len(lines)
        if rng.random() < 0.5:
            asked = rng.permutation(count)
            early = np.sort(rng.random(count)) * rng.uniform(0.05, 0.6)
            places = np.concatenate([early, np.ones(count)])
        else:
            asked = rng.integers(count, size=int(rng.integers(count, 2 * count + 1)))
            early = rng.random(count) * rng.uniform(0.05, 1.0)
            places = np.concatenate([early, rng.uniform(early[asked], 1.0)])
        order = np.argsort(places, kind="stable")
        told = np.concatenate([np.arange(count), asked])[order]
        return self._weave(rng, length, lines[told], places[order], few)

    def asked(self, rng: Random, length: int, keys: int, values: int) -> Sequence:
        """A chat: the user tells text with pair lines and asks for some of them, one a turn."""
        rounds = int(rng.integers(1, 9))
        lines = self.alphabet.pairs(
            rng, int(rng.integers(rounds, max(length // 32, rounds) + 1)), keys, values
        )
        open_turn, reply, close = self.user, self.assistant, [self.eos, self.alphabet.newline]
        room = length - 2 - 14 * rounds
        places = np.sort(rng.random(len(lines))) * rng.uniform(0.3, 1.0)
        body = self._weave(rng, room, lines, places, 1.0)
        ids, weights = [self.bos, open_turn, self.alphabet.newline], [1.0, 1.0, 1.0]
        ids += body.ids.tolist()
        weights += body.weights.tolist()
        for turn, row in enumerate(rng.permutation(len(lines))[:rounds]):
            mark, key, value, _ = lines[row].tolist()
            start = [open_turn, self.alphabet.newline] if turn else [self.alphabet.newline]
            ask = [*start, mark, key, *close, reply, self.alphabet.newline]
            ids += [*ask, mark, key, value, *close]
            weights += [*[FAINT] * len(ask), 1.0, ECHO, ANSWER, 1.0, 1.0]
        filler = self.chat(rng, length)
        ids, weights = ids + filler.ids.tolist(), weights + filler.weights.tolist()
        return Sequence(np.array(ids[:length]), np.array(weights[:length], np.float32))

    def _weave(
        self,
        rng: Random,
        length: int,
        lines: Ids,
        places: NDArray[np.float64],
        few: float,
    ) -> Sequence:
        """Text of `length` with `lines` at `places` (ascending, 0 to 1), each at the next line
        break.
        """
        which = 0 if rng.random() < 0.75 else 1
        source, breaks = self.texts[which], self.breaks[which]
        room = length - 4 * len(lines)
        low = int(np.searchsorted(breaks, rng.integers(len(source) - 2 * length)))
        start = int(breaks[low])
        stops = breaks[low : np.searchsorted(breaks, start + room, side="right")]
        cuts = (
            stops[np.minimum(np.searchsorted(stops - start, places * room), len(stops) - 1)] - start
        )
        where = np.repeat(cuts, 4)
        ids = np.insert(source[start : start + room], where, lines.ravel())
        weights = np.ones(room, np.float32)
        _, first = np.unique(lines[:, 1], return_index=True)
        marks = np.full((len(lines), 4), FAINT, np.float32)
        marks[:, 2] = ANSWER * max(1.0, few / max(len(lines) - len(first), 1))
        marks[:, 3] = 1.0
        marks[first, 2] = 0
        return Sequence(ids, np.insert(weights, where, marks.ravel()))


def _chat(turns: list[str]) -> str:
    """A dialogue in the chat template's form."""
    roles = ("user", "assistant")
    return BOS + "".join(f"<|{roles[i % 2]}|>\n{turn}{EOS}\n" for i, turn in enumerate(turns))


def _line_starts(text: Ids, newline: int) -> Ids:
    """Offsets at which a line begins, whose line before is not empty."""
    after = np.flatnonzero(text[:-1] == newline) + 1
    starts: Ids = after[1:][text[after[1:] - 2] != newline]
    return starts
