"""Programs of openai-agents as its documentation has them. Arguments: URL of a gateway, model."""

import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0)
model = OpenAIChatCompletionsModel(model=sys.argv[2], openai_client=client)


class Market(BaseModel):
    """A market."""

    open: bool
    town: Literal["Oslo", "Rome"]


asked = []


@function_tool
def get_weather(celsius: bool) -> str:
    """Tell the weather."""
    asked.append(celsius)
    return "rain"


short = ModelSettings(max_tokens=96, temperature=0)
agent = Agent(name="a", instructions="Be brief.", model=model, model_settings=short)
assert Runner.run_sync(agent, "Where is the market?").final_output
shaped = Agent(name="b", model=model, output_type=Market, model_settings=short)
assert Runner.run_sync(shaped, "Open?").final_output.town in ("Oslo", "Rome")
must = ModelSettings(max_tokens=96, tool_choice="required", parallel_tool_calls=False)
tools = Agent(name="c", model=model, tools=[get_weather], model_settings=must)
assert Runner.run_sync(tools, "What is the weather?", max_turns=3).final_output is not None
assert asked
