"""What a trained folder can do: perplexity on held-out text, recall far back in unseen text,
greedy samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer

from pigou_lab.recall import MARK, RecallItem, recall_items
from tiny import decode
from tiny.corpus import Split
from tiny.model import Tiny
from tiny.tokenizer import BOS, EOS

PAIRS = (1, 8, 32)


@torch.inference_mode()
def perplexity(
    model: Tiny, tokenizer: Tokenizer, text: str, window: int = 1024
) -> tuple[float, float]:
    """(perplexity a token, bits a character) of `text`, read in windows, each after the begin
    token.
    """
    ids = tokenizer.encode(text).ids
    bos, total = tokenizer.token_to_id(BOS), 0.0
    for start in range(0, len(ids), window):
        batch = torch.tensor([[bos, *ids[start : start + window]]])
        _, each = model.loss(batch, torch.ones(batch.shape))
        total += each.sum().item()
    return math.exp(total / len(ids)), total / math.log(2) / len(text)


@torch.inference_mode()
def recall(
    model: Tiny,
    tokenizer: Tokenizer,
    text: str,
    pairs: int,
    *,
    distance: int = 1000,
    count: int = 500,
    seed: int = 0,
) -> float:
    """Share of `count` items whose greedy continuation is the answer and a newline, exactly."""
    right = 0
    for item in items(tokenizer, text, pairs, distance=distance, count=count, seed=seed):
        right += greedy(model, tokenizer, item.prompt, 2) == f" {item.answer}\n"
    return right / count


def items(
    tokenizer: Tokenizer, text: str, pairs: int, *, distance: int, count: int, seed: int = 0
) -> Iterator[RecallItem]:
    """Recall items over `text`, distances counted by `tokenizer`."""

    def tokens(line: str) -> int:
        return len(tokenizer.encode(line).ids)

    return recall_items(text, tokens, pairs=pairs, distance=distance, count=count, seed=seed)


def greedy(model: Tiny, tokenizer: Tokenizer, prompt: str, length: int) -> str:
    """Up to `length` greedy tokens after `prompt`, decoded, ending before the end token."""
    stop = tokenizer.token_to_id(EOS)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    new = decode.greedy(model, ids, length, stop)[0].tolist()
    new = new[: new.index(stop)] if stop in new else new
    return str(tokenizer.decode(new, skip_special_tokens=False))


def chat(model: Tiny, tokenizer: Tokenizer, message: str, length: int = 80) -> str:
    """The greedy reply to one user message, through the chat template's form."""
    return greedy(model, tokenizer, f"{BOS}<|user|>\n{message}{EOS}\n<|assistant|>\n", length)


@torch.inference_mode()
def asked(model: Tiny, tokenizer: Tokenizer, text: str, pairs: int, *, count: int) -> float:
    """Share of `count` chats, 1,000 tokens long or more, whose greedy reply is `@key value`."""
    right = 0
    for item in items(tokenizer, text, pairs, distance=1000, count=count):
        reply = chat(model, tokenizer, item.prompt, 8)
        right += reply == f"{MARK}{item.key} {item.answer}"
    return right / count


def report(model: Tiny, folder: Path, split: Split, count: int) -> Iterator[str]:
    """The lines of the evaluation of `folder`, `count` recall items a row."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    yield f"parameters: {sum(p.numel() for p in model.parameters()):,}"
    token, bits = perplexity(model, tokenizer, split.play)
    yield f"held-out Shakespeare: perplexity {token:.2f} a token, {bits:.3f} bits a character"
    agents = "\n".join(split.held_out.documents[1:])
    token, bits = perplexity(model, tokenizer, agents)
    yield f"held-out agent messages: perplexity {token:.2f} a token, {bits:.3f} bits a character"
    for pairs in PAIRS:
        share = recall(model, tokenizer, split.play, pairs, count=count)
        yield f"recall at 1,000 tokens, {pairs} pairs: {share:.1%} of {count}"
    few = max(count // 5, 1)
    share = asked(model, tokenizer, split.play, 8, count=few)
    yield f"the same asked in a chat, 8 pairs: {share:.1%} of {few}"
    for start in ("ROMEO:\n", "First Citizen:\nBefore we proceed"):
        yield f"--- greedy after {start!r}\n{start}{greedy(model, tokenizer, start, 120)}"
    for message in (
        "Good morrow, sir. What news from the king?",
        "Hi! I'd like to change my flight. Can you help me?",
    ):
        yield f"--- chat: {message}\n{chat(model, tokenizer, message)}"
