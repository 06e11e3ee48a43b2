"""Tools through a gateway: the openai client's loop as it is, and streams of calls that move."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from tests.e2e.fleet import Fleet

openai = pytest.importorskip("openai")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Rome", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
            },
        },
    }
]
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it in Rome?"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_the_openai_client_runs_a_whole_loop_of_tools(
    bundled: Fleet, stream: bool, named: bool
) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    with openai.OpenAI(base_url=bundled.url + "/v1", api_key="any", max_retries=0) as client:
        model = client.models.list().data[0].id
        asked = {"model": model, "messages": ASKED, "tools": TOOLS, "parallel_tool_calls": False,
                 "tool_choice": choice if named else "required", "seed": 1}  # fmt: skip
        if stream:
            with client.chat.completions.stream(**asked) as events:
                for _ in events:
                    pass
                reply = events.get_final_completion().choices[0]
        else:
            reply = client.chat.completions.create(**asked).choices[0]
        assert reply.finish_reason == "tool_calls"
        [call] = reply.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather"
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 9
        result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
        message = reply.message.model_dump(include={"role", "content", "tool_calls"})
        answer = client.chat.completions.create(
            model=model,
            messages=[*ASKED, message, result],
            tools=TOOLS,
            max_tokens=8,
            temperature=0,  # a drawn answer may be empty
        )
        assert answer.choices[0].finish_reason in ("length", "stop")
        assert answer.choices[0].message.content


def stream_of_calls(fleet: Fleet, kill_at: int | None) -> tuple[str, list[Any]] | None:
    """Follow a stream of calls; kill its decode worker after some of its chunks.

    None is returned where the stream had ended before its worker could be killed.
    """
    words = {"type": "string", "minLength": 300, "maxLength": 340}
    parameters = {"type": "object", "properties": {"words": words}, "required": ["words"]}
    tools = [{"type": "function", "function": {"name": "say", "parameters": parameters}}]
    calls, pids = list[Any](), list[int]()
    finish = ""
    body = {"messages": ASKED, "tools": tools, "tool_choice": "required", "seed": 11,
            "parallel_tool_calls": False, "temperature": 1.0, "max_tokens": 700, "stream": True,
            "request_id": "moving", "model": "tiny"}  # fmt: skip
    for number, payload in enumerate(fleet.payloads(**body)):
        if payload == "[DONE]":
            break
        chunk = json.loads(payload)
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            assert "<" not in (choice["delta"].get("content") or "")
            finish = choice["finish_reason"] or finish
            for piece in choice["delta"].get("tool_calls", ()):
                if "id" in piece:
                    calls.append(piece)
                else:
                    said = calls[piece["index"]]["function"]
                    said["arguments"] += piece["function"]["arguments"]
        if number == kill_at:
            rows = [row for row in fleet.rows().values() if row["role"] == "decode"]
            pids = [row["pid"] for row in rows if row["decode_requests"]]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    if kill_at is not None:
        assert len(pids) <= 1
        if not pids:
            return None
        fleet.recovered(pids)
    return finish, calls


def test_a_stream_of_calls_survives_the_death_of_its_worker(real: Fleet) -> None:
    whole = stream_of_calls(real, None)
    assert whole is not None
    assert whole[0] == "tool_calls"
    assert len(json.loads(whole[1][0]["function"]["arguments"])["words"]) >= 300
    for kill_at in (1, 12):
        tries = (stream_of_calls(real, kill_at) for _ in range(8))
        assert next((calls for calls in tries if calls is not None), None) == whole
