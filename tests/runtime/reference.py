"""What transformers makes of the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from pigou.models import bundled_path
from pigou.text.chat_template import ChatTemplate

#: English that no bundled model was trained on.
UNSEEN = Path(__file__).parents[2] / "LICENSE"
#: Lines that the end of a test run prints.
REPORTS: list[str] = []
#: A divergence is excused where the reference's two best logits are closer than this.
GAP = 1e-5

Prompt = NDArray[np.int64]


def make_prompts(count: int, vocab: int, longest: int, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, size=rng.integers(1, longest + 1)) for _ in range(count)]


def bundled_prompts(count: int, longest: int, seed: int = 0) -> list[Prompt]:
    """Prompts for the bundled model: of five, two are text, two a chat, one is any tokens."""
    folder = bundled_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    names = {name: settings[name] for name in ("bos_token", "eos_token")}
    template = ChatTemplate(settings["chat_template"], names)
    text, size = UNSEEN.read_text(), tokenizer.get_vocab_size()
    rng = np.random.default_rng(seed)
    prompts = []
    for i in range(count):
        length = rng.integers(1, longest + 1)
        start = rng.integers(len(text) // 2)
        words = text[start : start + length * 4]
        if i % 5 == 4:
            prompts.append(rng.integers(2, size, size=length))
            continue
        if i % 5 > 1:
            words = template.render([{"role": "user", "content": words}])
        prompts.append(np.array(tokenizer.encode(words).ids[-length:], dtype=np.int64))
    return prompts


def report(line: str) -> None:
    """Have a line printed at the end of the test run."""
    REPORTS.append(line)


class Reference:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits after each token, shape (tokens, vocab), float32."""
        with torch.inference_mode():
            result: Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return result

    def check(self, prompts: Iterable[Prompt], outputs: Iterable[Sequence[int]]) -> int:
        """Every output is what greedy decoding gives, up to excused divergences; their number."""
        excused = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
            best = logits.topk(2).values
            close = best[:, 0] - best[:, 1] < GAP
            wrong = logits.argmax(-1) != torch.tensor(output)
            excused += int((wrong & close).sum())
            assert not (wrong & ~close).any(), (
                f"after {int((wrong & ~close).nonzero()[0])} tokens of {list(output)}"
            )
        return excused
