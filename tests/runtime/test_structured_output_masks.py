"""Structured output always matches its grammar, and faults are named."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_config, write_checkpoint
from tokenizers import Tokenizer

from pigou.config import EngineConfig
from pigou.models import bundled_path
from pigou.request import Grammar, SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import load
from pigou.runtime.step_output import GrammarError
from pigou.runtime.structured_output import Grammars, read_grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def talker(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    """An engine whose random model has a tokenizer, and room beyond its tokens."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size() + 13
    folder = tmp_path_factory.mktemp("talker")
    write_checkpoint(folder, make_config("llama", vocab_size=vocab, eos_token_id=1))
    shutil.copy(model_folder / "tokenizer.json", folder)
    return LocalEngine(load(folder), EngineConfig(blocks=400, max_model_len=512, max_repeat=4))


@pytest.fixture(scope="module")
def text_of(model_folder: Path) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))


def outputs(
    engine: LocalEngine, grammar: Grammar, text_of: Callable[[list[int]], str]
) -> list[str]:
    params = [
        SamplingParams(max_tokens=300, temperature=t, seed=seed, grammar=grammar)
        for seed, t in enumerate([0.0, 0.7, 1.0, 1.0, 1.5, 2.0])
    ]
    finished = engine.generate([[5, 6, 7]] * len(params), params)
    assert all(output.reason == "stop" for output in finished)
    return [text_of(output.tokens) for output in finished]


def test_output_under_a_json_schema_always_parses_and_fits(
    talker: LocalEngine, text_of: Callable[[list[int]], str]
) -> None:
    for text in outputs(talker, JSON, text_of):
        value = json.loads(text)
        assert set(value) == {"name", "age", "tags"}
        assert 0 <= value["age"] <= 120
        assert set(value["tags"]) <= {"a", "b"}


def test_output_under_a_regex_matches_it(
    talker: LocalEngine, text_of: Callable[[list[int]], str]
) -> None:
    pattern = r"[a-f]{3}-\d{2,4}(x|yy)"
    for text in outputs(talker, Grammar("regex", pattern), text_of):
        assert re.fullmatch(pattern, text)


def test_output_under_a_choice_is_one_of_them(
    talker: LocalEngine, text_of: Callable[[list[int]], str]
) -> None:
    choices = ["yes", "no", 'per"haps\n', "żółć"]
    for text in outputs(talker, Grammar("choice", json.dumps(choices)), text_of):
        assert text in choices


def test_output_under_a_lark_grammar_matches_it(
    talker: LocalEngine, text_of: Callable[[list[int]], str]
) -> None:
    source = 'start: "(" (start | "x") ")"'
    params = SamplingParams(max_tokens=200, temperature=0.0, grammar=Grammar("grammar", source))
    steered = SamplingParams(
        max_tokens=200, seed=4, temperature=1.0, grammar=Grammar("grammar", source)
    )
    for output in talker.generate([[5], [6]], [params, steered]):
        text = text_of(output.tokens)
        depth = text.count("(")
        prefix = "(" * depth + "x" + ")" * depth
        assert text == prefix or output.reason == "length"


def test_a_json_object_is_an_object(
    talker: LocalEngine, text_of: Callable[[list[int]], str], model_folder: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    closing = {tokenizer.token_to_id(text): 12.0 for text in '"}]'}
    params = [
        SamplingParams(
            max_tokens=400, seed=seed, grammar=Grammar("json_object"), logit_bias=closing
        )
        for seed in range(6)
    ]
    ended = [o for o in talker.generate([[5]] * 6, params) if o.reason == "stop"]
    assert ended
    for output in ended:
        assert isinstance(json.loads(text_of(output.tokens)), dict)


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_a_resumed_sequence_goes_on_in_its_grammar(cut: int, talker: LocalEngine) -> None:
    params = SamplingParams(max_tokens=300, seed=5, grammar=JSON)
    (whole,) = talker.generate([[5, 6, 7]], params)
    rest = talker.add([5, 6, 7, *whole.tokens[:cut]], params, resume=cut)
    while rest.reason is None:
        talker.step()
    assert whole.tokens[:cut] + rest.tokens == whole.tokens


ENDLESS: dict[str, Any] = {
    "list": {"type": "array", "items": {"type": "string"}, "minItems": 2},
    "map": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
    "tree": {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "x": {}},
             "type": "object", "required": ["next", "x"], "additionalProperties": False},
    "formats": {"properties": {name: {"type": "string", "format": name}
                               for name in ("date-time", "email", "uri")},
                "type": "object", "required": ["email"], "additionalProperties": False},
    "pattern": {"type": "string", "pattern": "^[A-Z]+-[^,]*$"},
    "number": {"type": "number"}, "any": {},
}  # fmt: skip


@pytest.mark.parametrize("flexible", [False, True])
@pytest.mark.parametrize("name", ENDLESS)
def test_json_ends_soon_after_it_begins_to_close(name: str, flexible: bool) -> None:
    grammars = read_grammars(bundled_path(), 2560, frozenset({1}))
    tokenizer = Tokenizer.from_file(str(bundled_path() / "tokenizer.json"))
    grammar = Grammar("json_schema", json.dumps(ENDLESS[name]), flexible)
    for seed in range(20):
        choices = random.Random(seed)
        free, bound = grammars.start(grammar), grammars.start(replace(grammar, close_after=48))
        tokens: list[int] = []
        while not tokens or tokens[-1] != 1:
            allowed = bound.allowed()
            if len(tokens) < 48:
                assert (allowed == free.allowed()).all()
            tokens.append(int(choices.choice(np.flatnonzero(allowed))))
            assert len(tokens) <= 48 + 64
            if free.advance(tokens[-1]) | bound.advance(tokens[-1]):
                break
        json.loads(tokenizer.decode(tokens, skip_special_tokens=True), strict=False)


def test_min_tokens_does_not_break_a_grammar(
    talker: LocalEngine, text_of: Callable[[list[int]], str]
) -> None:
    grammar = Grammar("regex", "[ab]{1,40}")
    params = SamplingParams(max_tokens=60, min_tokens=10, seed=1, grammar=grammar)
    for output in talker.generate([[5]] * 3, params):
        assert re.fullmatch("[ab]{1,40}", text_of(output.tokens))
        assert len(output.tokens) > 10


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("json_schema", "{"), "json_schema is not JSON"),
        (Grammar("json_schema", "[1]"), "json_schema must be a JSON object"),
        (Grammar("json_schema", '{"type": "strange"}'), "strange"),
        (Grammar("regex", "(a"), "regex"),
        (Grammar("choice", "[]"), "at least one"),
        (Grammar("choice", '["a", 1]'), "list of strings"),
        (Grammar("grammar", "start: nothing"), "nothing"),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_a_faulty_grammar_is_refused_by_name(
    grammar: Grammar, message: str, talker: LocalEngine
) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)):
        talker.executor.grammars().start(grammar)


def test_a_model_without_tokenizer_or_end_token_says_so(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        read_grammars(tmp_path, 400, frozenset({1}))
    with pytest.raises(GrammarError, match="end token"):
        Grammars((model_folder / "tokenizer.json").read_text(), 400, frozenset())
