"""What transformers makes of the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: A divergence is excused where the reference's two best logits are closer than this.
GAP = 1e-5

Prompt = NDArray[np.int64]


def make_prompts(count: int, vocab: int, longest: int, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, size=rng.integers(1, longest + 1)) for _ in range(count)]


class Reference:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        self.excused = 0

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits after each token, shape (tokens, vocab), float32."""
        with torch.inference_mode():
            result: Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return result

    def check(self, prompts: Iterable[Prompt], outputs: Iterable[Sequence[int]]) -> None:
        """Every output is what greedy decoding gives, up to excused divergences, counted."""
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
            best = logits.topk(2).values
            close = best[:, 0] - best[:, 1] < GAP
            wrong = logits.argmax(-1) != torch.tensor(output)
            self.excused += int((wrong & close).sum())
            assert not (wrong & ~close).any(), (
                f"after {int((wrong & ~close).nonzero()[0])} tokens of {list(output)}"
            )
