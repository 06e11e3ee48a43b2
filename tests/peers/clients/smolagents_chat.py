"""Programs of smolagents as its documentation has them. Arguments: URL of a gateway, model."""

import sys

from smolagents import OpenAIServerModel, tool


@tool
def get_weather(celsius: bool) -> str:
    """Tell the weather.

    Args:
        celsius: the unit.
    """
    return f"rain, {celsius}"


model = OpenAIServerModel(
    model_id=sys.argv[2], api_base=sys.argv[1] + "/v1", api_key="any", max_tokens=96
)
asked = [{"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]}]
assert model.generate(asked, stop_sequences=["Observation:"]).content
answer = model.generate(asked, tools_to_call_from=[get_weather])
assert answer.tool_calls[0].function.name == "get_weather"
assert "".join(delta.content or "" for delta in model.generate_stream(asked))
