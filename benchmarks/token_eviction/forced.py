"""Teacher forcing on the runtime's own path: given tokens instead of sampled ones, and how
probable each was.

The tokens count as generated: they are computed one by one, with whatever the cache has kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.runtime.executor import TorchExecutor
from pigou.runtime.ops import Ops
from pigou.runtime.sampling import Sampler
from pigou.runtime.sequence import TokenSequence as Row
from pigou.runtime.step_output import RankedLogprobs


class Script:
    """Tokens that a request is made to generate, and what the model thought of them.

    Attributes:
        tokens: ids, in order, shape (n,); what follows them is sampled.
        logprobs: natural log probability of each, shape (n,); NaN until it came.
    """

    def __init__(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        self.tokens = np.asarray(tokens, dtype=np.int64)
        self.logprobs = np.full(len(self.tokens), np.nan, dtype=np.float32)


class Forcing:
    """The scripts of an executor's requests.

    Attributes:
        spent: nanoseconds that forcing itself took, by `clock`.
    """

    def __init__(self, clock: Callable[[], int] = time.process_time_ns) -> None:
        self.spent = 0
        self.clock = clock
        self._scripts: dict[str, Script] = {}

    def expect(self, request: str, tokens: Sequence[int] | NDArray[np.integer]) -> Script:
        """Let a request generate these tokens first; returns where their probabilities go."""
        script = self._scripts[request] = Script(tokens)
        return script

    def forget(self, request: str) -> None:
        """Drop a request's script; nothing happens where there is none."""
        self._scripts.pop(request, None)

    def choose(self, rows: list[Row], logits: Tensor, chosen: Tensor) -> None:
        """Put the scripts' next tokens in place of the chosen, and note their log probabilities.

        Args:
            rows: sequences that sample.
            logits: theirs, shape (n, vocab).
            chosen: sampled tokens, shape (n,), int64; written to.
        """
        began = self.clock()
        places, scripts = [], []
        for place, row in enumerate(rows):
            script = self._scripts.get(row.request)
            if script is not None and row.generated < len(script.tokens):
                places.append(place)
                scripts.append((script, row.generated))
        if places:
            tokens = torch.tensor(
                [int(script.tokens[at]) for script, at in scripts], device=chosen.device
            )
            part = logits if len(places) == len(logits) else logits[places]
            given = part.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
            logprobs = (given - part.float().logsumexp(-1)).tolist()
            for (script, at), logprob in zip(scripts, logprobs, strict=True):
                script.logprobs[at] = logprob
            chosen[places] = tokens
        self.spent += self.clock() - began


class ForcedSampler(Sampler):
    """Samples, but where a script has a token to give."""

    def __init__(
        self, forcing: Forcing, sequences: list[Row], ops: Ops, device: torch.device
    ) -> None:
        super().__init__(sequences, ops, device)
        self._forcing, self._rows_ = forcing, sequences

    def __call__(self, logits: Tensor) -> tuple[Tensor, dict[int, RankedLogprobs]]:
        """Choose a token for each row; the arguments are those of `Sampler`."""
        tokens, reports = super().__call__(logits)
        self._forcing.choose(self._rows_, logits, tokens)
        return tokens, reports


def force(executor: TorchExecutor, clock: Callable[[], int] = time.process_time_ns) -> Forcing:
    """Let an executor's requests be forced from now on."""
    forcing = Forcing(clock)
    executor.sampler = partial(ForcedSampler, forcing)
    return forcing
