"""The byte-level BPE tokenizer of the tiny model: trained here, lossless for any UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pigou_lab.recall import KEYS, MARK, VALUES

BOS, EOS = "<|begin|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL = (BOS, EOS, *(f"<|{role}|>" for role in ROLES))
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ 'You may call functions. Functions:\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    '{{ \'\n</tools>\nTo call one, write:\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}'
    "\n</tool_call>' + eos_token + '\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('role is ' + message['role'] + '; use system, user, assistant or tool') }}"
    "{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|>\n<tool_response>\n' + message['content'] + '\n</tool_response>' + eos_token "
    "+ '\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>\n' + (message['content'] or '') }}"
    "{% if message['role'] == 'assistant' and message['tool_calls'] %}"
    "{% for call in message['tool_calls'] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}{% endif %}"
    "{{ eos_token + '\n' }}"
    "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges from `texts`; every recall key (without a space) and value (after a space)
    becomes one token.

    Newlines and digits are tokens of their own, so the tokens of a text are those of its lines,
    joined.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "".join(f"{MARK}{key}\n" for key in KEYS) + "".join(f" {value}\n" for value in VALUES)
    tokenizer.train_from_iterator([*texts, *[words] * 400], trainer)
    for word in (*KEYS, *(f" {value}" for value in VALUES), MARK, "\n"):
        if len(tokenizer.encode(word).ids) != 1:
            raise ValueError(
                f"{word!r} is not one token; raise the repeats of the word list or vocab_size"
            )
    return tokenizer


def settings(length: int) -> dict[str, Any]:
    """`tokenizer_config.json`; `length` is the longest context in tokens."""
    return {
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL)
        },
        "bos_token": BOS,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": length,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def special(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token that must be there; raises ValueError if it is not."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return int(found)


def save(tokenizer: Tokenizer, folder: Path, length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings(length), indent=2) + "\n")
