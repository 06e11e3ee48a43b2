"""A model stops at every end token that its files name, and no other id does harm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import make_config, write_checkpoint
from tokenizers import Tokenizer

from pigou.config import EngineConfig
from pigou.request import Grammar, SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import LoadedModel, load

ENGINE = EngineConfig(blocks=400, max_model_len=512, max_repeat=4)


def model(
    folder: Path, tokenizer: Path, vocab: int, generation: object, settings: dict[str, str]
) -> LoadedModel:
    write_checkpoint(folder, make_config("llama", vocab_size=vocab, eos_token_id=1))
    shutil.copy(tokenizer / "tokenizer.json", folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load(folder, "fp32")


def test_the_executor_stops_at_the_union(model_folder: Path, tmp_path: Path) -> None:
    loaded = model(tmp_path, model_folder, 320, [1], {})
    engine = LocalEngine(loaded, ENGINE)
    [free] = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=20, temperature=0.0))
    third = free.tokens[2]
    word = {
        "eos_token": str(
            Tokenizer.from_file(str(model_folder / "tokenizer.json")).id_to_token(third)
        )
    }
    named = model(tmp_path, model_folder, 320, [1], word)
    assert third in named.config.eos
    [stopped] = LocalEngine(named, ENGINE).generate(
        [[5, 6, 7]], SamplingParams(max_tokens=20, temperature=0.0)
    )
    assert stopped.tokens == free.tokens[: free.tokens.index(third) + 1]
    assert stopped.reason == "stop"


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "[a-z]{9}")])
def test_an_end_id_without_a_row_does_no_harm(
    grammar: Grammar | None, model_folder: Path, tmp_path: Path
) -> None:
    loaded = model(tmp_path, model_folder, 800, [1, 800, 2**31], {})
    assert loaded.config.eos == {1}
    params = SamplingParams(max_tokens=20, min_tokens=5, temperature=1.0, grammar=grammar)
    [output] = LocalEngine(loaded, ENGINE).generate([[5, 6, 7]], params)
    assert len(output.tokens) >= 5


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_serves_grammars(
    model_folder: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    rows = tokenizer.get_vocab_size() - 9
    loaded = model(tmp_path, model_folder, rows, [1], {})
    params = SamplingParams(max_tokens=60, temperature=0.0, grammar=Grammar("regex", "[ab]{5}"))
    [output] = LocalEngine(loaded, ENGINE).generate([[5, 6, 7]], params)
    text = tokenizer.decode(output.tokens, skip_special_tokens=True)
    assert len(text) == 5
    assert set(text) <= {"a", "b"}
    assert max(output.tokens) < rows
