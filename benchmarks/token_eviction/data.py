"""Rows of unseen text, and recall questions of equal length, as token ids."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pigou_lab.recall import recall_items
from tools.tiny.corpus import load

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Recall:
    """Recall questions of equal length."""

    tokens: Tokens  # shape (rows, length); the last three are the mark, the key and the answer
    pairs: NDArray[np.int64]  # told in each row, shape (rows,)
    # least tokens between the last pair and the question, shape (rows,).
    distance: NDArray[np.int64]


def unseen(corpus: Path) -> tuple[str, str]:
    """Return the plays and the agents' messages that the bundled model was not trained on."""
    split = load(corpus)
    return split.play, "\n".join(split.held_out.documents[1:])


def text_rows(
    tokenizer: Tokenizer, texts: tuple[str, str], rows: int, length: int, shift: float = 0.0
) -> Tokens:
    """Return rows of text, each after the begin token, a quarter of them agents' messages.

    Args:
        texts: plays and agents' messages.
        length: tokens of a row.
        shift: share of the way from one row to the next, 0 or more and below 1, by which each
            begins later; a row that would end behind its text is left out.

    Raises:
        ValueError: the texts are too short for `rows` rows without overlap, or the shift is out
            of range.
    """
    if not 0 <= shift < 1:
        raise ValueError(f"shift is {shift}; it must be 0 or more and below 1")
    begin = min(tokenizer.get_added_tokens_decoder(), default=0)
    agents = rows // 4
    found = []
    for text, count in zip(texts, (rows - agents, agents), strict=True):
        ids = tokenizer.encode(text).ids
        if count * (length - 1) > len(ids):
            raise ValueError(
                f"{count} rows of {length} tokens do not fit into {len(ids)}; ask for fewer"
            )
        stride = len(ids) // count if count else 0
        starts = [int((i + shift) * stride) for i in range(count)]
        fitting = [start for start in starts if start + length - 1 <= len(ids)]
        found += [[begin, *ids[start : start + length - 1]] for start in fitting]
    return np.array(found, dtype=np.int64)


def recall_rows(
    tokenizer: Tokenizer,
    text: str,
    *,
    pairs: tuple[int, ...],
    distances: tuple[int, ...],
    count: int,
    context: int,
) -> Recall:
    """Return questions whose key is asked for behind `context` tokens.

    Before the first pair's line stands as much other text as the length needs.

    Args:
        distances: least tokens between the last pair and the question.
        count: questions for each of both.
        context: tokens before the question.

    Raises:
        ValueError: a prompt does not fit into the context.
    """
    rng = random.Random(0)
    told_in = {line + "\n": tokenizer.encode(line + "\n").ids for line in text.split("\n")}
    lines, sizes = list(told_in.values()), {line: len(ids) for line, ids in told_in.items()}
    rows, told, far = [], [], []
    for many in pairs:
        for distance in distances:
            items = recall_items(
                text,
                sizes.__getitem__,
                pairs=many,
                distance=distance,
                count=count,
            )
            for item in items:
                ids = tokenizer.encode(item.prompt).ids
                answer = tokenizer.encode(f" {item.answer}").ids
                rows.append(_filled(ids[:-2], lines, context, rng) + ids[-2:] + answer)
                told.append(many)
                far.append(distance)
    return Recall(np.array(rows, dtype=np.int64), np.array(told), np.array(far))


def _filled(ids: list[int], lines: list[list[int]], length: int, rng: random.Random) -> list[int]:
    """Put lines of text before some ids, so that they are as many as asked for."""
    if len(ids) > length:
        raise ValueError(f"a prompt has {len(ids)} tokens; the context must have as many")
    start = rng.randrange(len(lines) // 2)
    before: list[int] = []
    while len(before) < length - len(ids):
        before += lines[start]
        start += 1
    return before[len(before) - (length - len(ids)) :] + ids
