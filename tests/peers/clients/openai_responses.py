"""Programs of the openai package on Responses and embeddings. Arguments: URL, model[, reasons]."""

import json
import sys

import openai

MODEL, REASONS = sys.argv[2], len(sys.argv) > 3
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}},
          "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0)
create = client.responses.create


def refusal(call, kind):
    """Return the error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


whole = create(model=MODEL, input="Where is the market?", temperature=0, max_output_tokens=96)
assert whole.output_text or REASONS
assert whole.status in ("completed", "incomplete")
assert whole.usage.output_tokens <= 96
stream = list(create(model=MODEL, input="Where is the market?", temperature=0,
                     max_output_tokens=96, stream=True))  # fmt: skip
assert [event.sequence_number for event in stream] == list(range(len(stream)))
assert stream[0].type == "response.created"
assert stream[-1].response.output_text == whole.output_text
if REASONS:
    assert whole.output[0].type == "reasoning"
    assert whole.output[0].content[0].text
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    said = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Where?"}], max_tokens=96, temperature=0
    ).choices[0]
    assert said.message.reasoning_content

called = create(model=MODEL, input="What is the weather?", tools=[TOOL], tool_choice="required",
                parallel_tool_calls=False, temperature=0, max_output_tokens=400)  # fmt: skip
[call] = [item for item in called.output if item.type == "function_call"]
assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
more = create(model=MODEL, previous_response_id=called.id, input=[result], temperature=0,
              max_output_tokens=8)  # fmt: skip
assert more.previous_response_id == called.id
history = [{"role": "user", "content": "What is the weather?"}, *called.output, result]
alone = {"tools": [TOOL], "store": False, "temperature": 0, "max_output_tokens": 8}
assert create(model=MODEL, input=history, **alone).output
form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
shaped = create(model=MODEL, input="Where?", text=form, temperature=0, max_output_tokens=400)
assert json.loads(shaped.output_text)["city"] in ("Oslo", "Rome")
assert client.responses.retrieve(more.id).id == more.id
client.responses.delete(more.id)
told = refusal(lambda: client.responses.retrieve(more.id), openai.NotFoundError)
assert "not found" in str(told)
hosted = [{"type": "web_search"}]
told = refusal(lambda: create(model=MODEL, input="a", tools=hosted), openai.BadRequestError)
assert "web_search" in str(told)

made = client.embeddings.create(model=MODEL, input=["Oslo", "Rome"])
assert [one.index for one in made.data] == [0, 1]
assert abs(sum(x * x for x in made.data[0].embedding) - 1) < 1e-3
