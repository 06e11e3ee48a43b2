"""End tokens are the union of what a model's files name, within its vocabulary."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from pigou.models import bundled_path
from pigou.text.model_files import read_end_tokens, within
from pigou.text.tokenizer import Tokenizer, TokenizerError

ROWS = 2560


def write(folder: Path, name: str, value: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer whose special tokens are 0 to 4, and no word of end tokens."""
    shutil.copy(bundled_path() / "tokenizer.json", tmp_path)
    write(tmp_path, "config.json", {"vocab_size": ROWS})
    write(tmp_path, "tokenizer_config.json", {})
    return tmp_path


@pytest.mark.parametrize(
    ("file", "said", "ends"),
    [
        ("config.json", {"eos_token_id": 7}, {7}),
        ("config.json", {"eos_token_id": [7, 9]}, {7, 9}),
        ("config.json", {"text_config": {"eos_token_id": 8}}, {8}),
        ("config.json", {"eos_token_id": None}, set()),
        ("generation_config.json", {"eos_token_id": [1, 800, 2560, 2561, -1]}, {1, 800}),
        ("tokenizer_config.json", {"eos_token": "<|end|>"}, {1}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|end|>"}}, {1}),
        ("tokenizer_config.json", {"eos_token": "<|no such token|>"}, set()),
        (
            "tokenizer_config.json",
            {"eos_token": "<x>", "added_tokens_decoder": {"33": {"content": "<x>"}}},
            {33},
        ),
        ("special_tokens_map.json", {"eos_token": "<|end|>"}, {1}),
    ],
)
def test_every_file_that_names_end_tokens_is_heard(
    folder: Path, file: str, said: dict[str, Any], ends: set[int]
) -> None:
    write(folder, file, {"vocab_size": ROWS} | said)
    assert read_end_tokens(folder, ROWS) == ends


def test_end_tokens_of_all_files_are_united(folder: Path) -> None:
    write(folder, "config.json", {"vocab_size": ROWS, "eos_token_id": 7})
    write(folder, "generation_config.json", {"eos_token_id": [8, 9]})
    write(folder, "tokenizer_config.json", {"eos_token": "<|end|>"})
    assert read_end_tokens(folder, ROWS) == {1, 7, 8, 9} == Tokenizer.load(folder).eos


def test_a_chatml_template_adds_the_end_of_its_turns(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        if token["content"] == "<|assistant|>":
            token["content"] = "<|im_end|>"
    spec["model"]["vocab"]["<|im_end|>"] = spec["model"]["vocab"].pop("<|assistant|>")
    write(folder, "tokenizer.json", spec)
    write(folder, "config.json", {"vocab_size": ROWS, "eos_token_id": 1})
    assert read_end_tokens(folder, ROWS) == {1}
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert read_end_tokens(folder, ROWS) == {1, 4} == Tokenizer.load(folder).eos


@pytest.mark.parametrize("said", ["</s>", [1, "2"], 1.5, True, {"id": 1}])
def test_an_end_token_that_is_no_id_is_refused_by_name(folder: Path, said: Any) -> None:
    write(folder, "generation_config.json", {"eos_token_id": said})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id"):
        read_end_tokens(folder, ROWS)
    with pytest.raises(TokenizerError, match="eos_token_id"):
        Tokenizer.load(folder)


def test_ids_outside_the_vocabulary_are_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert within(frozenset({1, 800, -1}), 800) == {1}
    assert "800" in caplog.text
    assert "-1" in caplog.text
