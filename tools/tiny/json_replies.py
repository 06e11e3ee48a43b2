"""The last stage: replies in JSON whose strings, lists and objects end, and nothing else changed.

Under a grammar a model without any JSON in its training never closes a string. Here it learns short
JSON replies of random shapes; on text, dialogue and recall it is held to what it said before, by
the divergence from its own earlier predictions.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from tiny.model import Tiny
from tiny.tasks import Random, Sequence, Tasks
from tiny.tokenizer import BOS, EOS

if TYPE_CHECKING:
    from tiny.train import Level, Trainer

LENGTH, ROWS = 256, 4  # tokens and sequences of a batch of JSON
DEPTH = 3  # maximum depth of nested lists and objects
KEEP = 8.0  # weight of the divergence from the earlier predictions
_KEYS = """
    name title date city country items tags price total count id type status email author year
    age description summary steps answer explanation result participants ingredients address
    street zip score rating priority category unit currency start end day events person people
    temperature active verified notes text message reason label language location value
    sentiment confidence quantity product customer order first_name last_name due_date
    created_at is_open genre pages duration color size query arguments
"""
KEYS = _KEYS.split()
#: Ranges of years, months, days and hours.
SPANS = ((1990, 2030), (1, 13), (1, 29), (0, 24))
#: Shares of lists by length: after each item a greedy reply ends its list.
ITEMS = (0.2, 0.45, 0.25, 0.1)
#: Shares of the kinds of values.
KINDS = {"text": 0.43, "integer": 0.16, "float": 0.07, "flag": 0.07, "null": 0.03, "code": 0.04,
         "list": 0.12, "object": 0.08}  # fmt: skip


class JsonReplies:
    """Draws chats whose replies are JSON."""

    def __init__(self, tasks: Tasks, decode: Any, encode: Any) -> None:
        self._encode = encode
        self._words = [
            word
            for word in decode(tasks.texts[0][:60_000].tolist()).split()
            if word.strip(string.punctuation)
        ]

    def draw(self, rng: Random, length: int) -> Sequence:
        """Chats one after another, cut to `length`; only the replies weigh."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            prompt, reply = self._chat(rng)
            before, after = self._encode(prompt).ids, self._encode(reply).ids
            ids += [*before, *after]
            weights += [*[0.0] * len(before), *[1.0] * len(after)]
        return Sequence(np.array(ids[:length], np.int64), np.array(weights[:length], np.float32))

    def _chat(self, rng: Random) -> tuple[str, str]:
        system = f"<|system|>\n{self._text(rng, 12)}{EOS}\n" if rng.random() < 0.4 else ""
        asked = self._text(rng, 30)
        if rng.random() < 0.3:
            names = ", ".join(self._key(rng) for _ in range(4))
            asked = f"{asked}\nReply in JSON with {names}."
        value = self._value(rng, "object" if rng.random() < 0.85 else "calls", 0)
        spaced = rng.random() < 0.25
        reply = json.dumps(
            value, ensure_ascii=False, separators=(", ", ": ") if spaced else (",", ":")
        )
        return f"{BOS}{system}<|user|>\n{asked}{EOS}\n<|assistant|>\n", f"{reply}{EOS}\n"

    def _value(self, rng: Random, kind: str, depth: int) -> Any:
        draws: dict[str, Callable[[], Any]] = {
            "text": lambda: self._text(rng, 4 if rng.random() < 0.7 else 10),
            "integer": lambda: int(10 ** rng.uniform(0, 4)) * int(rng.choice([1, 1, 1, -1])),
            "float": lambda: round(float(10 ** rng.uniform(0, 3)), int(rng.integers(1, 3))),
            "flag": lambda: bool(rng.random() < 0.5),
            "null": lambda: None,
            "code": lambda: self._code(rng),
            "list": lambda: self._list(rng, depth),
            "object": lambda: self._object(rng, depth),
            "calls": lambda: [self._call(rng) for _ in range(rng.integers(1, 3))],
        }
        return draws[kind]()

    def _code(self, rng: Random) -> str:
        year, month, day, hour = (int(rng.integers(*span)) for span in SPANS)
        word = self._key(rng)
        forms = (f"{year}-{month:02}-{day:02}", f"{hour}:{day:02}", f"{word}@{word}.org", word, "")
        return str(rng.choice(forms))

    def _list(self, rng: Random, depth: int) -> list[Any]:
        same = self._kind(rng, depth)
        count = int(rng.choice(len(ITEMS), p=ITEMS))
        return [self._value(rng, same, depth + 1) for _ in range(count)]

    def _object(self, rng: Random, depth: int) -> dict[str, Any]:
        keys = [self._key(rng) for _ in range(rng.integers(1, 6))]
        return {key: self._value(rng, self._kind(rng, depth), depth + 1) for key in keys}

    def _call(self, rng: Random) -> dict[str, Any]:
        name = f"{self._key(rng)}_{self._key(rng)}"
        return {"name": name, "arguments": self._object(rng, 1)}

    def _kind(self, rng: Random, depth: int) -> str:
        names = list(KINDS)[: len(KINDS) - 2 * (depth >= DEPTH)]
        shares = np.array([KINDS[name] for name in names])
        return str(rng.choice(names, p=shares / shares.sum()))

    def _key(self, rng: Random) -> str:
        if rng.random() < 0.8:
            return str(rng.choice(KEYS))
        word = str(rng.choice(self._words)).strip(string.punctuation).lower()
        return word if rng.random() < 0.5 else f"{word}_{rng.choice(KEYS)}"

    def _text(self, rng: Random, longest: int) -> str:
        at = rng.integers(len(self._words) - longest)
        words = self._words[at : at + int(rng.integers(1, longest + 1))]
        if rng.random() < 0.3:
            words[0] = words[0].capitalize()
        return " ".join(words)


def train(
    trainer: Trainer, replies: JsonReplies, level: Level, *, steps: int, rate: float, teacher: Tiny
) -> None:
    """Walk the stage: each step has a batch of JSON and one of the earlier tasks.

    On those tasks the model is held to what `teacher` predicts.
    """
    from tiny.train import draw

    teacher.eval().requires_grad_(requires_grad=False)
    before = replace(level, lengths=(256, 512, 1024))
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.0
    for count in range(1, steps + 1):
        rows = [replies.draw(trainer.rng, LENGTH) for _ in range(ROWS)]
        ids = torch.from_numpy(np.stack([row.ids for row in rows])).to(trainer.device)
        weights = torch.from_numpy(np.stack([row.weights for row in rows])).to(trainer.device)
        known = draw(trainer.tasks, before, trainer.rng)[0].to(trainer.device)
        with torch.autocast(trainer.device.type, torch.bfloat16, enabled=trainer.half):
            loss, losses = trainer.model.loss(ids, weights)
            drift = divergence(trainer.model, teacher, known)
        (loss + KEEP * drift).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        warm = min(1.0, count / 20)
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * count / steps))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.step += 1
        trainer.tokens += ids.numel() + known.numel()
        trainer.meter.mix("json", losses[weights[:, 1:] > 0].mean().item())
        trainer.meter.mix("drift", drift.item())
        if count % 20 == 0:
            trainer.note("json")
            trainer.save("json")
    trainer.save("json")


def divergence(model: torch.nn.Module, teacher: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The mean Kullback-Leibler divergence of the next token from the teacher's, in nats."""
    with torch.no_grad():
        expected = teacher(ids).float().log_softmax(-1)
    predicted = model(ids).float().log_softmax(-1)
    return F.kl_div(predicted, expected, reduction="none", log_target=True).sum(-1).mean()
