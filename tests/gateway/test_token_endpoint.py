"""Laws of tokens in, tokens out: replies are those of the text routes, and prompts go as ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.harness import Client, attached
from tests.gateway.stub import Script
from tests.gateway.token_twin import BACKEND, GENERATE, WORDS, TokenTwin, following, plain
from tokenizers.decoders import DecodeStream

from pigou.config import ControlConfig
from pigou.request import Role
from pigou.text.detokenizer import EngineDetokenizer

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Two roads lead to the city — naïve travellers pay twice. "
USER = {"role": "user", "content": TEXT}
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": TEXT}),
    (COMPLETION, {"prompt": [5 + i for i in range(90)]}),
    (CHAT, {"messages": [{"role": "system", "content": "Be brief."}, USER],
            "logprobs": False, "top_logprobs": 0}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "They"}],
            "add_generation_prompt": False, "continue_final_message": True}),
]  # fmt: skip
FEATURES: list[dict[str, Any]] = [
    {}, {"return_token_ids": True}, {"ignore_eos": True, "skip_special_tokens": False},
    {"stop": ["e", " t", "the "]}, {"stop": "a", "include_stop_str_in_output": True},
    {"stop": ["qqq", "zzzzzzzz"]}, {"stop_token_ids": list(range(0, 2000, 7))},
    {"stop_token_ids": list(range(0, 2000, 7)), "include_stop_str_in_output": True},
    {"temperature": 0.7, "seed": 3, "top_k": 5, "user": "u", "n": 1,
     "response_format": {"type": "text"}, "echo": False, "cache_salt": "mine", "priority": 0},
]  # fmt: skip


async def ask(client: Client, path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
    headers = {"x-request-id": "same"}
    async with client.session.post(client.url + path, json=body, headers=headers) as response:
        return plain(response.status, await response.text())


async def test_replies_are_equal_with_token_ids_and_with_text() -> None:
    bodies = [
        (path, {"max_tokens": 40, "stream": stream, **prompt, **feature}
         | ({"stream_options": {"include_usage": True}} if stream else {}))
        for path, prompt in PROMPTS for feature in FEATURES for stream in (False, True)
    ]  # fmt: skip
    bodies.append((COMPLETION, {"prompt": TEXT}))  # 16 tokens, as the API says
    bodies.append((CHAT, {"messages": [USER]}))  # to the end of the context, or its own
    bodies.append((COMPLETION, {"prompt": TEXT, "n": 2, "seed": 1, "max_tokens": 9}))
    replies: dict[bool, list[Any]] = {}
    for as_tokens in (False, True):
        twin = TokenTwin("a")
        async with attached(twin, token_endpoint=as_tokens) as (_, client):
            replies[as_tokens] = [await ask(client, path, body) for path, body in bodies]
        sent = [
            seen.path == GENERATE for seen, (_, body) in zip(twin.seen, bodies, strict=False)
            if body.get("stream") or not body.get("return_token_ids")
        ]  # fmt: skip
        assert set(sent) == {as_tokens}
        if as_tokens:
            for seen, (_, body) in zip(twin.seen, bodies, strict=False):
                if seen.path != GENERATE:
                    continue
                params = seen.body["sampling_params"]
                assert params.get("detokenize", True) is bool(body.get("stop"))
                assert params["temperature"] == body.get("temperature", 0.6), "the server's"
    for (path, body), text, tokens in zip(bodies, *replies.values(), strict=True):
        assert tokens == text, (path, body)
        assert text[0] == 200


#: Requests that are sent as text, by what the endpoint does not carry exactly.
AS_TEXT: list[tuple[str, str, dict[str, Any]]] = [
    ("tools", CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("log-probabilities", CHAT, {"logprobs": True, "top_logprobs": 2}),
    ("log-probabilities", COMPLETION, {"logprobs": 1}),
    ("log-probabilities", COMPLETION, {"logprobs": False}),
    ("prompt log-probabilities", COMPLETION, {"prompt_logprobs": 1}),
    ("structured output", CHAT, {"response_format": {"type": "json_object"}}),
    ("structured output", COMPLETION, {"structured_outputs": {"regex": "a"}}),
    ("echo", COMPLETION, {"echo": True}),
    ("beam search", COMPLETION, {"use_beam_search": True, "n": 2}),
    ("usage in each chunk", COMPLETION,
     {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("cut prompts", COMPLETION, {"truncate_prompt_tokens": 4}),
    ("logit bias", COMPLETION, {"logit_bias": {"5": 1.0}}),
    ("spaces between special tokens", COMPLETION, {"spaces_between_special_tokens": False}),
    ("minimum tokens", COMPLETION, {"min_tokens": 3}),
    ("more than the context", COMPLETION, {"max_tokens": 4000}),
    ("templates of the request's own", CHAT, {"chat_template": "{{ messages }}"}),
    ("reasoning effort", CHAT, {"reasoning_effort": "low"}),
    ("content in parts", CHAT,
     {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
    ("fields of messages", CHAT, {"messages": [{**USER, "name": "n"}]}),
    ("ids in a whole reply", COMPLETION, {"return_token_ids": True}),
    ("unknown fields", COMPLETION, {"novel": 1}),
]  # fmt: skip


async def test_what_the_endpoint_does_not_carry_is_sent_as_text() -> None:
    twin = TokenTwin("a")
    async with attached(twin) as (_, client):
        for what, path, extra in AS_TEXT:
            prompt = {"messages": [USER]} if path == CHAT else {"prompt": TEXT}
            await ask(client, path, {**prompt, "max_tokens": 3, **extra})
            assert {seen.path for seen in twin.seen} == {path}, what
            twin.seen.clear()


@pytest.mark.parametrize(
    ("server", "paths"),
    [
        ({"offers": False}, {COMPLETION, CHAT}),
        ({"offers": None}, {COMPLETION, CHAT}),
        ({"reasoning": True}, {GENERATE, CHAT}),
        ({"cap": 100}, {COMPLETION, CHAT}),
        ({"model": "unknown"}, {COMPLETION, CHAT}),
    ],
)
async def test_servers_whose_endpoint_would_answer_otherwise_get_text(
    server: dict[str, Any], paths: set[str]
) -> None:
    twin = TokenTwin("a", **server)
    async with attached(twin) as (_, client):
        await ask(client, COMPLETION, {"prompt": TEXT})
        await ask(client, CHAT, {"messages": [USER], "max_tokens": 4})
    assert {seen.path for seen in twin.seen} == paths


async def test_what_the_endpoint_refuses_is_asked_once_more_as_text() -> None:
    twin = TokenTwin("a", refuses=400)
    body = {"prompt": TEXT, "max_tokens": 5}
    async with attached(twin) as (_, client):
        for stream in (False, True):
            status, reply = await ask(client, COMPLETION, {**body, "stream": stream})
            assert status == 200
            assert reply[0]["choices"][0]["text"]
        status, reply = await ask(client, COMPLETION, {**body, "temperature": 3})
        assert (status, reply[0]["error"]["message"]) == (400, "too hot")
    assert [seen.path for seen in twin.seen] == [GENERATE, COMPLETION] * 3


async def test_both_legs_get_the_ids_and_the_first_computes_one_token() -> None:
    twins = [TokenTwin("p", role=Role.PREFILL), TokenTwin("d", role=Role.DECODE)]
    control = ControlConfig(policy="least-loaded")  # which splits every prompt
    async with attached(*twins, control=control) as (_, client):
        body = {"prompt": TEXT * 20, "max_tokens": 9, "stop": "q"}
        for stream in (False, True):
            assert (await ask(client, COMPLETION, {**body, "stream": stream}))[0] == 200
    (one, *_), (two, *_) = (twin.seen for twin in twins)
    assert {seen.path for twin in twins for seen in twin.seen} == {GENERATE}
    assert one.body["token_ids"] == two.body["token_ids"]
    assert one.body["sampling_params"]["max_tokens"] == 1
    assert "stop" not in one.body["sampling_params"]
    assert one.body["kv_transfer_params"]["do_remote_decode"] is True
    assert two.body["kv_transfer_params"] == {"ticket": "p"}


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("k", [0, 1, 6])
@pytest.mark.parametrize("fault", ["die_after", "garbage_after", "error_after", "end_after"])
async def test_a_broken_stream_goes_on_elsewhere_with_the_ids_known(
    path: str, k: int, fault: str
) -> None:
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": TEXT}
    wanted = {**prompt, "max_tokens": 30, "stream": True, "temperature": 0, "ignore_eos": True,
              "stream_options": {"include_usage": True}}  # fmt: skip
    whole = TokenTwin("a")
    async with attached(whole) as (_, client):
        expected = await ask(client, path, wanted)
    script = Script(**{fault: k}, times=1)
    twins = [TokenTwin(name, script=script) for name in "ab"]
    async with attached(*twins) as (_, client):
        status, events = await ask(client, path, wanted)
    assert (status, joined(events)) == (200, joined(expected[1]))
    assert events[-3]["usage"]["completion_tokens"] == 30
    sent = [seen.body["token_ids"] for twin in twins for seen in twin.seen]
    assert len(sent) == 2
    short, long = sorted(sent, key=len)
    assert long[: len(short)] == short
    assert all(following(long[:i]) == long[i] for i in range(len(short), len(long)))


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": [{"token_ids": [7] * 6, "finish_reason": "length"}]},
        {"choices": [{"token_ids": [7]}, {"token_ids": [7]}]},
        {"choices": [{"token_ids": ["7"]}]},
        {"choices": [{"token_ids": [2**40]}]},
        {"choices": 5},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_answers_what_was_not_asked_for_is_left(
    reply: dict[str, Any], stream: bool
) -> None:
    async def bad(request: web.Request) -> web.StreamResponse:
        data = json.dumps(reply)
        text = f"data: {data}\n\ndata: [DONE]\n\n" if stream else data
        return web.Response(text=text)

    twins = [TokenTwin("a"), TokenTwin("b")]
    twins[0].routes[GENERATE] = bad
    async with attached(*twins) as (_, client):
        for _ in range(4):
            body = {"prompt": TEXT, "max_tokens": 5, "stream": stream, "ignore_eos": True}
            status, got = await ask(client, COMPLETION, body)
            assert status == 200
            assert joined(got)
    assert len(twins[1].seen) == 4


def joined(events: list[Any]) -> str:
    parts = [
        event["choices"][0] for event in events if isinstance(event, dict) and event["choices"]
    ]
    return "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)


@settings(max_examples=200)
@given(
    prompt=st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=150),
    reply=st.lists(st.integers(0, WORDS - 1), max_size=30),
    skip=st.booleans(),
)
def test_text_after_the_prompts_end_is_text_after_the_prompt(
    prompt: list[int], reply: list[int], skip: bool
) -> None:
    ours = EngineDetokenizer(BACKEND, prompt, skip)
    if ours.exact:
        whole = DecodeStream(ids=prompt, skip_special_tokens=skip)
        for token in reply:
            assert ours.next(token) == (whole.step(BACKEND, token) or "")
    assert ours.next(-1) == ours.next(2**40) == "", "ids that no tokenizer has"
