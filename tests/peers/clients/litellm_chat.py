"""Programs of litellm as its documentation has them. Argument: URL of a gateway."""

import json
import sys

import litellm

KNOWN = {"model": f"hosted_vllm/{sys.argv[2]}", "api_base": sys.argv[1] + "/v1", "api_key": "any",
         "messages": [{"role": "user", "content": "Where is the market?"}],
         "num_retries": 0}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"celsius": {"type": "boolean"}}, "required": ["celsius"],
    "additionalProperties": False}}}]  # fmt: skip


def refusal(call, kind):
    """Return the error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


whole = litellm.completion(**KNOWN, max_tokens=12, temperature=0)
assert whole.choices[0].message.content
assert whole.usage.completion_tokens <= 12
chunks = litellm.completion(**KNOWN, max_tokens=12, temperature=0, stream=True)
assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
called = litellm.completion(**KNOWN, max_tokens=96, tools=TOOLS, tool_choice="required",
                            parallel_tool_calls=False)  # fmt: skip
[call] = called.choices[0].message.tool_calls
assert isinstance(json.loads(call.function.arguments)["celsius"], bool)
shaped = litellm.completion(**KNOWN, max_tokens=64, response_format={
    "type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"],
        "additionalProperties": False}}})  # fmt: skip
assert "open" in json.loads(shaped.choices[0].message.content)
scored = litellm.completion(**KNOWN, max_tokens=3, logprobs=True, top_logprobs=2)
assert scored.choices[0].logprobs.content
wrong = KNOWN | {"model": "hosted_vllm/nope"}
told = refusal(lambda: litellm.completion(**wrong), litellm.exceptions.NotFoundError)
assert "does not exist" in str(told)
