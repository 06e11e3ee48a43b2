"""A copy of the bundled model that reasons: its prompts end in `<think>`, a sentence closes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from pigou.models import bundled_path

OPEN, CLOSE = 2558, 2559
_THINKS = (
    "{% if add_generation_prompt %}{{ '<|assistant|>\n<think>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)


def make(folder: Path) -> Path:
    """Write the model's files, and return their folder."""
    shutil.copytree(bundled_path(), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    gone = {name for name, token in model["vocab"].items() if token >= OPEN}
    model["vocab"] = {name: token for name, token in model["vocab"].items() if token < OPEN}
    model["merges"] = [
        pair
        for pair in model["merges"]
        if "".join(pair if isinstance(pair, list) else pair.split(" ")) not in gone
    ]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token, name in ((OPEN, "<think>"), (CLOSE, "</think>")):
        tokenizer["added_tokens"].append({"id": token, "content": name, "special": False, **plain})
    path.write_text(json.dumps(tokenizer))
    weights = load_file(folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    rows[CLOSE] = 1.6 * rows[model["vocab"]["."]]
    save_file(weights, folder / "model.safetensors")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    template = settings["chat_template"]
    at = template.rindex("{% if add_generation_prompt %}")
    settings["chat_template"] = template[:at] + _THINKS
    path.write_text(json.dumps(settings))
    return folder
