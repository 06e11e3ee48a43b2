"""Programs of the openai package as its documentation has them. Argument: URL of a gateway."""

import asyncio
import json
import sys

import openai

URL, MODEL = sys.argv[1] + "/v1", sys.argv[2]
MESSAGES = [{"role": "user", "content": "Where is the market?"}]
SCHEMA = {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"],
          "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
    "additionalProperties": False}}}]  # fmt: skip
client = openai.OpenAI(base_url=URL, api_key="any", max_retries=0)
create = client.chat.completions.create


def refusal(call, kind):
    """Return the error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


whole = create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
assert whole.choices[0].message.content
assert whole.usage.completion_tokens <= 12
stream = create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0, stream=True,
                stream_options={"include_usage": True})  # fmt: skip
chunks = list(stream)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == whole.choices[0].message.content
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=8) as events:
    assert any(event.type == "content.delta" for event in events)

found = create(model=MODEL, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2)
assert len(found.choices[0].logprobs.content) == found.usage.completion_tokens

form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
shaped = create(model=MODEL, messages=MESSAGES, max_tokens=64, response_format=form)
assert isinstance(json.loads(shaped.choices[0].message.content)["open"], bool)

called = create(model=MODEL, messages=MESSAGES, max_tokens=96, tools=TOOLS, tool_choice="required",
                parallel_tool_calls=False)  # fmt: skip
[call] = called.choices[0].message.tool_calls
assert call.function.name == "get_weather"
assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
assert called.choices[0].finish_reason == "tool_calls"
back = [*MESSAGES, called.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"}]  # fmt: skip
assert create(model=MODEL, messages=back, max_tokens=8, tools=TOOLS).choices
with client.chat.completions.stream(
    model=MODEL,
    messages=MESSAGES,
    max_tokens=96,
    tools=TOOLS,
    tool_choice="required",
    parallel_tool_calls=False,
) as events:
    assert events.get_final_completion().choices[0].message.tool_calls[0].function.name

for call, kind in (
    (lambda: create(model="nope", messages=MESSAGES), openai.NotFoundError),
    (lambda: create(model=MODEL, messages=MESSAGES, n=0), openai.BadRequestError),
    (lambda: create(model=MODEL, messages=MESSAGES, modalities=["audio"]), openai.BadRequestError),
):
    assert refusal(call, kind).body["message"]
told = refusal(lambda: client.moderations.create(input="a"), openai.NotFoundError)
assert told.response.headers["x-should-retry"] == "false"
assert "/v1/chat/completions" in told.body["message"]
scored = client.completions.create(model=MODEL, prompt="The market", max_tokens=0, echo=True,
                                   logprobs=1)  # fmt: skip
assert scored.choices[0].text == "The market"


async def abort() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="any") as other:
        stream = await other.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=200, stream=True
        )
        async for _ in stream:
            break
        await stream.close()


asyncio.run(abort())
