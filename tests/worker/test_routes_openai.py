"""The `openai` package works against a worker as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from worker_process import Worker

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chats_and_their_streams_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6)
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6


def test_completions_have_choices_stops_and_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt="Hello", n=2, logprobs=3, max_tokens=5, temperature=1.0, seed=1
    )
    assert len(reply.choices) == 2
    told = reply.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert len(told.tokens) == 5
    text = reply.choices[0].text
    cut = client.completions.create(model="tiny", prompt="Hello", stop=text[1:3], max_tokens=5)
    assert cut.choices[0].finish_reason == "stop"


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=MESSAGES)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
