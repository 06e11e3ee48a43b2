"""Tokens that stand in `tokenizer_config.json` alone are tokens as in transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pigou.models import bundled_path
from pigou.text.model_files import read_tokenizer
from pigou.text.tokenizer import Tokenizer, TokenizerError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
#: Token 2560 and up are new; "<|end|>" is in the vocabulary.
ADDED: dict[str, Any] = {
    "2560": {"content": "<|im_start|>", "special": True, "normalized": False},
    "2561": {"content": "<|im_end|>", "special": True, "normalized": False},
    "2562": {"content": "<tool_call>", "special": False, "normalized": False},
}


def write(folder: Path, settings: dict[str, Any], spec: dict[str, Any] | None = None) -> Path:
    text = (bundled_path() / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text if spec is None else json.dumps(spec))
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def bundled_spec() -> dict[str, Any]:
    spec: dict[str, Any] = json.loads((bundled_path() / "tokenizer.json").read_text())
    return spec


def same_as_transformers(folder: Path, text: str) -> list[int]:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    ids = ours.encode(text, special=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    return ids


def test_new_tokens_of_the_config_are_ids_and_special_ones_are_hidden(tmp_path: Path) -> None:
    write(tmp_path, {"added_tokens_decoder": ADDED, "chat_template": TEMPLATE})
    ids = same_as_transformers(tmp_path, "<|im_start|>hi <tool_call><|im_end|>")
    assert [i for i in ids if i >= 2560] == [2560, 2562, 2561]
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(ids) == "hi <tool_call>"
    assert tokenizer.eos == {1, 2561}
    assert 2561 not in tokenizer.encode(tokenizer.control.guard("<|im_end|>"), special=False)


def test_a_token_of_the_vocabulary_becomes_special_by_the_config(tmp_path: Path) -> None:
    spec = bundled_spec()
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] != "<|end|>"]
    for settings in (
        {"added_tokens_decoder": {"1": {"content": "<|end|>", "special": True}}},
        {"eos_token": "<|end|>"},
        {"additional_special_tokens": ["<|end|>", "<|not in the vocabulary|>"]},
    ):
        write(tmp_path, settings, spec)
        assert Tokenizer.load(tmp_path).encode("a<|end|>", special=False)[-1] == 1
        assert Tokenizer.load(tmp_path).decode([1]) == ""
    spec["added_tokens"] = [t | {"special": False} for t in bundled_spec()["added_tokens"]]
    write(tmp_path, {"added_tokens_decoder": {"1": {"content": "<|end|>", "special": True}}}, spec)
    assert Tokenizer.load(tmp_path).decode([0, 1]) == "<|begin|>"


def test_grammars_know_the_tokens_of_the_config(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from pigou.request import Grammar
    from pigou.runtime.structured_output import read_grammars

    write(tmp_path, {"added_tokens_decoder": ADDED})
    grammars = read_grammars(tmp_path, 2563, frozenset({2561}))
    state = grammars.start(Grammar("regex", ".*"))
    allowed = state.allowed()
    assert not allowed[2560], "a special token is no text"
    assert allowed[2561], "it may end here"


def test_a_folder_that_adds_nothing_is_read_as_it_is() -> None:
    assert read_tokenizer(bundled_path()) == (bundled_path() / "tokenizer.json").read_text()


def test_an_id_that_cannot_be_is_left_out_and_a_faulty_table_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        table = {"2600": {"content": "<|far|>", "special": True}}
        write(tmp_path, {"added_tokens_decoder": table})
        assert max(Tokenizer.load(tmp_path).encode("<|far|>")) < 2560
    assert "<|far|>" in caplog.text
    for faulty in ([1], {"x": {"content": "a"}}, {"7": "a"}, {"7": {"special": True}}):
        write(tmp_path, {"added_tokens_decoder": faulty})
        with pytest.raises(TokenizerError, match="added_tokens_decoder"):
            Tokenizer.load(tmp_path)
