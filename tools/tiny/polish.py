"""Unlikelihood of one's own loops (Welleck et al. 2019, sequence level).

A small model's greedy text falls into loops. Here it continues prompts greedily, and every token
that completes a run of words already said is made less likely.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tiny.decode import greedy
from tiny.model import Tiny
from tiny.tasks import Ids, Tasks

ROWS, PROMPT, NEW = 16, 48, 112  # sequences of a batch, and their tokens: given and continued
GRAM = 4  # tokens of a repeated run that counts as a loop


def loops(ids: Ids, begin: int, tasks: Tasks) -> NDArray[np.bool_]:
    """Which tokens of `ids` (length,) from `begin` on belong to a run of `GRAM`, or to a whole
    shorter line, said before.

    Runs do not cross lines; special tokens and the lines of speakers' names (they end in a colon)
    do not count.
    """
    marks = np.zeros(len(ids), np.bool_)
    seen: set[tuple[int, ...]] = set()
    start = 0
    for end in [*np.flatnonzero(ids == tasks.alphabet.newline).tolist(), len(ids)]:
        line = tuple(ids[start:end].tolist())
        if len(line) > 1 and line[-1] != tasks.colon:
            runs = [(at, line[at : at + GRAM]) for at in range(max(len(line) - GRAM + 1, 1))]
            for at, run in runs:
                marks[start + at : start + at + len(run)] |= run in seen
                seen.add(run)
        start = end + 1
    marks[:begin] = False
    return marks & (ids >= tasks.special)


def prompts(tasks: Tasks, rng: np.random.Generator) -> torch.Tensor:
    """Beginnings to continue, (ROWS, PROMPT): half text, half chats."""
    rows = [tasks.text(rng, PROMPT) if i % 2 else tasks.chat(rng, PROMPT) for i in range(ROWS)]
    return torch.from_numpy(np.stack([row.ids for row in rows]))


def penalty(model: Tiny, tasks: Tasks, rng: np.random.Generator) -> tuple[torch.Tensor, float]:
    """The unlikelihood loss of one batch of continuations, and the share of tokens in loops."""
    start = prompts(tasks, rng).to(model.embed.weight.device)
    model.eval()
    whole = torch.cat((start, greedy(model, start, NEW)), dim=1)
    model.train()
    marks = np.stack([loops(row, PROMPT, tasks) for row in whole.cpu().numpy()])
    mask = torch.from_numpy(marks[:, 1:]).to(whole.device)
    logits = model(whole[:, :-1]).float()
    chosen = logits.log_softmax(-1).gather(2, whole[:, 1:, None])[..., 0]
    unlikely = -torch.log1p(-chosen.exp().clamp_max(1 - 1e-4))
    return (unlikely * mask).sum() / mask.numel(), mask.float().sum().item() / (ROWS * NEW)
