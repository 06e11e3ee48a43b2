"""Laws of the model that ships with the package."""

from __future__ import annotations

import enum
import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from pigou.config import EngineConfig
from pigou.models import bundled_path
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import load
from pigou.text.chat_template import ChatTemplate
from pigou.wire.structured_output import schema_grammar
from pigou_lab.recall import KEYS, MARK, VALUES, RecallItem, is_held_out, recall_items

pydantic = pytest.importorskip("pydantic")

FOLDER = bundled_path()
UNSEEN = Path(__file__).parents[2] / "LICENSE"  # English that the model never read


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def read(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return value


def test_the_weights_are_at_most_12_megabytes_and_5_million_parameters() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 12_000_000
    with safe_open(FOLDER / "model.safetensors", framework="pt") as tensors:
        sizes = [prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
    assert 1_000_000 < sum(sizes) <= 5_000_000


def test_the_config_is_a_llama_with_a_context_of_2048(tokenizer: Tokenizer) -> None:
    config = read("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 2048
    assert config["vocab_size"] == tokenizer.get_vocab_size()


def test_begin_and_end_tokens_agree_everywhere(tokenizer: Tokenizer) -> None:
    settings = read("tokenizer_config.json")
    for config in (read("config.json"), read("generation_config.json")):
        for role in ("bos", "eos"):
            assert config[f"{role}_token_id"] == tokenizer.token_to_id(settings[f"{role}_token"])


@given(st.text())
def test_tokens_give_back_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    encodable = text.encode("utf-8", "ignore").decode()
    ids = tokenizer.encode(encodable).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == encodable


@given(st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8")), max_size=4))
def test_the_tokens_of_a_text_are_those_of_its_lines(lines: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    whole = tokenizer.encode("".join(line + "\n" for line in lines)).ids
    assert whole == [i for line in lines for i in tokenizer.encode(line + "\n").ids]


def test_recall_words_are_single_tokens(tokenizer: Tokenizer) -> None:
    for word in (MARK, *KEYS, *(f" {value}" for value in VALUES)):
        assert len(tokenizer.encode(word).ids) == 1, word


def test_the_chat_template_marks_every_turn_and_opens_the_reply() -> None:
    settings = read("tokenizer_config.json")
    names = {role: settings[role] for role in ("bos_token", "eos_token")}
    template = ChatTemplate(settings["chat_template"], names)
    chat = [{"role": "user", "content": "Who's there?"}]
    assert template.render(chat) == "<|begin|><|user|>\nWho's there?<|end|>\n<|assistant|>\n"


def test_recall_items_are_held_out_and_as_far_as_asked(tokenizer: Tokenizer) -> None:
    for item in items(tokenizer, pairs=8, count=5):
        assert all(is_held_out(*pair) for pair in item.pairs)
        last = item.prompt.rindex(f"{MARK}{item.pairs[-1][0]} {item.pairs[-1][1]}\n")
        assert len(tokenizer.encode(item.prompt[last:]).ids) >= 1000
        assert dict(item.pairs)[item.key] == item.answer


def test_recall_survives_a_thousand_tokens_of_unseen_text(tokenizer: Tokenizer) -> None:
    torch.set_num_threads(1)
    asked = [item for pairs in (1, 8, 32) for item in items(tokenizer, pairs, count=8)]
    prompts = [tokenizer.encode(item.prompt).ids for item in asked]
    engine = LocalEngine(load(FOLDER, "fp32"), EngineConfig(blocks=1024))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0))
    replies = [tokenizer.decode(output.tokens) for output in outputs]
    right = sum(reply == f" {item.answer}\n" for reply, item in zip(replies, asked, strict=True))
    assert right >= 0.9 * len(asked)


def items(tokenizer: Tokenizer, pairs: int, count: int) -> list[RecallItem]:
    """Questions over unseen text, a thousand tokens away."""

    def tokens(line: str) -> int:
        return len(tokenizer.encode(line).ids)

    text = UNSEEN.read_text()
    return list(recall_items(text, tokens, pairs=pairs, distance=1000, count=count))


class Address(pydantic.BaseModel, extra="forbid"):
    street: str
    city: str
    zip: int


class Person(pydantic.BaseModel, extra="forbid"):
    first_name: str
    email: str | None
    address: Address


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Product(pydantic.BaseModel, extra="forbid"):
    title: str
    price: float
    colour: Colour
    in_stock: bool
    tags: list[str]


class Step(pydantic.BaseModel, extra="forbid"):
    explanation: str
    output: str


class Sum(pydantic.BaseModel, extra="forbid"):
    steps: list[Step]
    final_answer: str


class Event(pydantic.BaseModel, extra="forbid"):
    name: str
    date: str
    participants: list[str]


class Review(pydantic.BaseModel, extra="forbid"):
    sentiment: Literal["good", "bad", "mixed"]
    confidence: float
    reasons: list[str]


class Order(pydantic.BaseModel, extra="forbid"):
    id: int
    customer: Person
    lines: list[Product]
    note: str | None


class Answer(pydantic.BaseModel, extra="forbid"):
    answer: str


QUESTIONS: dict[type[pydantic.BaseModel], str] = {
    Event: "Alice and Bob are going to a science fair on Friday.", Answer: "What is 2 + 2?",
    Product: "Describe a red chair.", Sum: "Solve 8x + 7 = -23.", Person: "Who is John of Boston?",
    Review: "The film was good but long.", Order: "I take two of the first.", Step: "Go on.",
}  # fmt: skip


def test_replies_that_fit_a_schema_end(tokenizer: Tokenizer) -> None:
    engine = LocalEngine(load(FOLDER, "fp32"), EngineConfig(blocks=2048))

    def ended(params: list[SamplingParams]) -> int:
        prompts = [
            tokenizer.encode(f"<|begin|><|user|>\n{question}<|end|>\n<|assistant|>\n").ids
            for question in QUESTIONS.values()
        ]
        grammars = [
            schema_grammar(shape.model_json_schema(), "response_format") for shape in QUESTIONS
        ]
        asked = [
            (prompt, shape, replace(each, grammar=grammar))
            for each in params
            for prompt, shape, grammar in zip(prompts, QUESTIONS, grammars, strict=True)
        ]
        outputs = engine.generate([prompt for prompt, _, _ in asked], [p for _, _, p in asked])
        whole = 0
        for (_, shape, _), output in zip(asked, outputs, strict=True):
            if output.reason == "stop":
                shape.model_validate_json(tokenizer.decode(output.tokens))
                whole += 1
        return whole

    assert ended([SamplingParams(max_tokens=256, temperature=0.0)]) == 8
    sampled = [SamplingParams(max_tokens=256, temperature=1.0, seed=n) for n in range(5)]
    assert ended(sampled) >= 37
