"""The curriculum: recall in bare streams first, then longer contexts, then text, dialogue and all
lengths together.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tiny import polish
from tiny.model import Shape, Tiny
from tiny.tasks import ANSWER, Sequence, Tasks

WINDOW = 1024  # tokens of a batch, when its sequences are shorter than that


@dataclass(frozen=True)
class Level:
    """A step of the curriculum: sequence lengths to draw from, words in use, and the share of
    each task.
    """

    lengths: tuple[int, ...]
    keys: int
    values: int
    stream: float = 0.0
    echo: float = 0.0
    woven: float = 0.0
    text: float = 0.0
    chat: float = 0.0
    asked: float = 0.0
    bare: float = 0.0  # share of the streams that leave out mark and newline
    few: float = 1.0  # minimum number of answers that a woven text weighs
    steps: int = 0  # minimum of steps
    goal: float = 0.95  # and until this share of answers is given more than half of the probability


CURRICULUM = (
    Level((64,), 128, 128, stream=0.8, echo=0.2, bare=1.0),
    Level((64,), 128, 128, stream=0.8, echo=0.2, bare=0.5),
    Level((128,), 128, 128, stream=0.8, echo=0.2, bare=0.2),
    Level((256,), 128, 128, stream=0.6, echo=0.2, text=0.2),
    Level((256,), 128, 128, stream=0.3, echo=0.1, woven=0.4, text=0.2),
    Level((512,), 128, 128, stream=0.1, echo=0.1, woven=0.5, text=0.3),
    Level((1024,), 128, 128, stream=0.1, echo=0.1, woven=0.5, text=0.3),
    Level((2048,), 128, 128, stream=0.1, echo=0.1, woven=0.6, text=0.2),
)
MIX = Level(
    (256, 512, 1024, 2048),
    128,
    128,
    stream=0.03,
    echo=0.04,
    woven=0.3,
    text=0.35,
    chat=0.22,
    asked=0.06,
    few=4.0,
)
POLISH = Level((512, 1024, 2048), 128, 128, woven=0.5, text=0.2, chat=0.22, asked=0.08, few=16.0)
DROPOUT = 0.2  # in the mix, which reads the same text many times
LOOPS = 10.0  # weight of the unlikelihood of loops, in the polish


def draw(tasks: Tasks, level: Level, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch: ids and target weights, both (batch, length), at least `WINDOW` tokens."""
    length = int(rng.choice(level.lengths))
    names = ("stream", "echo", "woven", "text", "chat", "asked")
    shares = np.array([getattr(level, name) for name in names])
    words = (level.keys, level.values)
    rows: list[Sequence] = []
    for _ in range(max(1, WINDOW // length)):
        task = names[rng.choice(len(names), p=shares / shares.sum())]
        if task == "stream":
            rows.append(tasks.stream(rng, length, *words, bare=rng.random() < level.bare))
        elif task == "echo":
            rows.append(tasks.echo(rng, length, level.keys))
        elif task == "woven":
            rows.append(tasks.woven(rng, length, *words, few=level.few))
        elif task == "asked":
            rows.append(tasks.asked(rng, length, *words))
        else:
            rows.append(tasks.text(rng, length) if task == "text" else tasks.chat(rng, length))
    ids = torch.from_numpy(np.stack([row.ids for row in rows]))
    return ids, torch.from_numpy(np.stack([row.weights for row in rows]))


class Meter:
    """Running means of what a batch tells: loss of text, loss of answers, share of answers that
    are sure.
    """

    def __init__(self, decay: float = 0.98) -> None:
        self.decay = decay
        self.means: dict[str, float] = {}

    def add(self, each: torch.Tensor, weights: torch.Tensor) -> None:
        """`each` target's loss and `weights`, both (batch, length - 1)."""
        for name, mark in (("text", weights == 1.0), ("answer", weights >= ANSWER)):
            if mark.any():
                self.mix(name, each[mark].mean().item())
        if (weights >= ANSWER).any():
            self.mix("recall", (each[weights >= ANSWER] < math.log(2)).float().mean().item())

    def reset(self, name: str) -> None:
        """Forgets one mean, when the task changes under it."""
        self.means.pop(name, None)

    def mix(self, name: str, value: float) -> None:
        """Moves one mean towards a new value."""
        old = self.means.get(name, 0.0 if name == "recall" else value)
        self.means[name] = self.decay * old + (1 - self.decay) * value


Probe = Callable[[Tiny], dict[str, float]]  # figures of held-out text, for the log


class Trainer:
    """Holds model, optimizer and log, and walks the three parts: climb, mix, polish."""

    def __init__(
        self, shape: Shape, tasks: Tasks, out: Path, *, seed: int, rate: float, half: bool
    ) -> None:
        torch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = Tiny(shape).to(self.device)
        self.tasks, self.out, self.rate, self.half = tasks, out, rate, half
        matrices = [
            p for n, p in self.model.named_parameters() if p.ndim == 2 and not n.startswith("embed")
        ]
        others = [
            p for n, p in self.model.named_parameters() if p.ndim == 1 or n.startswith("embed")
        ]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
        self.meter = Meter()
        self.step, self.tokens, self.began = 0, 0, time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        self.log = (out / "log.jsonl").open("a")

    def update(self, level: Level, rate: float, loops: float = 0.0) -> None:
        """One optimizer step at learning rate `rate`; `loops` weighs the unlikelihood of loops."""
        ids, weights = draw(self.tasks, level, self.rng)
        ids, weights = ids.to(self.device), weights.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss, each = self.model.loss(ids, weights)
            if loops:
                unlikely, share = polish.penalty(self.model, self.tasks, self.rng)
                loss = loss + loops * unlikely
                self.meter.mix("loops", share)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.tokens += ids.numel()
        self.meter.add(each, weights[:, 1:])

    def note(self, stage: str, **more: float) -> None:
        """Appends a line to the log, and prints it."""
        seconds = round(time.monotonic() - self.began, 1)
        means = {name: round(value, 4) for name, value in self.meter.means.items()}
        line = {
            "stage": stage,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": seconds,
            **means,
            **more,
        }
        text = json.dumps(line)
        self.log.write(text + "\n")
        self.log.flush()
        print(text, flush=True)

    def climb(self, levels: tuple[Level, ...], limit: int) -> None:
        """Walks the levels, each until its goal is reached or `limit` steps are spent on it."""
        for number, level in enumerate(levels):
            self.meter.reset("recall")
            for count in range(1, limit + 1):
                self.update(level, self.rate * min(1.0, self.step / 100))
                if count % 50 == 0:
                    self.note(f"level {number}")
                if count >= level.steps and self.meter.means.get("recall", 0.0) >= level.goal:
                    break
            self.note(f"level {number} done")
            self.save("climb")

    def mix(self, level: Level, steps: int, probe: Probe, every: int = 1000) -> None:
        """The long part: `steps` of the mix, the rate falling along a cosine to a twentieth;
        probed now and then.
        """
        for layer in self.model.layers:
            layer.dropout = DROPOUT
        for count in range(1, steps + 1):
            fall = 0.5 * (1 + math.cos(math.pi * count / steps))
            self.update(level, self.rate * (0.05 + 0.95 * fall))
            if count % 50 == 0:
                self.note("mix")
            if count % every == 0 or count == steps:
                self.save("mix")
                self.model.eval()
                self.note("probe", **probe(self.model))
                self.model.train()

    def polish(self, level: Level, steps: int, probe: Probe) -> None:
        """The end: few pairs weigh more, greedy loops become unlikely; the rate falls to 0."""
        for count in range(1, steps + 1):
            self.update(level, self.rate * 0.3 * (1 - (count - 1) / steps), loops=LOOPS)
            if count % 10 == 0:
                self.note("polish")
            if count % 50 == 0:
                self.save("polish")
        self.save("polish")
        self.model.eval()
        self.note("probe", **probe(self.model))

    def resume(self, name: str) -> None:
        """Takes the weights of `<out>/<name>.pt`; the optimizer begins afresh."""
        path = self.out / f"{name}.pt"
        self.model.load_state_dict(torch.load(path, map_location=self.device, weights_only=True))

    def save(self, name: str) -> None:
        """Writes weights to `<out>/<name>.pt`."""
        torch.save(self.model.state_dict(), self.out / f"{name}.pt")
