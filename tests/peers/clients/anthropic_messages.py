"""Programs of the anthropic package. Arguments: URL, model[, reasons]."""

import sys

import anthropic

MODEL, REASONS = sys.argv[2], len(sys.argv) > 3
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}},
          "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOL = {"name": "get_weather", "description": "Tell the weather.", "input_schema": SCHEMA}
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="any", max_retries=0)
USER = {"role": "user", "content": "Where is the market?"}
ASKED = {"model": MODEL, "max_tokens": 96, "messages": [USER], "extra_body": {"temperature": 0}}


def refusal(call, kind):
    """Return the error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


whole = client.messages.create(**ASKED)
assert whole.content[0].type == ("thinking" if REASONS else "text")
assert whole.usage.output_tokens <= 96
with client.messages.stream(**ASKED) as stream:
    streamed = stream.get_final_message()
assert [block.to_dict() for block in streamed.content] == [b.to_dict() for b in whole.content]
assert streamed.usage.output_tokens == whole.usage.output_tokens
if REASONS:
    short = client.messages.create(**ASKED, thinking={"type": "disabled"})
    assert short.content[0].type == "text"

asked = ASKED | {"max_tokens": 400}
called = client.messages.create(**asked, tools=[TOOL], tool_choice={
    "type": "any", "disable_parallel_tool_use": True})  # fmt: skip
[call] = [block for block in called.content if block.type == "tool_use"]
assert (call.name, called.stop_reason) == ("get_weather", "tool_use")
assert call.input["city"] in ("Oslo", "Rome")
result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
turns = [USER, {"role": "assistant", "content": called.content},
         {"role": "user", "content": [result]}]  # fmt: skip
assert client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL]).content
assert client.messages.count_tokens(model=MODEL, messages=[USER]).input_tokens > 5
unknown = ASKED | {"model": "nope"}
told = refusal(lambda: client.messages.create(**unknown), anthropic.NotFoundError)
assert "does not exist" in str(told)
