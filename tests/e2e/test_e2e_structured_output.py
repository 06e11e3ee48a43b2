"""Replies under schemas end on the bundled model, where the client gives no `max_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Literal

import pytest
from tests.e2e.fleet import Fleet

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Answer(pydantic.BaseModel):
    text: str


class Hue(Enum):
    RED = "red"
    BLUE = "blue"


class Product(pydantic.BaseModel):
    title: str
    price: float
    hue: Hue
    in_stock: bool
    tags: list[str]


class Person(pydantic.BaseModel):
    first_name: str
    email: str | None
    age: int


class Team(pydantic.BaseModel):
    lead: Person
    members: list[Person]


class Counts(pydantic.BaseModel):
    words: dict[str, int]


class Glossary(pydantic.BaseModel):
    entries: dict[str, str]
    note: str | None = None


class Review(pydantic.BaseModel):
    verdict: Literal["good", "bad"]
    scores: list[float]
    reasons: list[list[str]]


class Node(pydantic.BaseModel):
    value: Any
    next: Node | None


QUESTIONS: dict[type[pydantic.BaseModel], str] = {
    Answer: "What is 2 + 2?", Product: "Describe a red chair.", Person: "Who is John of Boston?",
    Team: "Who sails with us?", Counts: "Count the words of a song.", Node: "Go on, and on.",
    Glossary: "Explain ten words of the sea.", Review: "The film was good, but long.",
}  # fmt: skip


@pytest.fixture(scope="module")
def client(bundled: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=bundled.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("seeds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_replies_of_eight_schemas_end_within_256_tokens(client: openai.OpenAI, seeds: int) -> None:
    def end(shape: type[pydantic.BaseModel], **sampling: float) -> None:
        messages = [{"role": "user", "content": QUESTIONS[shape]}]
        reply = client.chat.completions.parse(
            model="tiny", messages=messages, response_format=shape, **sampling
        )
        assert isinstance(reply.choices[0].message.parsed, shape)
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage.completion_tokens <= 256, (shape, sampling)

    sampled = [{"temperature": 1.0, "seed": seed} for seed in range(seeds)]
    with ThreadPoolExecutor(8) as pool:
        trials = [(s, each) for each in [{"temperature": 0.0}, *sampled] for s in QUESTIONS]
        for trial in [pool.submit(end, shape, **each) for shape, each in trials]:
            trial.result()
